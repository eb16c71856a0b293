"""Transformers in several forms, recurrent networks, and a state-space model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from . import (
    KEY,
    Weights,
    attention,
    attention_weights,
    block,
    block_weights,
    causal,
    cross_entropy,
    feed_forward,
    ids,
    layer_norm,
)


def encoder_decoder(numbers):
    w, size, heads, vocabulary = Weights(numbers), 16, 2, 40

    def loss(params, inputs, targets, labels):
        memory = params["source"][inputs] + params["source_positions"]
        for p in params["encoder"]:
            memory = block(memory, p, heads)
        x = params["target"][targets] + params["target_positions"]
        for p in params["decoder"]:
            h = layer_norm(x, p["norm"])
            x = x + attention(h, h, p["own"], heads, causal(x.shape[1]))
            x = x + attention(layer_norm(x, p["norm1"]), memory, p["attention"], heads)
            x = x + feed_forward(layer_norm(x, p["norm2"]), p)
        return cross_entropy(layer_norm(x, params["norm"]) @ params["target"].T, labels)

    params = {
        "source": w(vocabulary, size, fan_in=16),
        "source_positions": w(6, size, fan_in=16),
        "target": w(vocabulary, size, fan_in=16),
        "target_positions": w(5, size, fan_in=16),
        "encoder": [block_weights(w, size, 32) for _ in range(2)],
        "decoder": [
            block_weights(w, size, 32) | {"norm": w.norm(size), "own": attention_weights(w, size)} for _ in range(2)
        ],
        "norm": w.norm(size),
    }
    inputs = {"inputs": ids(numbers, vocabulary, 4, 6), "targets": ids(numbers, vocabulary, 4, 5)}
    return loss, params, inputs | {"labels": ids(numbers, vocabulary, 4, 5)}, "f32"


def scanned(numbers, rematerialise=False, compute=None):
    """All layers are one loop over weights that are stacked."""
    w, size, heads, vocabulary, layers = Weights(numbers), 16, 2, 40, 3
    layer = functools.partial(block, heads=heads, seen=causal(6))
    layer = jax.checkpoint(layer) if rematerialise else layer

    def loss(params, tokens, labels):
        cast = lambda tree: tree if compute is None else jax.tree.map(lambda t: t.astype(compute), tree)
        x = cast(params["embedding"])[tokens] + cast(params["positions"])
        x, _ = lax.scan(lambda x, p: (layer(x, cast(p)), None), x, params["blocks"])
        return cross_entropy(layer_norm(x, cast(params["norm"])) @ cast(params["embedding"]).T, labels)

    blocks = [block_weights(w, size, 32) for _ in range(layers)]
    params = {
        "embedding": w(vocabulary, size, fan_in=16),
        "positions": w(6, size, fan_in=16),
        "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks),
        "norm": w.norm(size),
    }
    inputs = {"tokens": ids(numbers, vocabulary, 4, 6), "labels": ids(numbers, vocabulary, 4, 6)}
    return loss, params, inputs, "f32" if compute is None else "bf16"


def mixed_precision(numbers):
    """Weights in single precision, products in bf16."""
    w, size, heads, vocabulary = Weights(numbers), 16, 2, 40

    def loss(params, tokens, labels):
        half = jax.tree.map(lambda t: t.astype(jnp.bfloat16), params)
        x = half["embedding"][tokens] + half["positions"]
        for p in half["blocks"]:
            x = block(x, p, heads, causal(6))
        return cross_entropy(
            layer_norm(x.astype(jnp.float32), params["norm"]).astype(jnp.bfloat16) @ half["head"], labels
        )

    params = {
        "embedding": w(vocabulary, size, fan_in=16),
        "positions": w(6, size, fan_in=16),
        "blocks": [block_weights(w, size, 32) for _ in range(2)],
        "norm": w.norm(size),
        "head": w(size, vocabulary),
    }
    inputs = {"tokens": ids(numbers, vocabulary, 4, 6), "labels": ids(numbers, vocabulary, 4, 6)}
    return loss, params, inputs, "bf16"


def state_space(numbers):
    """A gated linear recurrence, computed as an associative scan, after a causal convolution of each channel."""
    w, size, state, vocabulary, length = Weights(numbers), 12, 4, 30, 8

    def mix(x, p):
        kernel = p["kernel"][:, None, :]
        dims = ("NHC", "HIO", "NHC")
        h = jax.nn.silu(
            lax.conv_general_dilated(
                x @ p["in"], kernel, (1,), ((2, 0),), dimension_numbers=dims, feature_group_count=size
            )
        )
        dt = jax.nn.softplus(h @ p["dt"])
        decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
        drive = dt[..., None] * h[..., None] * (h @ p["b"])[:, :, None, :]

        def join(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = lax.associative_scan(join, (decay, drive), axis=1)
        y = jnp.einsum("blcs,bls->blc", states, h @ p["c"]) + h * p["d"]
        return (y * jax.nn.silu(x @ p["gate"])) @ p["out"]

    def loss(params, tokens, labels):
        x = params["embedding"][tokens]
        for p in params["blocks"]:
            x = x + mix(layer_norm(x, p["norm"]), p)
        return cross_entropy(layer_norm(x, params["norm"]) @ params["head"], labels)

    def weights():
        dense = {n: w(size, size) for n in ("in", "dt", "gate", "out")}
        dense |= {"b": w(size, state), "c": w(size, state), "a": w(size, state), "d": w(size), "kernel": w(3, size)}
        return dense | {"norm": w.norm(size)}

    params = {
        "embedding": w(vocabulary, size, fan_in=4),
        "blocks": [weights() for _ in range(2)],
        "norm": w.norm(size),
        "head": w(size, vocabulary),
    }
    inputs = {"tokens": ids(numbers, vocabulary, 4, length), "labels": ids(numbers, vocabulary, 4, length)}
    return loss, params, inputs, "f32"


def lstm(numbers):
    w, size, vocabulary = Weights(numbers), 10, 30

    def loss(params, tokens, labels):
        x = params["embedding"][tokens]

        def step(state, x):
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ params["gates"] + params["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], size))
        _, hs = lax.scan(step, (start, start), x.swapaxes(0, 1))
        return cross_entropy(hs.swapaxes(0, 1) @ params["head"], labels)

    params = {
        "embedding": w(vocabulary, size, fan_in=1),
        "gates": w(2 * size, 4 * size),
        "bias": w(4 * size),
        "head": w(size, vocabulary),
    }
    inputs = {"tokens": ids(numbers, vocabulary, 4, 7), "labels": ids(numbers, vocabulary, 4, 7)}
    return loss, params, inputs, "f32"


class Dropout(nn.Module):
    """A transformer of Flax's own layers, with dropout."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(40, 16)(tokens) + self.param("positions", nn.initializers.normal(0.1), (6, 16))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            h = nn.LayerNorm()(x)
            h = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(h, mask=mask)
            x = x + nn.Dropout(0.2, deterministic=False)(h)
            h = nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.2, deterministic=False)(h)
        return nn.Dense(40)(nn.LayerNorm()(x))


def flax_dropout(numbers):
    model = Dropout()
    tokens, labels = ids(numbers, 40, 4, 6), ids(numbers, 40, 4, 6)
    keys = {"params": jax.random.PRNGKey(1), "dropout": jax.random.PRNGKey(2)}
    params = jax.tree.map(np.asarray, model.init(keys, tokens)["params"])

    def loss(params, tokens, labels, key):
        logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, params, {"tokens": tokens, "labels": labels, "key": KEY}, "f32"


def conditional(numbers):
    """Branches: one that an argument chooses, one that the values choose, and one in a loop over layers."""
    w, size = Weights(numbers), 12

    def loss(params, x, y, step):
        h = jnp.tanh(x @ params["in"])
        h = lax.cond(step < 100, lambda h: h @ params["early"], lambda h: jnp.tanh(h @ params["late"]), h)
        h = lax.cond(h.sum() > 0, lambda h: h * params["scale"], lambda h: -h, h)

        def layer(h, p):
            return lax.cond(p["skip"][0] > 0, lambda h: h, lambda h: h + jnp.sin(h @ p["w"]), h), None

        h, _ = lax.scan(layer, h, params["layers"])
        return ((h @ params["out"] - y) ** 2).mean()

    layers = {"w": w(3, size, size, fan_in=size), "skip": np.array([[-1.0], [1.0], [-0.5]], np.float32)}
    params = {
        "in": w(5, size),
        "early": w(size, size),
        "late": w(size, size),
        "scale": w.gain(size),
        "layers": layers,
        "out": w(size, 3),
    }
    inputs = {"x": w(8, 5, fan_in=1), "y": w(8, 3, fan_in=1), "step": np.array(7, np.int32)}
    return loss, params, inputs, "f32"


def windows(numbers):
    """Attention within sliding windows, after a prefix, within blocks, and within documents that the batch names."""
    w, size, heads, vocabulary, length = Weights(numbers), 16, 4, 40, 12

    def loss(params, tokens, documents, labels):
        at = jnp.arange(length)
        back = at[:, None] - at
        masks = [
            (back >= 0) & (back < 4),
            (back >= 0) | (at < 3),
            (back >= 0) & (at[:, None] // 4 == at // 4),
            (back >= 0) & (documents[:, None, :, None] == documents[:, None, None, :]),
        ]
        x = params["embedding"][tokens]
        for p, seen in zip(params["blocks"], masks):
            x = block(x, p, heads, seen)
        p = params["grouped"]
        h = layer_norm(x, p["norm"])
        q, k, v = (jnp.einsum("btc,chd->bthd", h, p[n]) for n in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
        x = x + jnp.einsum("bthd,hdc->btc", mixed, p["o"])
        return cross_entropy(layer_norm(x, params["norm"]) @ params["embedding"].T, labels)

    of_keys = (size, heads // 2, size // heads)
    params = {
        "embedding": w(vocabulary, size, fan_in=16),
        "blocks": [block_weights(w, size, 32) for _ in range(4)],
        "grouped": {
            "norm": w.norm(size),
            "q": w(size, heads, size // heads, fan_in=16),
            "k": w(*of_keys, fan_in=16),
            "v": w(*of_keys, fan_in=16),
            "o": w(heads, size // heads, size, fan_in=16),
        },
        "norm": w.norm(size),
    }
    inputs = {"tokens": ids(numbers, vocabulary, 4, length), "documents": np.sort(ids(numbers, 3, 4, length), axis=1)}
    return loss, params, inputs | {"labels": ids(numbers, vocabulary, 4, length)}, "f32"


MODELS = {
    "encoder-decoder": encoder_decoder,
    "scanned": scanned,
    "scanned-remat": functools.partial(scanned, rematerialise=True),
    "scanned-bf16": functools.partial(scanned, compute=jnp.bfloat16),
    "mixed-precision": mixed_precision,
    "state-space": state_space,
    "lstm": lstm,
    "flax-dropout": flax_dropout,
    "conditional": conditional,
    "windows": windows,
}
