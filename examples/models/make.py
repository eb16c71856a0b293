"""Writes gpt-small-demo.mlir: a small GPT as JAX exports it, with the loss of one batch as its result.

    python3 -m venv venv && venv/bin/pip install jax && venv/bin/python make.py [LAYERS FILE]

The file has the form that users have (StableHLO text with argument names and op names); only the paths of this script
are left out, so that the text is the same wherever it is written.
"""

import re
import sys

import jax
import jax.numpy as jnp

LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 128, 4, 1024, 64, 8


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]


def linear(x, p):
    return x @ p["w"] + p["b"]


def attention(x, p):
    batch, sequence, hidden = x.shape
    qkv = linear(x, p["qkv"]).reshape(batch, sequence, 3, HEADS, hidden // HEADS)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (hidden // HEADS) ** 0.5
    seen = jnp.arange(sequence)[:, None] >= jnp.arange(sequence)[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, sequence, hidden)
    return linear(mixed, p["proj"])


def gpt(params, tokens, labels):
    """Mean cross entropy of the next token; the embedding is also the output matrix."""
    with jax.named_scope("embed"):
        x = params["wte"][tokens] + params["wpe"]
    for i in range(LAYERS):
        p = params[f"h{i}"]
        with jax.named_scope(f"h{i}/attention"):
            x = x + attention(norm(x, p["ln1"]), p)
        with jax.named_scope(f"h{i}/mlp"):
            x = x + linear(jax.nn.gelu(linear(norm(x, p["ln2"]), p["fc"])), p["out"])
    with jax.named_scope("loss"):
        logits = norm(x, params["ln_f"]) @ params["wte"].T
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def shapes():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(inputs, outputs):
        return {"w": array(inputs, outputs), "b": array(outputs)}

    gain = {"g": array(HIDDEN), "b": array(HIDDEN)}
    layer = {
        "ln1": gain,
        "qkv": dense(HIDDEN, 3 * HIDDEN),
        "proj": dense(HIDDEN, HIDDEN),
        "ln2": gain,
        "fc": dense(HIDDEN, 4 * HIDDEN),
        "out": dense(4 * HIDDEN, HIDDEN),
    }
    params = {f"h{i}": layer for i in range(LAYERS)}
    params |= {"wte": array(VOCABULARY, HIDDEN), "wpe": array(SEQUENCE, HIDDEN), "ln_f": gain}
    batch = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    return params, batch, batch


def without_paths(text):
    """Op names stay (`#loc7 = loc("jit(gpt)/h0/mlp/dot_general"(#loc3))`), files and lines go."""
    text = re.sub(r'^(#loc\d* = loc\("[^"]*")\(#loc\d*\)\)$', r"\1)", text, flags=re.M)
    text = re.sub(r'^#loc\d* = loc\((?:"[^"]*":\d|callsite|unknown).*\n', "", text, flags=re.M)
    known = set(re.findall(r"^(#loc\d*) = ", text, flags=re.M))
    return re.sub(r" loc\((#loc\d*)\)", lambda m: m.group(0) if m.group(1) in known else "", text)


if __name__ == "__main__":
    text = without_paths(jax.jit(gpt).lower(*shapes()).as_text(debug_info=True))
    with open(sys.argv[2] if len(sys.argv) > 2 else "gpt-small-demo.mlir", "w") as file:
        file.write(text)
