"""Seconds of a training step of two small models in JAX on this machine's CPU, beside which `altiplano run --device xla:cpu` can be set.

    cpu_jax.py llama|wresnet RECORDED.safetensors [STEPS]

The models are those of the project's recorded graphs `llama-tiny` and `wresnet-tiny`: the file has their weights (`params[...]`), one batch
(`input/...`), the loss and the gradients, which must be found again before anything is timed. A step is loss, gradients and AdamW, jitted as one
function with donated arguments. Prints the median step in milliseconds without the first third. JAX runs on the XLA
that it carries, or with PJRT_NAMES_AND_LIBRARY_PATHS=plugin:FILE.so and JAX_PLATFORMS=plugin on the plugin that Altiplano drives.
"""

import re
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

HEADS, KV_HEADS = 4, 2


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


def rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[2])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    (left, right), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def llama(weights, batch):
    x = weights["embed"][batch["tokens"]]
    samples, length, width = x.shape
    split = lambda t, heads: t.reshape(samples, length, heads, -1).transpose(0, 2, 1, 3)
    causal = jnp.tril(jnp.ones((length, length), bool))
    for name in sorted(key for key in weights if key.startswith("layers")):
        layer = weights[name]
        y = rms_norm(x, layer["n1"]["g"])
        q, k = rotated(split(y @ layer["wq"], HEADS)), rotated(split(y @ layer["wk"], KV_HEADS))
        v = split(y @ layer["wv"], KV_HEADS)
        k, v = (jnp.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
        scores = jnp.where(causal, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -1e9)
        attended = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(samples, length, width)
        x = x + attended @ layer["wo"]
        y = rms_norm(x, layer["n2"]["g"])
        x = x + (jax.nn.silu(y @ layer["w1"]) * (y @ layer["w3"])) @ layer["w2"]
    return cross_entropy(rms_norm(x, weights["norm"]["g"]) @ weights["lm_head"], batch["labels"])


def convolution(x, kernel, stride=1):
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x, weight, bias):
    centred = x - x.mean((0, 1, 2))
    return centred * jax.lax.rsqrt(jnp.square(centred).mean((0, 1, 2)) + 1e-5) * weight + bias


def wresnet(weights, batch):
    x = jax.nn.relu(batch_norm(convolution(batch["images"], weights["stem"], 2), weights["stem_g"], weights["stem_b"]))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for name in sorted(key for key in weights if re.fullmatch(r"s\db\d\d", key)):
        block = weights[name]
        stride = 2 if name.endswith("b00") and not name.startswith("s0") else 1
        y = jax.nn.relu(batch_norm(convolution(x, block["w1"]), block["g1"], block["b1"]))
        y = jax.nn.relu(batch_norm(convolution(y, block["w2"], stride), block["g2"], block["b2"]))
        y = batch_norm(convolution(y, block["w3"]), block["g3"], block["b3"])
        if "wd" in block:
            x = batch_norm(convolution(x, block["wd"], stride), block["gd"], block["bd"])
        x = jax.nn.relu(x + y)
    return cross_entropy(x.mean((1, 2)) @ weights["fc_w"] + weights["fc_b"], batch["labels"])


def tree(named):
    """Nested dictionaries of names such as `params['layers000']['wq']`."""
    whole = {}
    for name, value in named.items():
        *path, last = re.findall(r"\['([^']+)'\]", name)
        at = whole
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return whole


def adamw(weights, moments, gradients, step, rate=1e-3, decay=0.01):
    def update(w, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        scaled = (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)
        return w - rate * (scaled + decay * w), m, v

    updated = jax.tree.map(update, weights, *moments, gradients)
    first = lambda i: jax.tree.map(lambda t: t[i], updated, is_leaf=lambda t: isinstance(t, tuple))
    return first(0), (first(1), first(2))


def main():
    loss = {"llama": llama, "wresnet": wresnet}[sys.argv[1]]
    recorded = load_file(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 60
    weights = tree({name: value for name, value in recorded.items() if name.startswith("params")})
    expected = tree({name: value for name, value in recorded.items() if name.startswith("grad/params")})
    batch = {name.removeprefix("input/"): value for name, value in recorded.items() if name.startswith("input/")}

    found, gradients = jax.jit(jax.value_and_grad(loss))(weights, batch)
    np.testing.assert_allclose(found, recorded["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, moments, batch, number):
        found, gradients = jax.value_and_grad(loss)(weights, batch)
        return *adamw(weights, moments, gradients, number), found

    weights = jax.tree.map(jnp.asarray, weights)
    moments = tuple(jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    times = []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        weights, moments, found = step(weights, moments, batch, jnp.float32(number))
        found.block_until_ready()
        times.append(time.perf_counter() - start)
    print(f"{statistics.median(times[steps // 3 :]) * 1e3:.2f} ms a step, loss {float(found):.4f}")


main()
