"""Seconds of a training step of GPT-2's architecture in JAX on a GPU.

    gpu_jax.py LAYERS WIDTH HEADS BATCH SEQUENCE f32|bf16 cudnn|xla [STEPS]

With bf16, weights and AdamW's state are kept in f32 and cast for the forward pass, as `altiplano run --precision bf16` has it. Attention is
cuDNN's kernel or XLA's decomposition. Prints the median step in milliseconds and the peak memory in GB.
"""

import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 50264  # 50257, rounded up to a multiple of 8, as plans pad it


def initial(layers, width, length):
    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 2))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    norm = lambda: (jnp.ones(width), jnp.zeros(width))
    block = lambda: {
        "norm1": norm(),
        "qkv": (normal(width, 3 * width), jnp.zeros(3 * width)),
        "out": (normal(width, width), jnp.zeros(width)),
        "norm2": norm(),
        "up": (normal(width, 4 * width), jnp.zeros(4 * width)),
        "down": (normal(4 * width, width), jnp.zeros(width)),
    }
    return {
        "tokens": normal(VOCABULARY, width),
        "positions": normal(length, width),
        "blocks": [block() for _ in range(layers)],
        "norm": norm(),
    }


def layer_norm(x, weight, bias):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * weight + bias


def loss(weights, ids, labels, heads, dtype, attention):
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x = weights["tokens"][ids] + weights["positions"][: ids.shape[1]]
    batch, length, width = x.shape
    for block in weights["blocks"]:
        w, b = block["qkv"]
        q, k, v = jnp.split(layer_norm(x, *block["norm1"]) @ w + b, 3, axis=-1)
        q, k, v = (t.reshape(batch, length, heads, width // heads) for t in (q, k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        w, b = block["out"]
        x = x + attended.reshape(batch, length, width) @ w + b
        w, b = block["up"]
        up = jax.nn.gelu(layer_norm(x, *block["norm2"]) @ w + b, approximate=True)
        w, b = block["down"]
        x = x + up @ w + b
    logits = (layer_norm(x, *weights["norm"]) @ weights["tokens"].T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


@partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=(0,))
def step(state, ids, labels, heads, dtype, attention):
    weights, first, second, count = state
    value, gradient = jax.value_and_grad(loss)(weights, ids, labels, heads, dtype, attention)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    by = lambda m, v: (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
    weights = jax.tree.map(lambda w, m, v: w - 1e-4 * (by(m, v) + 0.01 * w), weights, first, second)
    return (weights, first, second, count), value


def main(layers, width, heads, batch, length, precision, attention, steps=12):
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[precision]
    jax.config.update("jax_default_matmul_precision", "highest" if precision == "f32" else "default")
    weights = initial(layers, width, length)
    zeros = lambda: jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros(), zeros(), jnp.float32(0))
    ids = np.random.default_rng(1).integers(0, 50257, (batch, length + 1), dtype=np.int32)
    ids, labels = jax.device_put(ids[:, :-1]), jax.device_put(ids[:, 1:])
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        state, value = step(state, ids, labels, heads, dtype, attention)
        value.block_until_ready()
        times.append(time.perf_counter() - start)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(f"{1e3 * statistics.median(times[steps // 3 :]):.2f} {peak / 1e9:.2f}")


if __name__ == "__main__":
    numbers, names = [int(n) for n in sys.argv[1:6]], sys.argv[6:8]
    main(*numbers, *names, *[int(n) for n in sys.argv[8:]])
