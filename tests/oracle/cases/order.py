"""Sorting, choosing the largest, and cumulative functions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import BF16, F16, F32, F64, SPECIAL, Case, Draw

draw = Draw("order")


def sorts():
    x = draw.distinct(4, 7)
    ties = draw.integers(0, 4, 4, 9)
    floats = ties.astype(F32)
    payload = draw.normal(4, 9)
    yield Case(
        "sort", lambda x: (lax.sort(x), lax.sort(x, dimension=0), jnp.sort(x, descending=True)), (x,), gradient=(0,)
    )
    yield Case("sort_int", lambda n: (jnp.sort(n), jnp.sort(n, axis=0), jnp.sort(n, descending=True)), (ties,))
    yield Case(
        "sort_narrow",
        lambda a, b, c: (jnp.sort(a), jnp.sort(b), jnp.sort(c)),
        (
            draw.integers(-128, 128, 12, dtype=np.int8),
            draw.integers(0, 256, 12, dtype=np.uint8),
            draw.integers(0, 2**32, 12, dtype=np.uint32),
        ),
    )
    yield Case("sort_bf16", lambda x: (jnp.sort(x), jnp.argsort(x)), (draw.normal(3, 8, dtype=BF16),))
    yield Case("sort_f16", lambda x: jnp.sort(x), (draw.normal(3, 8, dtype=F16),))
    yield Case("sort_bool", lambda p: (jnp.sort(p), jnp.argsort(p)), (draw.boolean(9),))
    yield Case("sort_special", lambda x: (jnp.sort(x), jnp.sort(x, descending=True)), (SPECIAL,))
    yield Case("sort_signed_zeros", lambda x: 1 / jnp.sort(x), (np.array([0.0, -0.0, 1, -0.0, 0.0, -1], F32),))
    yield Case("argsort", lambda x: (jnp.argsort(x), jnp.argsort(x, axis=0), jnp.argsort(x, descending=True)), (x,))
    yield Case(
        "argsort_stable", lambda n: (jnp.argsort(n, stable=True), jnp.argsort(n, stable=True, descending=True)), (ties,)
    )
    yield Case(
        "argsort_special",
        lambda x: (jnp.argsort(x, stable=True), jnp.argsort(x, stable=True, descending=True)),
        (np.concatenate([SPECIAL, SPECIAL]),),
    )
    yield Case("sort_two", lambda k, v: lax.sort((k, v), num_keys=1, is_stable=True), (floats, payload), gradient=(1,))
    yield Case(
        "sort_two_gradient_of_keys",
        lambda k, v: lax.sort((k, v), num_keys=1),
        (draw.distinct(4, 9), payload),
        gradient=(0, 1),
        gradient_only=True,
    )
    yield Case(
        "sort_two_keys", lambda a, b: lax.sort((a, b), num_keys=2), (ties, draw.integers(0, 5, 4, 9).astype(F32))
    )
    yield Case(
        "sort_three",
        lambda a, b, c: lax.sort((a, b, c), num_keys=2, is_stable=True),
        (ties, floats[::-1].copy(), payload),
    )
    yield Case(
        "sort_three_along_first",
        lambda a, b, c: lax.sort((a, b, c), dimension=0, num_keys=1, is_stable=True),
        (ties, floats, payload),
    )
    yield Case(
        "sort_unstable_distinct", lambda k, v: lax.sort((k, v), num_keys=1, is_stable=False), (x, draw.normal(4, 7))
    )
    yield Case("lexsort", lambda a, b: jnp.lexsort((a, b)), (ties[0], ties[1]))
    yield Case("top_k", lambda x: (*lax.top_k(x, 3), lax.top_k(x[0], 1)[0]), (x,), gradient=(0,))
    yield Case("top_k_ties", lambda x: lax.top_k(x, 4), (floats,))
    yield Case("top_k_int", lambda n: lax.top_k(n, 2), (ties,))
    yield Case("top_k_bf16", lambda x: lax.top_k(x, 2), (draw.distinct(3, 6, dtype=BF16),))
    yield Case("top_k_axis", lambda x: lax.top_k(x, 2, axis=0), (x,))
    yield Case("top_k_approximate", lambda x: lax.approx_max_k(x, 2), (x,))
    yield Case(
        "quantiles",
        lambda x: (jnp.quantile(x, 0.3, axis=1), jnp.median(x), jnp.percentile(x, np.array([10.0, 50, 90], F32))),
        (x,),
        8,
        2,
        gradient=(0,),
    )
    edges = np.array([-3.0, -1, 0, 0, 2, 5], F32)
    for method in ["scan", "scan_unrolled", "sort", "compare_all"]:
        yield Case(
            f"searchsorted_{method}",
            lambda e, x: (jnp.searchsorted(e, x, method=method), jnp.searchsorted(e, x, side="right", method=method)),
            (edges, np.array([-4.0, -1, 0, 1, 5, 9], F32)),
        )
    yield Case("digitize", lambda x: jnp.digitize(x, edges), (draw.normal(8, scale=3),))
    yield Case(
        "permutation_inverse", lambda n: jnp.argsort(jnp.argsort(n)), (draw.numbers.permutation(12).astype(np.int32),)
    )
    yield Case("unique", lambda n: jnp.unique(n, size=6, fill_value=-1, return_counts=True), (ties[0],))
    yield Case("sort_f64", lambda x: (jnp.sort(x), jnp.argsort(x)), (x.astype(F64),), x64=True)


def choices():
    x = draw.distinct(4, 7)
    ties = draw.integers(0, 3, 4, 9)
    both = lambda x: (jnp.argmax(x), jnp.argmax(x, 0), jnp.argmin(x, 1), lax.argmax(x, 1, jnp.int32))
    yield Case("argmax", both, (x,))
    yield Case("argmax_ties", both, (ties.astype(F32),))
    yield Case("argmax_int", both, (ties,))
    yield Case("argmax_bf16", both, (ties.astype(BF16),))
    nan = x.copy()
    nan[0, 2] = nan[0, 5] = nan[2, 0] = np.nan
    yield Case("argmax_nan", both, (nan,))
    yield Case("argmax_infinite", both, (np.array([[-np.inf, -np.inf, 1], [np.inf, 2, np.inf], [-np.inf] * 3], F32),))
    yield Case("argmax_bool", lambda p: (jnp.argmax(p, 1), jnp.argmin(p, 1)), (draw.boolean(4, 6),))
    yield Case("argmax_index_types", lambda x: (lax.argmax(x, 1, jnp.uint8), lax.argmin(x, 0, jnp.int16)), (x,))
    yield Case("argmax_x64", both, (ties.astype(F64),), x64=True)
    yield Case("argmax_gathered", lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1), (x,), gradient=(0,))


def cumulative():
    x = draw.normal(4, 9)
    n = draw.integers(-5, 6, 4, 9)
    functions = {
        "cumsum": lax.cumsum,
        "cumprod": lax.cumprod,
        "cummax": lax.cummax,
        "cummin": lax.cummin,
        "cumlogsumexp": lax.cumlogsumexp,
    }
    for name, function in functions.items():
        values = draw.distinct(4, 9) if name in ("cummax", "cummin") else x
        both = lambda x: (function(x, axis=1), function(x, axis=0), function(x, axis=1, reverse=True))
        yield Case(name, both, (values,), 16, 8, gradient=(0,))
        # On other platforms JAX writes it as one op over windows.
        for platform in ["tpu", "cuda"]:
            yield Case(f"{name}_{platform}", both, (values,), 16, 8, gradient=(0,), platform=platform)
        if name != "cumlogsumexp":
            yield Case(f"{name}_int", both, (n,))
        yield Case(f"{name}_bf16", lambda x: function(x, axis=1), (values.astype(BF16) / 8,), 8, 8)
        yield Case(f"{name}_f64", lambda x: function(x, axis=1), (values.astype(F64),), 16, 8, x64=True)
    yield Case("cumsum_long", lambda x: jnp.cumsum(x), (draw.normal(300),), 16, 16, gradient=(0,))
    yield Case("cumsum_one", lambda x: jnp.cumsum(x, axis=1), (draw.normal(3, 1),), gradient=(0,))
    yield Case("cumsum_bool", lambda p: jnp.cumsum(p), (draw.boolean(12),))
    yield Case("cumsum_exclusive", lambda x: jnp.cumsum(x, axis=0) - x, (x,), 8, 8, gradient=(0,))
    yield Case(
        "expert_positions",
        lambda e: jnp.cumsum(jax.nn.one_hot(e, 4, dtype=jnp.int32), axis=0) * jax.nn.one_hot(e, 4, dtype=jnp.int32) - 1,
        (draw.integers(0, 4, 16),),
    )
    yield Case("diff", lambda x: (jnp.diff(x), jnp.diff(x, axis=0), jnp.trapezoid(x)), (x,), 8, 8, gradient=(0,))


def cases():
    for family in [sorts, choices, cumulative]:
        yield from family()
