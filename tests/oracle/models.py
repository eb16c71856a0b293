"""Writes models in configurations drawn by seed, with loss and gradients that JAX computes: NAME.mlir and NAME.safetensors.

    python models.py DIRECTORY SEED

Two families: a GPT (layer norms, learnt positions, separate q, k and v, tied embedding) and a Llama (RMS norms, rotary
positions, grouped queries, gated feed-forward, an output matrix of its own).
"""

import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

jax.config.update("jax_default_matmul_precision", "highest")


def attend(q, k, v):
    """q, k, v of batch x heads x sequence x size; each position sees those before it."""
    sequence, size = q.shape[2:]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * size**-0.5
    seen = jnp.tril(jnp.ones((sequence, sequence), bool))
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1), v)


def split_heads(x, heads):
    batch, sequence, hidden = x.shape
    return x.reshape(batch, sequence, heads, hidden // heads).transpose(0, 2, 1, 3)


def join_heads(x):
    batch, heads, sequence, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, sequence, heads * size)


def cross_entropy(logits, labels):
    scores = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).mean()


def gpt(config):
    def layer_norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def loss(params, tokens, labels):
        x = params["embedding"][tokens] + params["positions"]
        for block in params["blocks"]:
            h = layer_norm(x, block["norm1"])
            q, k, v = (split_heads(h @ block[n] + block[n + "_bias"], config["heads"]) for n in "qkv")
            x = x + join_heads(attend(q, k, v)) @ block["o"]
            h = layer_norm(x, block["norm2"])
            x = x + jax.nn.relu(h @ block["up"] + block["up_bias"]) @ block["down"]
        return cross_entropy(layer_norm(x, params["norm"]) @ params["embedding"].T, labels)

    hidden, wide = config["hidden"], config["wide"]
    norm = {"scale": (hidden,), "bias": (hidden,)}
    block = {n: (hidden, hidden) for n in "qkvo"} | {n + "_bias": (hidden,) for n in "qkv"}
    block |= {"up": (hidden, wide), "up_bias": (wide,), "down": (wide, hidden), "norm1": norm, "norm2": norm}
    shapes = {
        "embedding": (config["vocabulary"], hidden),
        "positions": (config["sequence"], hidden),
        "blocks": [block] * config["layers"],
        "norm": norm,
    }
    return loss, shapes


def llama(config):
    def rms_norm(x, scale):
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def rotate(x):
        sequence, size = x.shape[2:]
        angles = jnp.arange(sequence)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = [even * jnp.cos(angles) - odd * jnp.sin(angles), even * jnp.sin(angles) + odd * jnp.cos(angles)]
        return jnp.stack(turned, axis=-1).reshape(x.shape)

    def loss(params, tokens, labels):
        x = params["embedding"][tokens]
        for block in params["blocks"]:
            h = rms_norm(x, block["norm1"])
            q = rotate(split_heads(h @ block["q"], config["heads"]))
            k = rotate(split_heads(h @ block["k"], config["groups"]))
            v = split_heads(h @ block["v"], config["groups"])
            repeats = config["heads"] // config["groups"]
            k, v = (jnp.repeat(t, repeats, axis=1) for t in (k, v))
            x = x + join_heads(attend(q, k, v)) @ block["o"]
            h = rms_norm(x, block["norm2"])
            x = x + (jax.nn.silu(h @ block["gate"]) * (h @ block["up"])) @ block["down"]
        return cross_entropy(rms_norm(x, params["norm"]) @ params["head"], labels)

    hidden, wide = config["hidden"], config["wide"]
    narrow = hidden // config["heads"] * config["groups"]
    block = {"q": (hidden, hidden), "k": (hidden, narrow), "v": (hidden, narrow), "o": (hidden, hidden)}
    block |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    block |= {"norm1": (hidden,), "norm2": (hidden,)}
    shapes = {
        "embedding": (config["vocabulary"], hidden),
        "blocks": [block] * config["layers"],
        "norm": (hidden,),
        "head": (hidden, config["vocabulary"]),
    }
    return loss, shapes


def draw(choose):
    heads = choose([4, 8])
    return {
        "heads": heads,
        "groups": heads // 2,
        "hidden": heads * choose([8, 16]),
        "wide": choose([96, 160, 192]),
        "layers": choose([2, 3, 5]),
        "vocabulary": choose([160, 256, 400]),
        "sequence": choose([16, 24, 32]),
        "batch": choose([8, 16]),
    }


def write(directory, name, family, seed):
    random_state = random.Random(f"{name} {seed}")
    config = draw(random_state.choice)
    loss, shapes = family(config)
    numbers = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(lambda s: numbers.normal(0, 0.1, s).astype(np.float32), shapes, is_leaf=is_shape)
    # Norm gains near one, so that signals neither vanish nor grow.
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: 1 + x if "scale" in jax.tree_util.keystr(path) or x.ndim == 1 and name == "llama" else x, params
    )
    ids = (config["batch"], config["sequence"])
    tokens, labels = (numbers.integers(0, config["vocabulary"], ids, dtype=np.int32) for _ in range(2))

    with open(f"{directory}/{name}.mlir", "w") as file:
        file.write(jax.jit(loss).lower(params, tokens, labels).as_text(debug_info=True))
    value, gradients = jax.jit(jax.value_and_grad(loss))(params, tokens, labels)
    tensors = {"loss": np.asarray(value).reshape(1), "input/tokens": tokens, "input/labels": labels}
    for prefix, tree in [("params", params), ("grad/params", gradients)]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            tensors[prefix + jax.tree_util.keystr(path)] = np.ascontiguousarray(leaf)
    save_file(tensors, f"{directory}/{name}.safetensors")
    print(f"{name}: {config}")


if __name__ == "__main__":
    directory, seed = sys.argv[1], int(sys.argv[2])
    write(directory, "gpt", gpt, seed)
    write(directory, "llama", llama, seed)
