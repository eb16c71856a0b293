"""Models of images: convolutions, pooling, batch statistics, patches, noise."""

import jax
import jax.numpy as jnp
from jax import lax

from . import KEY, Weights, block, block_weights, cross_entropy, ids, layer_norm

DIMS = ("NHWC", "HWIO", "NHWC")


def conv(x, kernel, stride=1, groups=1, padding="SAME"):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=DIMS, feature_group_count=groups
    )


def max_pool(x, size, stride):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), "SAME")


def average_pool(x, size):
    summed = lax.reduce_window(x, 0.0, lax.add, (1, size, size, 1), (1, size, size, 1), "VALID")
    return summed / (size * size)


def batch_norm(x, p):
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def group_norm(x, p, groups=2):
    grouped = x.reshape(*x.shape[:3], groups, -1)
    centred = grouped - grouped.mean((1, 2, 4), keepdims=True)
    normed = centred * lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return normed.reshape(x.shape) * p["scale"] + p["bias"]


def resnet(numbers):
    w = Weights(numbers)

    def loss(params, images, labels):
        x = jax.nn.relu(batch_norm(conv(images, params["stem"], 2), params["stem_norm"]))
        x = max_pool(x, 3, 2)
        for p in params["blocks"]:
            stride = 2 if "short" in p else 1
            h = jax.nn.relu(batch_norm(conv(x, p["first"], stride), p["norm1"]))
            h = batch_norm(conv(h, p["second"]), p["norm2"])
            short = conv(x, p["short"], stride) if "short" in p else x
            x = jax.nn.relu(h + short)
        return cross_entropy(x.mean((1, 2)) @ params["head"] + params["bias"], labels)

    def weights(size, to):
        p = {"first": w(3, 3, size, to), "second": w(3, 3, to, to), "norm1": w.norm(to), "norm2": w.norm(to)}
        return p if size == to else p | {"short": w(1, 1, size, to)}

    params = {
        "stem": w(5, 5, 3, 8),
        "stem_norm": w.norm(8),
        "blocks": [weights(8, 8), weights(8, 12)],
        "head": w(12, 10),
        "bias": w(10),
    }
    return loss, params, {"images": w(4, 16, 16, 3, fan_in=1), "labels": ids(numbers, 10, 4)}, "f32"


def unet(numbers):
    w = Weights(numbers)

    def loss(params, images, targets):
        levels, x = [], images
        for p in params["down"]:
            x = jax.nn.silu(group_norm(conv(x, p["conv"]), p["norm"]))
            levels.append(x)
            x = conv(x, p["shrink"], 2)
        x = jax.nn.silu(group_norm(conv(x, params["middle"]), params["middle_norm"]))
        for p in params["up"]:
            x = lax.conv_transpose(x, p["grow"], (2, 2), "SAME", dimension_numbers=DIMS)
            x = jnp.concatenate([x, levels.pop()], axis=-1)
            x = jax.nn.silu(group_norm(conv(x, p["conv"]), p["norm"]))
        return ((conv(x, params["out"]) - targets) ** 2).mean()

    down = [{"conv": w(3, 3, a, b), "norm": w.norm(b), "shrink": w(3, 3, b, b)} for a, b in [(3, 6), (6, 8)]]
    up = [{"grow": w(2, 2, a, b), "conv": w(3, 3, b + s, b), "norm": w.norm(b)} for a, b, s in [(8, 8, 8), (8, 6, 6)]]
    params = {"down": down, "middle": w(3, 3, 8, 8), "middle_norm": w.norm(8), "up": up, "out": w(1, 1, 6, 3)}
    return loss, params, {"images": w(2, 8, 8, 3, fan_in=1), "targets": w(2, 8, 8, 3, fan_in=1)}, "f32"


def vision_transformer(numbers):
    w, size = Weights(numbers), 16

    def loss(params, images, labels):
        x = conv(images, params["patches"], 4, padding="VALID").reshape(images.shape[0], -1, size)
        first = jnp.broadcast_to(params["class"], (images.shape[0], 1, size))
        x = jnp.concatenate([first, x], axis=1) + params["positions"]
        for p in params["blocks"]:
            x = block(x, p, 2)
        return cross_entropy(layer_norm(x[:, 0], params["norm"]) @ params["head"], labels)

    params = {
        "patches": w(4, 4, 3, size),
        "class": w(1, 1, size, fan_in=4),
        "positions": w(5, size, fan_in=16),
        "blocks": [block_weights(w, size, 32) for _ in range(2)],
        "norm": w.norm(size),
        "head": w(size, 10),
    }
    return loss, params, {"images": w(4, 8, 8, 3, fan_in=1), "labels": ids(numbers, 10, 4)}, "f32"


def mobile(numbers):
    """Depthwise convolutions, squeeze and excitation, average pooling."""
    w = Weights(numbers)

    def loss(params, images, labels):
        x = conv(images, params["stem"])
        for p in params["blocks"]:
            h = jax.nn.relu6(group_norm(conv(x, p["expand"]), p["norm"]))
            h = jax.nn.relu6(conv(h, p["depthwise"], groups=h.shape[-1]))
            gate = jax.nn.sigmoid(jax.nn.relu(h.mean((1, 2)) @ p["squeeze"]) @ p["excite"])
            x = x + conv(h * gate[:, None, None], p["project"])
        return cross_entropy(average_pool(x, 2).reshape(x.shape[0], -1) @ params["head"], labels)

    def weights():
        p = {"expand": w(1, 1, 6, 12), "norm": w.norm(12), "depthwise": w(3, 3, 1, 12), "project": w(1, 1, 12, 6)}
        return p | {"squeeze": w(12, 4), "excite": w(4, 12)}

    params = {"stem": w(3, 3, 3, 6), "blocks": [weights() for _ in range(2)], "head": w(6 * 9, 10)}
    return loss, params, {"images": w(4, 6, 6, 3, fan_in=1), "labels": ids(numbers, 10, 4)}, "f32"


def autoencoder(numbers):
    """A variational autoencoder: noise is drawn inside, from a key that is an argument."""
    w = Weights(numbers)

    def loss(params, x, key):
        h = jax.nn.elu(x @ params["encode"] + params["bias"])
        mean, deviation = h @ params["mean"], h @ params["deviation"]
        z = mean + jnp.exp(0.5 * deviation) * jax.random.normal(key, mean.shape)
        y = jax.nn.elu(z @ params["decode"]) @ params["out"]
        divergence = -0.5 * (1 + deviation - mean**2 - jnp.exp(deviation)).sum(-1)
        return (((x - y) ** 2).sum(-1) + divergence).mean()

    params = {
        "encode": w(9, 12),
        "bias": w(12),
        "mean": w(12, 3),
        "deviation": w(12, 3),
        "decode": w(3, 12),
        "out": w(12, 9),
    }
    return loss, params, {"x": w(8, 9, fan_in=1), "key": KEY}, "f32"


MODELS = {"resnet": resnet, "unet": unet, "vit": vision_transformer, "mobile": mobile, "autoencoder": autoencoder}
