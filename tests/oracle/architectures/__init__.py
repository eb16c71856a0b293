"""Small models: each function takes a random generator and gives the loss, weights, inputs by name, and "f32" or "bf16"."""

import jax
import jax.numpy as jnp
import numpy as np

KEY = np.array([17, 4711], np.uint32)


class Weights:
    """Draws weights that keep signals at their size."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __call__(self, *shape, fan_in=None):
        fan_in = fan_in or (np.prod(shape[:-1]) if len(shape) > 1 else 4)
        return self.numbers.normal(0, fan_in**-0.5, shape).astype(np.float32)

    def gain(self, *shape):
        return (1 + self.numbers.normal(0, 0.1, shape)).astype(np.float32)

    def norm(self, size):
        return {"scale": self.gain(size), "bias": self(size)}


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def split_heads(x, heads):
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(-2, -3)


def attention(x, memory, p, heads, seen=None):
    q, k, v = (split_heads(t @ p[n], heads) for t, n in [(x, "q"), (memory, "k"), (memory, "v")])
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5)
    if seen is not None:
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    mixed = (jax.nn.softmax(scores, axis=-1) @ v).swapaxes(-2, -3)
    return mixed.reshape(x.shape) @ p["o"]


def attention_weights(w, size):
    return {n: w(size, size) for n in "qkvo"}


def feed_forward(x, p):
    return jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"]


def feed_forward_weights(w, size, wide):
    return {"up": w(size, wide), "up_bias": w(wide), "down": w(wide, size)}


def block_weights(w, size, wide):
    return {
        "norm1": w.norm(size),
        "attention": attention_weights(w, size),
        "norm2": w.norm(size),
        **feed_forward_weights(w, size, wide),
    }


def block(x, p, heads, seen=None):
    h = layer_norm(x, p["norm1"])
    x = x + attention(h, h, p["attention"], heads, seen)
    return x + feed_forward(layer_norm(x, p["norm2"]), p)


def causal(length):
    return jnp.tril(jnp.ones((length, length), bool))


def cross_entropy(logits, labels):
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).mean()


def ids(numbers, bound, *shape):
    return numbers.integers(0, bound, shape, dtype=np.int32)
