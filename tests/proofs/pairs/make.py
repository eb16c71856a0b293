"""Writes the pairs of StableHLO programs beside this file: `NAME.seq.mlir` for one device, `NAME.ranks.mlir` for each of
several, and `NAME.VARIANT.mlir` for per-rank programs with a fault. Needs JAX; the files are written on CPU devices.

    python make.py
"""

import os
import pathlib

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

HERE = pathlib.Path(__file__).parent
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
FOUR = Mesh(np.array(jax.devices()[:4]).reshape(4), ("model",))
RATE = 0.1


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def write(name, function, arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    (HERE / f"{name}.mlir").write_text(text)


def pair(name, sequential, arguments, specs, **ranks):
    """Writes a pair. `specs` are the layouts of arguments and results, `ranks` the per-rank programs by variant.

    JAX runs all of them on random arguments: a variant must be right unless its name begins with `faulty`."""
    write(f"{name}.seq", sequential, arguments)
    given = [sample(argument, seed) for seed, argument in enumerate(arguments)]
    wanted = jax.jit(sequential)(*given)
    mesh, inputs, outputs = specs
    for variant, function in ranks.items():
        mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        write(f"{name}.{variant}", mapped, arguments)
        close = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-4, atol=1e-5), wanted, jax.jit(mapped)(*given))
        assert all(jax.tree.leaves(close)) != variant.startswith("faulty"), (name, variant)


def sample(argument, seed):
    key = jax.random.key(seed)
    if argument.dtype == jnp.int32:
        return jax.random.randint(key, argument.shape, 0, 8)
    return jax.random.normal(key, argument.shape)


def mean_square(prediction, y):
    return jnp.mean((prediction - y) ** 2)


# A multilayer perceptron: the first weight is split by columns, the second by rows.


def mlp(x, w1, b1, w2, b2):
    return jnp.tanh(x @ w1 + b1) @ w2 + b2


def mlp_ranks(x, w1, b1, w2, b2):
    return lax.psum(jnp.tanh(x @ w1 + b1) @ w2, "model") + b2


def mlp_shared_bias(x, w1, b1, w2, b2):
    return lax.psum(jnp.tanh(x @ w1 + b1) @ w2 + b2 / 4, "model")


def mlp_first_bias(x, w1, b1, w2, b2):
    first = lax.axis_index("model") == 0
    return lax.psum(jnp.tanh(x @ w1 + b1) @ w2 + jnp.where(first, b2, 0.0), "model")


pair(
    "mlp",
    mlp,
    (f32(8, 12), f32(12, 16), f32(16), f32(16, 12), f32(12)),
    (MESH, (P("data"), P(None, "model"), P("model"), P("model"), P()), P("data")),
    ranks=mlp_ranks,
    shared_bias=mlp_shared_bias,
    first_bias=mlp_first_bias,
)

# The loss and the gradients of a linear model, with the batch split.


def linear_loss(w, b, x, y):
    return mean_square(x @ w + b, y)


def linear(w, b, x, y):
    loss, (dw, db) = jax.value_and_grad(linear_loss, argnums=(0, 1))(w, b, x, y)
    return loss, dw, db


def linear_pmean(w, b, x, y):
    return jax.tree.map(lambda g: lax.pmean(g, ("data", "model")), linear(w, b, x, y))


def linear_psum(w, b, x, y):
    return jax.tree.map(lambda g: lax.psum(g / 8, ("data", "model")), linear(w, b, x, y))


def linear_counted(w, b, x, y, count=None):
    """Means of sums, over a number of elements that devices count together."""
    count = lax.psum(jnp.sum(jnp.ones_like(y)), ("data", "model")) if count is None else count
    loss = lambda w, b: jnp.sum((x @ w + b - y) ** 2)
    value, (dw, db) = jax.value_and_grad(loss, argnums=(0, 1))(w, b)
    return jax.tree.map(lambda g: lax.psum(g, ("data", "model")) / count, (value, dw, db))


pair(
    "linear",
    linear,
    (f32(12, 6), f32(6), f32(16, 12), f32(16, 6)),
    (MESH, (P(), P(), P(("data", "model")), P(("data", "model"))), (P(), P(), P())),
    ranks=linear_pmean,
    psum=linear_psum,
    counted=linear_counted,
    faulty_count=lambda w, b, x, y: linear_counted(w, b, x, y, count=2),
)

# A norm on a split sequence, gathered for a split product whose summands are scattered again.


def norm(x, scale):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale


def sequence(x, scale, w1, w2):
    return x + jnp.tanh(norm(x, scale) @ w1) @ w2


def sequence_ranks(x, scale, w1, w2):
    whole = lax.all_gather(norm(x, scale), "model", axis=1, tiled=True)
    summands = jnp.tanh(whole @ w1) @ w2
    return x + lax.psum_scatter(summands, "model", scatter_dimension=1, tiled=True)


pair(
    "sequence",
    sequence,
    (f32(4, 8, 12), f32(12), f32(12, 16), f32(16, 12)),
    (MESH, (P("data", "model"), P(), P(None, "model"), P("model")), P("data", "model")),
    ranks=sequence_ranks,
)

# A norm whose features are split.


def split_norm_ranks(x, scale):
    mean = lax.psum(jnp.sum(x, axis=-1, keepdims=True), "model") / 12
    variance = lax.psum(jnp.sum((x - mean) ** 2, axis=-1, keepdims=True), "model") / 12
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale


pair(
    "norm",
    norm,
    (f32(4, 12), f32(12)),
    (MESH, (P("data", "model"), P("model")), P("data", "model")),
    ranks=split_norm_ranks,
)

# The cross-entropy of logits whose vocabulary is split.


def entropy(h, w, labels):
    logits = h @ w
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    hot = labels[:, None] == jnp.arange(32)[None, :]
    label = jnp.sum(jnp.where(hot, shifted, 0.0), axis=-1)
    return jnp.mean(jnp.log(total) - label)


def entropy_ranks(h, w, labels):
    logits = h @ w
    most = lax.pmax(jnp.max(logits, axis=-1, keepdims=True), "model")
    shifted = logits - most
    total = lax.psum(jnp.sum(jnp.exp(shifted), axis=-1), "model")
    own = jnp.arange(8) + lax.axis_index("model") * 8
    hot = labels[:, None] == own[None, :]
    label = lax.psum(jnp.sum(jnp.where(hot, shifted, 0.0), axis=-1), "model")
    return lax.pmean(jnp.mean(jnp.log(total) - label), "data")


pair(
    "entropy",
    entropy,
    (f32(8, 12), f32(12, 32), i32(8)),
    (MESH, (P("data"), P(None, "model"), P("data")), P()),
    ranks=entropy_ranks,
)

# An attention block whose heads are split.


def attention(x, wq, wk, wv, wo):
    batch, length, width = x.shape
    q, k, v = (jnp.reshape(x @ w, (batch, length, -1, 4)) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
    mask = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    scores = jnp.where(mask, scores, -1e9)
    scores = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
    return jnp.reshape(mixed, (batch, length, -1)) @ wo


def attention_ranks(x, wq, wk, wv, wo):
    return lax.psum(attention(x, wq, wk, wv, wo), "model")


pair(
    "attention",
    attention,
    (f32(4, 6, 12), *[f32(12, 16)] * 3, f32(16, 12)),
    (MESH, (P("data"), *[P(None, "model")] * 3, P("model")), P("data")),
    ranks=attention_ranks,
)

# A training step over both axes. The sums of the backward pass are written by hand, as Megatron does.


def step(w1, w2, x, y):
    def loss(w1, w2):
        return mean_square(jnp.tanh(x @ w1) @ w2, y)

    value, (d1, d2) = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
    return value, w1 - RATE * d1, w2 - RATE * d2


@jax.custom_vjp
def reduced(x):
    return lax.psum(x, "model")


reduced.defvjp(lambda x: (reduced(x), None), lambda _, g: (g,))


def step_of(gradients):
    def ranks(w1, w2, x, y):
        def loss(w1, w2):
            return mean_square(reduced(jnp.tanh(x @ w1) @ w2), y)

        value, (d1, d2) = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
        return lax.pmean(value, "data"), w1 - RATE * gradients(d1), w2 - RATE * gradients(d2)

    return ranks


STEP = (
    (f32(12, 16), f32(16, 6), f32(8, 12), f32(8, 6)),
    (MESH, (P(None, "model"), P("model"), P("data"), P("data")), (P(), P(None, "model"), P("model"))),
)
pair("step", step, *STEP, ranks=step_of(lambda g: lax.pmean(g, "data")))

# The same step as JAX differentiates it, with the sums that it inserts itself.
arguments, (mesh, inputs, outputs) = STEP


def automatic(w1, w2, x, y):
    def loss(w1, w2):
        return lax.pmean(mean_square(lax.psum(jnp.tanh(x @ w1) @ w2, "model"), y), "data")

    value, (d1, d2) = jax.value_and_grad(loss, argnums=(0, 1))(w1, w2)
    return value, w1 - RATE * d1, w2 - RATE * d2


write("step.automatic", jax.shard_map(automatic, mesh=mesh, in_specs=inputs, out_specs=outputs), arguments)

# Exchanges, gathers over two axes, and slices at a device's index.


def exchange(x, y):
    return jnp.tanh(x) * 3, jnp.sin(y), jnp.exp(y)


def exchange_ranks(axes):
    def ranks(x, y):
        columns = lax.all_to_all(jnp.tanh(x), "model", split_axis=1, concat_axis=0, tiled=True)
        whole = lax.all_gather(jnp.sin(y), axes, axis=0, tiled=True)
        own = lax.dynamic_slice_in_dim(whole, lax.axis_index("model") * 4, 4)
        again = lax.all_gather(y, axes, axis=0, tiled=True)
        return columns * 3, own, jnp.exp(again)

    return ranks


pair(
    "exchange",
    exchange,
    (f32(8, 8), f32(16, 3)),
    (MESH, (P("model"), P(("data", "model"))), (P(None, "model"), P("model"), P())),
    ranks=exchange_ranks(("data", "model")),
    faulty=exchange_ranks(("model", "data")),
)

# Masks and slices by a device's index, written in several ways.


def positions(x):
    return jnp.sum(x, 0) + jnp.arange(8.0)


def masked(where):
    return lambda x: lax.psum(jnp.sum(x, 0) + where(jnp.arange(8.0), lax.axis_index("model")), "model")


def choice(x):
    own = lax.cond(lax.axis_index("model") == 0, lambda v: v, lambda v: v * 2, jnp.sum(x, 0))
    return lax.psum(own, "model") + jnp.arange(8.0)


def sliced(start):
    def ranks(x):
        own = lax.dynamic_slice_in_dim(jnp.arange(8.0), start(lax.axis_index("model")), 2)
        return lax.psum(jnp.sum(x, 0), "model") + lax.all_gather(own, "model", tiled=True)

    return ranks


pair(
    "positions",
    positions,
    (f32(8, 8),),
    (MESH, P("model"), P()),
    ranks=masked(lambda v, index: jnp.where(index != 0, 0.0, v)),
    product=masked(lambda v, index: v * (index == 0)),
    sliced=sliced(lambda index: index * 2),
    faulty_axis=masked(lambda v, index: jnp.where(lax.axis_index("data") == 0, v, 0.0)),
    faulty_mask=masked(lambda v, index: jnp.where(index <= 1, v, 0.0)),
    faulty_choice=choice,
    faulty_slice=sliced(lambda index: (3 - index) * 2),
    faulty_start=sliced(lambda index: index * 2 - 1),
    faulty_reduction=lambda x: lax.pmax(jnp.sum(x, 0), "model") + jnp.arange(8.0),
)

# Three faults of public reports, rebuilt small, each with the program that mends it.

# NVIDIA/Megatron-LM#1446: with a split sequence, each rank has the gradient of a norm's scale from its own positions alone,
# and that of the last norm was not summed over the ranks.


def norm_loss(scale, x, w, y):
    return mean_square(norm(x, scale) @ w, y)


def sequential_norm_step(scale, x, w, y):
    loss, d = jax.value_and_grad(norm_loss)(scale, x, w, y)
    return loss, scale - RATE * d


def norm_step(reduce):
    def ranks(scale, x, w, y):
        loss, d = jax.value_and_grad(norm_loss)(scale, x, w, y)
        return lax.pmean(loss, "model"), scale - RATE * reduce(d)

    return ranks


pair(
    "megatron_1446",
    sequential_norm_step,
    (f32(12), f32(8, 4, 12), f32(12, 6), f32(8, 4, 6)),
    (FOUR, (P(), P("model"), P(), P("model")), (P(), P())),
    faulty=norm_step(lambda d: d),
    mended=norm_step(lambda d: lax.pmean(d, "model")),
)

# jax-ml/jax#3970: the gradient of a loss that is summed over devices. The sum inside the derivative becomes a sum of equal
# cotangents, so each device has a multiple of the gradient of its own data.


def weighted(w, data):
    return jnp.sum((w**2 + 1) * data)


def weighted_step(w, data):
    return weighted(w, data), jax.grad(weighted)(w, data)


def weighted_faulty(w, data):
    loss = lambda w: lax.psum(weighted(w, data), "model")
    return loss(w), jax.grad(loss)(w)


def weighted_mended(w, data):
    return lax.psum(weighted(w, data), "model"), lax.psum(jax.grad(weighted)(w, data), "model")


pair(
    "jax_3970",
    weighted_step,
    (f32(), f32(8)),
    (FOUR, (P(), P("model")), (P(), P())),
    faulty=weighted_faulty,
    mended=weighted_mended,
)

# deepspeedai/DeepSpeed#7773: gradients of microbatches are summed where the step needs their mean.
MICROBATCHES = 2


def accumulated(w, x, y, scale, reduce=lambda g: g):
    total = jnp.zeros_like(w)
    for m in range(MICROBATCHES):
        total = total + reduce(jax.grad(lambda w: mean_square(jnp.tanh(x[m] @ w), y[m]))(w))
    return w - RATE * total * scale


def accumulated_ranks(scale):
    return lambda w, x, y: accumulated(w, x, y, scale, lambda g: lax.pmean(g, "model"))


pair(
    "deepspeed_7773",
    lambda w, x, y: accumulated(w, x, y, 1 / MICROBATCHES),
    (f32(12, 6), f32(MICROBATCHES, 8, 12), f32(MICROBATCHES, 8, 6)),
    (FOUR, (P(), P(None, "model"), P(None, "model")), P()),
    faulty=accumulated_ranks(1.0),
    mended=accumulated_ranks(1 / MICROBATCHES),
)

# The older form of a region, between custom calls, with layouts that name devices rather than axes.
jax.config.update("jax_use_shardy_partitioner", False)
ARGUMENTS = (f32(8, 12), f32(12, 16), f32(16), f32(16, 12), f32(12))
SPECS = (P("data"), P(None, "model"), P("model"), P("model"), P())
write("mlp.older", jax.shard_map(mlp_ranks, mesh=MESH, in_specs=SPECS, out_specs=P("data"), check_vma=False), ARGUMENTS)
