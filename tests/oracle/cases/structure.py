"""Shapes, reductions, products, and functions around functions: what is not elementwise and chooses no elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import BF16, E4M3, E5M2, F16, F32, F64, SPECIAL, Case, Draw

draw = Draw("structure")


def movement():
    x = draw.normal(2, 3, 4)
    n = draw.integers(-9, 9, 2, 3, 4)
    yield Case(
        "reshape",
        lambda x: (x.reshape(6, 4), x.reshape(2, 12), x.reshape(24), x.reshape(2, 1, 3, 4)),
        (x,),
        gradient=(0,),
    )
    yield Case("transpose", lambda x: (x.T, x.transpose(1, 0, 2), x.transpose(2, 0, 1)), (x,), gradient=(0,))
    yield Case(
        "broadcast",
        lambda x: (
            jnp.broadcast_to(x[:, None], (2, 5, 3, 4)),
            lax.broadcast(x, (2,)),
            lax.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)),
        ),
        (x,),
        gradient=(0,),
    )
    yield Case("broadcast_permuted", lambda x: lax.broadcast_in_dim(x, (3, 4, 2), (2, 0, 1)), (x,))
    yield Case("broadcast_size_one", lambda x: jnp.broadcast_to(x[:, :1], (2, 3, 4)), (x,), gradient=(0,))
    yield Case("reverse", lambda x: (lax.rev(x, (0,)), lax.rev(x, (1, 2)), x[:, ::-1]), (x,), gradient=(0,))
    yield Case("reverse_int", lambda x: lax.rev(x, (2,)), (n,))
    yield Case(
        "slice",
        lambda x: (lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 2)), x[1:, ::2, 1:3], x[:, -1]),
        (x,),
        gradient=(0,),
    )
    yield Case(
        "concatenate",
        lambda x, y: (lax.concatenate([x, y, x], 1), jnp.stack([x, x], -1), jnp.hstack([x, y])),
        (x, draw.normal(2, 2, 4)),
        gradient=(0, 1),
    )
    for name, config in {
        "edges": [(1, 2, 0), (0, 1, 0), (0, 0, 0)],
        "negative": [(-1, 1, 0), (0, -1, 0), (2, -2, 0)],
        "interior": [(0, 0, 2), (1, 0, 1), (0, 0, 0)],
        "interior_negative": [(-1, 0, 1), (0, -2, 2), (-1, -1, 1)],
    }.items():
        yield Case(f"pad_{name}", lambda x, v: lax.pad(x, v, config), (x, np.array(0.5, F32)), gradient=(0, 1))
        yield Case(f"pad_{name}_int", lambda x: lax.pad(x, 7, config), (n,))
    for mode in ["edge", "reflect", "symmetric", "wrap", "linear_ramp", "mean"]:
        yield Case(
            f"pad_mode_{mode}", lambda x: jnp.pad(x, ((1, 1), (2, 1), (0, 3)), mode=mode), (x,), 4, 4, gradient=(0,)
        )
    yield Case(
        "iota",
        lambda: (
            lax.iota(jnp.int32, 5),
            lax.broadcasted_iota(jnp.float32, (3, 4), 1),
            lax.broadcasted_iota(jnp.uint8, (3, 4), 0),
            jnp.arange(0, 1, 0.25),
            jnp.eye(4, 5, 1),
            jnp.tri(4),
            jnp.linspace(0, 1, 7),
        ),
        (),
        4,
    )
    yield Case("roll", lambda x: (jnp.roll(x, 1, 0), jnp.roll(x, (-1, 2), (1, 2)), jnp.roll(x, 5)), (x,), gradient=(0,))
    yield Case(
        "tile_repeat",
        lambda x: (
            jnp.tile(x, (1, 2, 1)),
            jnp.repeat(x, 2, axis=1),
            jnp.repeat(x, np.array([1, 0, 2]), axis=1, total_repeat_length=3),
        ),
        (x,),
        gradient=(0,),
    )
    yield Case("constants", lambda x: x[0] * np.arange(12, dtype=F32).reshape(3, 4) + np.float32(np.pi), (x,))
    yield Case(
        "constants_special",
        lambda x: (
            jnp.where(x > 0, np.inf, x),
            jnp.where(x > 0, np.nan, -np.inf),
            x + np.array([1e-30, -1e30, 3.4e38, 1.17549435e-38], F32),
        ),
        (x,),
    )
    many = draw.normal(64, 64)
    yield Case("constants_hex", lambda x: x + many, (x[0, 0, 0],))
    yield Case(
        "constants_types",
        lambda x: (
            x + np.array([1, 2, 250], np.uint8),
            np.array([True, False, True]),
            np.array([1.5, -2], BF16),
            np.array([-(2**31), 2**31 - 1], np.int32),
            np.array([2**32 - 1], np.uint32),
        ),
        (np.array([1, 2, 3], np.uint8),),
    )
    yield Case(
        "triangles",
        lambda x: (jnp.tril(x), jnp.triu(x, 1), jnp.diagonal(x, axis1=1, axis2=2), jnp.trace(x, axis1=1, axis2=2)),
        (x,),
        4,
        4,
        gradient=(0,),
    )
    yield Case(
        "split_stack",
        lambda x: (
            *jnp.split(x, 2, axis=2),
            jnp.moveaxis(x, 0, 2),
            jnp.swapaxes(x, 0, 1),
            jnp.squeeze(x[:1]),
            jnp.expand_dims(x, (0, 2)),
        ),
        (x,),
        gradient=(0,),
    )


def reductions():
    x = draw.normal(3, 4, 5)
    n = draw.integers(-9, 9, 3, 4, 5)
    d = draw.distinct(3, 4, 5)
    yield Case(
        "reduce_sum", lambda x: (x.sum(), x.sum(0), x.sum((0, 2)), x.sum(1, keepdims=True)), (x,), 8, 4, gradient=(0,)
    )
    yield Case(
        "reduce_max_min", lambda x: (x.max(), x.max(0), x.min((1, 2)), jnp.ptp(x, axis=1)), (d,), 2, gradient=(0,)
    )
    # Where the greatest meet, the gradient is shared among them.
    ties = draw.integers(0, 3, 4, 6).astype(F32)
    yield Case("reduce_max_ties", lambda x: (x.max(1), x.min(0)), (ties,), gradient=(0,))
    yield Case("reduce_product", lambda x: (x.prod(1), x.prod((0, 2))), (x,), 16, 4, gradient=(0,))
    zeros = x.copy()
    zeros[0, 1, 2] = zeros[1, 2, 3] = zeros[1, 1, 3] = 0
    yield Case("reduce_product_zeros", lambda x: x.prod(1), (zeros,), 16, 4, gradient=(0,))
    yield Case(
        "reduce_int",
        lambda n: (
            n.sum(0),
            n.max(1),
            n.min(2),
            n.prod(2),
            lax.reduce_and(n, (0,)),
            lax.reduce_or(n, (1,)),
            lax.reduce_xor(n, (2,)),
        ),
        (n,),
    )
    yield Case(
        "reduce_int8", lambda n: (n.sum(0), n.max(1), lax.reduce(n, np.int8(0), lax.add, (0,))), (n.astype(np.int8),)
    )
    yield Case("reduce_uint", lambda n: (n.sum(), n.max(1), n.min()), (n.astype(np.uint32),))
    yield Case("reduce_bool", lambda p: (p.any(0), p.all(1), p.sum(), lax.reduce_xor(p, (0,))), (draw.boolean(4, 5),))
    for dtype, name in [(BF16, "bf16"), (F16, "f16")]:
        h = draw.normal(4, 8, dtype=dtype)
        yield Case(f"reduce_{name}", lambda h: (h.sum(0), h.mean(), h.max(1), h.var(1)), (h,), 8, 4)
        yield Case(f"reduce_{name}", lambda h: (h.sum(0), h.mean()), (h,), 8, 4, gradient=(0,), gradient_only=True)
    yield Case(
        "reduce_init",
        lambda x: (
            lax.reduce(x, np.float32(2), lax.add, (1,)),
            lax.reduce(x, np.float32(0.5), lax.max, (0, 2)),
            lax.reduce(x, np.float32(3), lax.mul, (2,)),
        ),
        (x,),
        16,
        8,
    )
    yield Case("reduce_init_computed", lambda x, v: lax.reduce(x, v, lax.add, (1,)), (x, np.array(1.5, F32)), 8, 4)
    yield Case("reduce_custom", lambda x: lax.reduce(x, np.float32(-np.inf), jnp.logaddexp, (1,)), (x,), 16, 8)
    yield Case(
        "reduce_custom_norm",
        lambda x: lax.reduce(abs(x), np.float32(0), lambda a, b: jnp.sqrt(a * a + b * b), (0, 2)),
        (x,),
        16,
        4,
    )
    yield Case(
        "reduce_several",
        lambda x, y: lax.reduce((x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        (x, draw.normal(3, 4, 5)),
        16,
        8,
    )

    def welford(a, b):
        (mean, m2, count), (mean2, m22, count2) = a, b
        total = count + count2
        safe = jnp.maximum(total, 1)
        delta = mean2 - mean
        return mean + delta * count2 / safe, m2 + m22 + delta**2 * count * count2 / safe, total

    yield Case(
        "reduce_welford", lambda x: lax.reduce((x, x * 0, x * 0 + 1), (np.float32(0),) * 3, welford, (1,)), (x,), 32, 8
    )
    special = np.stack([SPECIAL, SPECIAL[::-1]])
    yield Case("reduce_special", lambda x: (x.max(0), x.min(0), x.sum(1), x[:, :4].prod(1)), (special,))
    yield Case(
        "moments",
        lambda x: (x.mean(0), x.var(1), x.std((0, 1)), jnp.linalg.norm(x, axis=-1), jnp.median(x, axis=1)),
        (x,),
        16,
        8,
        gradient=(0,),
    )
    yield Case("reduce_empty_dimension", lambda x: (x.sum(0), x.max(0, initial=-5.0)), (np.zeros((0, 3), F32),))
    yield Case("reduce_f64", lambda x: (x.sum(0), x.mean(), x.max(1)), (x.astype(F64),), 8, 4, x64=True)


def products():
    a, b = draw.normal(4, 6), draw.normal(6, 5)
    p, q = draw.normal(3, 4, 6), draw.normal(3, 6, 5)
    yield Case(
        "dot", lambda a, b: (a @ b, a[0] @ b, a @ b[:, 0], jnp.dot(a[0], b[:, 0])), (a, b), 8, 4, gradient=(0, 1)
    )
    yield Case("dot_batch", lambda p, q: p @ q, (p, q), 8, 4, gradient=(0, 1))
    dims = (((0, 2), (2, 0)), ((1,), (1,)))
    yield Case(
        "dot_two_contractions",
        lambda a, b: lax.dot_general(a, b, dims),
        (draw.normal(2, 3, 4), draw.normal(4, 3, 2)),
        8,
        4,
        gradient=(0, 1),
    )
    dims = (((3,), (1,)), ((2, 0), (0, 3)))
    yield Case(
        "dot_batch_anywhere",
        lambda a, b: lax.dot_general(a, b, dims),
        (draw.normal(2, 3, 4, 5), draw.normal(4, 5, 6, 2)),
        8,
        4,
        gradient=(0, 1),
    )
    yield Case("dot_outer", lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), (a[0], b[0]), gradient=(0, 1))
    yield Case(
        "dot_elementwise", lambda a, b: lax.dot_general(a, b, (((), ()), ((0, 1), (0, 1)))), (a, a + 1), gradient=(0, 1)
    )
    for dtype, name in [(BF16, "bf16"), (F16, "f16")]:
        x, y = a.astype(dtype), b.astype(dtype)
        yield Case(f"dot_{name}", lambda a, b: a @ b, (x, y), 4, 4, gradient=(0, 1))
        yield Case(f"dot_{name}_to_f32", lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), (x, y), 8, 8)
        yield Case(
            f"dot_{name}_to_f32",
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32),
            (x, y),
            4,
            4,
            gradient=(0, 1),
            gradient_only=True,
        )
    yield Case(
        "dot_f8", lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), (a.astype(E4M3), b.astype(E5M2)), 8, 8
    )
    i, j = draw.integers(-100, 100, 4, 6, dtype=np.int8), draw.integers(-100, 100, 6, 5, dtype=np.int8)
    yield Case("dot_i8_to_i32", lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32), (i, j))
    yield Case("dot_i8", lambda a, b: a @ b, (i, j))
    yield Case("dot_i32", lambda a, b: a @ b, (i.astype(np.int32) * 100000, j.astype(np.int32)))
    yield Case(
        "dot_mixed",
        lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32),
        (a.astype(BF16), b),
        8,
        8,
    )
    yield Case("dot_f64", lambda a, b: a @ b, (a.astype(F64), b.astype(F64)), 8, 4, x64=True)
    yield Case(
        "dot_bool",
        lambda p, q: jnp.einsum("ij,jk->ik", p.astype(jnp.int32), q.astype(jnp.int32)) > 0,
        (draw.boolean(3, 4), draw.boolean(4, 2)),
    )
    yield Case("dot_algorithm", lambda a, b: lax.dot(a, b, precision=lax.DotAlgorithmPreset.F32_F32_F32), (a, b), 8, 4)
    yield Case("dot_default_precision", lambda a, b: lax.dot(a, b, precision=lax.Precision.DEFAULT), (a, b), 8, 4)
    groups = np.array([2, 0, 3, 1], np.int32)
    yield Case(
        "ragged_dot",
        lambda x, w, g: lax.ragged_dot(x, w, g),
        (draw.normal(6, 4), draw.normal(4, 4, 3), groups),
        8,
        4,
        gradient=(0, 1),
    )
    for number, (spec, *shapes) in enumerate(
        [
            ("ij,jk->ik", (3, 4), (4, 5)),
            ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
            ("bqhd,bkhd->bhqk", (2, 4, 3, 5), (2, 6, 3, 5)),
            ("ii->i", (4, 4)),
            ("ij->ji", (3, 4)),
            ("ijk->j", (2, 3, 4)),
            ("ij,ij->", (3, 4), (3, 4)),
            ("i,j,k->ijk", (2,), (3,), (4,)),
            ("bij,bjk,bkl->bil", (2, 3, 4), (2, 4, 5), (2, 5, 3)),
            ("gsec,gsm->egcm", (2, 3, 4, 2), (2, 3, 5)),
            ("...ij,...j->...i", (2, 3, 4), (2, 4)),
        ]
    ):
        operands = tuple(draw.normal(*s) for s in shapes)
        yield Case(
            f"einsum_{number}", lambda *xs: jnp.einsum(spec, *xs), operands, 16, 8, gradient=tuple(range(len(shapes)))
        )
    yield Case(
        "kron_tensordot",
        lambda a, b: (
            jnp.kron(a[:2, :2], b[:2, :2]),
            jnp.tensordot(a, b, 1),
            jnp.outer(a[0], b[0]),
            jnp.vdot(a[:, 0], b[:4, 0]),
        ),
        (a, b),
        8,
        4,
        gradient=(0, 1),
    )


def functions():
    x, y = draw.normal(4, 6), draw.normal(4, 6)
    norm = lambda x: lax.composite(lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), "my.rms_norm")(x)
    yield Case("composite", norm, (x,), 8, 4)
    attributes = lax.composite(lambda x, *, scale: x * scale, "my.scale", version=2)
    yield Case("composite_attributes", lambda x: attributes(x, scale=np.float32(2.5)), (x,))

    @jax.custom_vjp
    def clipped(x):
        return x * 2

    # Its gradient is another than the function's, so only the function itself can be looked at before tracing it.
    clipped.defvjp(lambda x: (x * 2, ()), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    yield Case("custom_vjp", clipped, (x,))
    yield Case("custom_vjp_traced", lambda x: jax.grad(lambda x: (clipped(x) ** 2).sum())(x), (x,))

    @jax.custom_jvp
    def softplus(x):
        return jnp.log1p(jnp.exp(x))

    softplus.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))
    yield Case("custom_jvp", softplus, (x,), 8, 2, gradient=(0,))
    yield Case("stop_gradient", lambda x: x * lax.stop_gradient(x), (x,))
    yield Case("checkpoint", jax.checkpoint(lambda x, y: jnp.sin(x @ y.T) @ x), (x, y), 16, 8, gradient=(0, 1))
    yield Case(
        "checkpoint_traced",
        lambda x, y: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x @ y.T))(x).sum())(x),
        (x, y),
        16,
        8,
    )
    yield Case("optimization_barrier", lambda x, y: lax.optimization_barrier((x + 1, y * 2)), (x, y), gradient=(0, 1))
    yield Case(
        "nested_jit",
        lambda x, y: jax.jit(lambda a: jnp.tanh(a))(x) + jax.jit(lambda a: jnp.tanh(a))(y),
        (x, y),
        8,
        4,
        gradient=(0, 1),
    )
    yield Case("vmap", lambda x, y: jax.vmap(lambda a, b: jnp.dot(a, b) * a)(x, y), (x, y), 16, 8, gradient=(0, 1))
    yield Case("jvp", lambda x, y: jax.jvp(jnp.tanh, (x,), (y,)), (x, y), 8, 2)
    yield Case("hessian", lambda x: jax.hessian(lambda v: (v**3).sum() * v[0])(x[0]), (x,), 16, 4)
    yield Case(
        "normalisations",
        lambda x: (
            jax.nn.softmax(x, axis=0),
            x / jnp.linalg.norm(x, axis=1, keepdims=True),
            (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5),
        ),
        (x,),
        16,
        8,
        gradient=(0,),
    )
    q, k, v = (draw.normal(2, 5, 3, 4) for _ in range(3))
    yield Case(
        "attention",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        (q, k, v),
        16,
        8,
        gradient=(0, 1, 2),
    )
    yield Case(
        "attention_bf16",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
        tuple(t.astype(BF16) for t in (q, k, v)),
        8,
        4,
        gradient=(0, 1, 2),
    )
    yield Case(
        "polynomials",
        lambda x: (
            jnp.polyval(np.array([1.0, -2, 3], F32), x),
            jnp.vander(x[0], 3),
            jnp.convolve(x[0], x[1], "same"),
            jnp.interp(x[0], np.arange(4, dtype=F32), x[:, 0]),
        ),
        (x,),
        16,
        8,
    )
    square = draw.normal(4, 4)
    yield Case("matrix_power", lambda a: jnp.linalg.matrix_power(a, 3), (square,), 16, 8, gradient=(0,))
    names = lambda x, y: checkpoint_name(jnp.tanh(x), "hidden") * y
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    yield Case("checkpoint_name", jax.checkpoint(names, policy=policy), (x, y), 8, 4, gradient=(0, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    laid_out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    yield Case("sharding_constraint", lambda x: lax.with_sharding_constraint(x * 2, laid_out) + 1, (x,), gradient=(0,))
    over_rows = lambda v: (
        v - lax.pmean(v, "rows"),
        lax.psum(v, "rows"),
        lax.pmax(v, "rows"),
        lax.all_gather(v, "rows"),
    )
    yield Case("vmap_collectives", jax.vmap(over_rows, axis_name="rows"), (x,), 8, 4)


def cases():
    for family in [movement, reductions, products, functions]:
        yield from family()
