"""Loops, branches and scans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import BF16, F64, Case, Draw

draw = Draw("control")


def scans():
    x, h, w = draw.normal(5, 3), draw.normal(3), draw.normal(3, 3, scale=0.5)
    step = lambda carry, x: (jnp.tanh(carry @ w + x), carry.sum())
    yield Case("scan", lambda h, xs: lax.scan(step, h, xs), (h, x), 32, 16, gradient=(0, 1))
    weighted = lambda h, xs, w: lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c), h, xs)
    yield Case("scan_weights", weighted, (h, x, w), 32, 16, gradient=(0, 1, 2))
    yield Case("scan_reverse", lambda h, xs: lax.scan(step, h, xs, reverse=True), (h, x), 32, 16, gradient=(0, 1))
    yield Case("scan_unrolled", lambda h, xs: lax.scan(step, h, xs, unroll=2), (h, x), 32, 16, gradient=(0, 1))
    yield Case("scan_unrolled_whole", lambda h, xs: lax.scan(step, h, xs, unroll=True), (h, x), 32, 16, gradient=(0, 1))
    yield Case(
        "scan_no_inputs",
        lambda h: lax.scan(lambda c, _: (c * 0.5 + 1, c), h, None, length=4),
        (h,),
        16,
        4,
        gradient=(0,),
    )
    yield Case(
        "scan_no_results",
        lambda h, xs: lax.scan(lambda c, x: (c + x * c, None), h, xs)[0],
        (h, x),
        32,
        8,
        gradient=(0, 1),
    )
    yield Case(
        "scan_no_carry", lambda xs: lax.scan(lambda _, x: (None, jnp.sin(x)), None, xs)[1], (x,), 8, 1, gradient=(0,)
    )
    yield Case("scan_one_step", lambda h, xs: lax.scan(step, h, xs), (h, x[:1]), 32, 16, gradient=(0, 1))
    yield Case(
        "scan_counter",
        lambda h, xs: lax.scan(lambda c, x: ((c[0] + 1, c[1] * x + c[0]), c[0]), (jnp.int32(0), h), xs),
        (h, x),
        32,
        16,
        gradient=(0, 1),
    )
    tree = lambda c, xs: lax.scan(
        lambda c, x: ({"a": c["b"] * x["p"], "b": c["a"] + x["q"]}, (c["a"], x["p"] * 2)), c, xs
    )
    yield Case(
        "scan_tree",
        lambda a, b, p, q: tree({"a": a, "b": b}, {"p": p, "q": q}),
        (h, h + 1, x, x[::-1].copy()),
        32,
        16,
        gradient=(0, 1, 2, 3),
    )
    layers = draw.normal(4, 3, 3, scale=0.5)
    yield Case(
        "scan_layers",
        lambda x, ws: lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0],
        (x, layers),
        32,
        16,
        gradient=(0, 1),
    )
    rematerialised = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
    yield Case(
        "scan_layers_checkpoint", lambda x, ws: lax.scan(rematerialised, x, ws)[0], (x, layers), 32, 16, gradient=(0, 1)
    )
    nested = lambda c, x: (lax.scan(lambda c, y: (c * 0.9 + y, None), c, x)[0], c)
    yield Case("scan_nested", lambda h, xs: lax.scan(nested, h, xs), (h, draw.normal(4, 2, 3)), 32, 16, gradient=(0, 1))
    yield Case(
        "scan_vmap",
        lambda h, xs: jax.vmap(lambda h, x: lax.scan(step, h, x))(h, xs),
        (draw.normal(2, 3), draw.normal(2, 4, 3)),
        32,
        16,
        gradient=(0, 1),
    )
    yield Case(
        "scan_bf16",
        lambda h, xs: lax.scan(lambda c, x: (c * jnp.bfloat16(0.5) + x, c), h, xs),
        (h.astype(BF16), x.astype(BF16)),
        16,
        8,
        gradient=(0, 1),
    )
    yield Case(
        "scan_int",
        lambda n, xs: lax.scan(lambda c, x: (c * 31 + x, c ^ x), n, xs),
        (np.array(7, np.int32), draw.integers(0, 100, 8)),
    )
    yield Case(
        "scan_gradient_traced", lambda h, xs: jax.grad(lambda h: lax.scan(step, h, xs)[0].sum())(h), (h, x), 64, 32
    )
    yield Case(
        "scan_map",
        lambda x: (lax.map(lambda r: r * r.sum(), x), lax.map(jnp.sin, x, batch_size=2)),
        (x,),
        16,
        8,
        gradient=(0,),
    )
    yield Case("scan_i64", lambda h, xs: lax.scan(step, h, xs), (h.astype(F64), x.astype(F64)), 32, 16, x64=True)
    yield Case(
        "scan_with_cond",
        lambda h, xs: lax.scan(lambda c, x: (lax.cond(x[0] > 0, lambda: c + x, lambda: c * 0.5), None), h, xs)[0],
        (h, x),
        16,
        8,
        gradient=(0, 1),
    )
    lstm = functools.partial(lstm_step, w=draw.normal(6, 12, scale=0.5))
    yield Case("scan_lstm", lambda h, xs: lax.scan(lstm, (h, h * 0), xs), (h, x), 64, 32, gradient=(0, 1))


def lstm_step(state, x, w):
    h, c = state
    i, f, g, o = jnp.split(jnp.concatenate([h, x]) @ w, 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def associative():
    x = draw.normal(7, 3)
    yield Case("associative_scan_add", lambda x: lax.associative_scan(lax.add, x), (x,), 16, 8, gradient=(0,))
    yield Case(
        "associative_scan_reverse",
        lambda x: lax.associative_scan(jnp.multiply, x, reverse=True, axis=1),
        (x,),
        16,
        8,
        gradient=(0,),
    )

    def linear(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    yield Case(
        "associative_scan_linear",
        lambda a, x: lax.associative_scan(linear, (jax.nn.sigmoid(a), x)),
        (x, draw.normal(7, 3)),
        32,
        16,
        gradient=(0, 1),
    )
    matrices = draw.normal(6, 2, 2)
    yield Case(
        "associative_scan_matrices", lambda m: lax.associative_scan(jnp.matmul, m), (matrices,), 32, 16, gradient=(0,)
    )
    yield Case(
        "associative_scan_max", lambda x: lax.associative_scan(jnp.maximum, x), (draw.distinct(8, 2),), gradient=(0,)
    )


def loops():
    x = draw.normal(4, 3)
    n = np.array(5, np.int32)
    yield Case("fori_known", lambda x: lax.fori_loop(0, 6, lambda i, x: x * 0.9 + i, x), (x,), 32, 8, gradient=(0,))
    yield Case(
        "fori_from", lambda x: lax.fori_loop(3, 7, lambda i, x: x.at[i % 4].add(i * 1.0), x), (x,), 8, 4, gradient=(0,)
    )
    yield Case(
        "fori_unrolled",
        lambda x: lax.fori_loop(0, 6, lambda i, x: x * 0.5 + i, x, unroll=3),
        (x,),
        16,
        4,
        gradient=(0,),
    )
    yield Case("fori_none", lambda x: lax.fori_loop(4, 4, lambda i, x: x * 2, x), (x,))
    yield Case("fori_computed", lambda x, n: lax.fori_loop(0, n, lambda i, x: x * 0.9 + i, x), (x, n), 32, 8)
    yield Case(
        "fori_nested",
        lambda x: lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 2, lambda j, x: x + i * j, x), x),
        (x,),
        8,
        4,
        gradient=(0,),
    )
    yield Case(
        "fori_dynamic_slice",
        lambda x: lax.fori_loop(
            0, 4, lambda i, s: s + lax.dynamic_index_in_dim(x, i, 0, keepdims=False) * (i + 1), jnp.zeros(3)
        ),
        (x,),
        16,
        8,
        gradient=(0,),
    )
    yield Case(
        "while_computed",
        lambda x: lax.while_loop(lambda s: s[0].sum() > 0.5, lambda s: (s[0] * 0.5, s[1] + 1), (abs(x), 0)),
        (x,),
        16,
        4,
    )
    yield Case(
        "while_counted",
        lambda x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 2, s[1] * 1.5), (0, x)),
        (x,),
        16,
        4,
    )
    yield Case(
        "while_down",
        lambda x: lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] + s[0] * 0.25), (6, x)),
        (x,),
        16,
        4,
    )
    yield Case(
        "while_not_entered",
        lambda x: lax.while_loop(lambda s: s[0] > 100, lambda s: (s[0] + 1, s[1] * 2), (0, x)),
        (x,),
    )
    yield Case(
        "while_collatz",
        lambda n: lax.while_loop(
            lambda s: s[0] != 1, lambda s: (jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1), s[1] + 1), (n, 0)
        ),
        (np.array(27, np.int32),),
    )
    yield Case(
        "while_vmap",
        lambda x: jax.vmap(lambda v: lax.while_loop(lambda s: s > 1, lambda s: s / 2, v))(abs(x[:, 0]) * 9),
        (x,),
        8,
    )
    newton = lambda a: lax.while_loop(
        lambda s: (abs(s[0] ** 2 - a) > 1e-3).any() & (s[1] < 50), lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1), (a, 0)
    )[0]
    yield Case("while_newton", newton, (abs(x) + 1,), 64, 8)


def branches():
    x = draw.normal(4, 3)
    choose = lambda p, x: lax.cond(p, lambda x: (jnp.sin(x), x.sum()), lambda x: (x * x, x.max()), x)
    for p in [True, False]:
        yield Case(f"cond_{p}".lower(), choose, (np.array(p), x), 16, 8, gradient=(1,))
        yield Case(f"cond_known_{p}".lower(), lambda x: choose(np.array(p), x), (x,), 16, 8, gradient=(0,))
    yield Case("cond_computed", lambda x: lax.cond(x.sum() > 0, lambda: x * 2, lambda: x - 1), (x,), 8, gradient=(0,))
    yield Case(
        "cond_vmap",
        lambda x: jax.vmap(lambda v: lax.cond(v[0] > 0, jnp.sin, jnp.cos, v))(x),
        (x,),
        16,
        4,
        gradient=(0,),
    )
    yield Case(
        "cond_int",
        lambda p, n: lax.cond(p, lambda n: n + 1, lambda n: n * 2, n),
        (np.array(False), draw.integers(0, 9, 4)),
    )
    three = [lambda x: x + 1, lambda x: x * 2, lambda x: jnp.tanh(x)]
    for i in [-3, 0, 1, 2, 9]:
        yield Case(
            f"switch_{i}".replace("-", "minus_"),
            lambda i, x: lax.switch(i, three, x),
            (np.array(i, np.int32), x),
            16,
            4,
            gradient=(1,),
        )
    yield Case("switch_known", lambda x: lax.switch(1, three, x), (x,), 16, 4, gradient=(0,))
    yield Case("switch_computed", lambda x: lax.switch(jnp.argmax(x[0]), three, x), (x,), 16, 4, gradient=(0,))
    yield Case(
        "cond_nested",
        lambda p, q, x: lax.cond(p, lambda x: lax.cond(q, jnp.sin, jnp.cos, x), jnp.tanh, x),
        (np.array(True), np.array(False), x),
        16,
        4,
        gradient=(2,),
    )
    yield Case(
        "cond_gradient_traced",
        lambda p, x: jax.grad(lambda x: lax.cond(p, lambda x: (x**3).sum(), lambda x: x.sum(), x))(x),
        (np.array(True), x),
        16,
    )
    yield Case(
        "platform_dependent", lambda x: lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x + 1), (x,)
    )


def cases():
    for family in [scans, associative, loops, branches]:
        yield from family()
