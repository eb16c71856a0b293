"""Gather, scatter and slices at positions that are constant, computed, and out of range."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import BF16, F64, Case, Draw

draw = Draw("indexing")


def slices():
    x = draw.normal(5, 6)
    n = draw.integers(-9, 9, 5, 6)
    update = draw.normal(2, 3)
    at = lambda *v: tuple(np.array(i, np.int32) for i in v)
    yield Case(
        "dynamic_slice_constant",
        lambda x: (
            lax.dynamic_slice(x, (1, 2), (3, 2)),
            lax.dynamic_slice(x, (4, 9), (3, 2)),
            lax.dynamic_slice(x, (-7, 0), (2, 2)),
        ),
        (x,),
        gradient=(0,),
    )
    for name, (i, j) in {"inside": (1, 2), "beyond": (4, 100), "before": (-3, -1)}.items():
        yield Case(
            f"dynamic_slice_{name}", lambda x, i, j: lax.dynamic_slice(x, (i, j), (3, 2)), (x, *at(i, j)), gradient=(0,)
        )
        yield Case(
            f"dynamic_update_slice_{name}",
            lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)),
            (x, update, *at(i, j)),
            gradient=(0, 1),
        )
    yield Case("dynamic_slice_int", lambda n, i: lax.dynamic_slice_in_dim(n, i, 2, axis=1), (n, *at(3)))
    yield Case(
        "dynamic_slice_i64",
        lambda x, i: lax.dynamic_slice(x, (i, i), (2, 2)),
        (x.astype(F64), np.array(2, np.int64)),
        x64=True,
    )
    yield Case("dynamic_slice_u8", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 2)), (x, np.array(200, np.uint8)))
    yield Case(
        "dynamic_index",
        lambda x, i: (lax.dynamic_index_in_dim(x, i, 0), lax.dynamic_index_in_dim(x, i, 1, keepdims=False), x[i]),
        (x, *at(2)),
        gradient=(0,),
    )
    yield Case("dynamic_index_negative", lambda x, i: x[i], (x, *at(-2)), gradient=(0,))
    yield Case(
        "dynamic_update_slice_constant",
        lambda x, u: lax.dynamic_update_slice(x, u, (1, 5)),
        (x, update),
        gradient=(0, 1),
    )
    yield Case(
        "dynamic_update_slice_int",
        lambda n, i: lax.dynamic_update_slice(n, jnp.ones((1, 2), jnp.int32), (i, i)),
        (n, *at(3)),
    )
    yield Case(
        "dynamic_update_index",
        lambda x, v, i: lax.dynamic_update_index_in_dim(x, v, i, 0),
        (x, draw.normal(6), *at(3)),
        gradient=(0, 1),
    )
    yield Case(
        "dynamic_slice_vmap",
        lambda x, i: jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,)))(x, i),
        (x, draw.integers(-2, 8, 5)),
        gradient=(0,),
    )
    yield Case(
        "dynamic_update_slice_vmap",
        lambda x, u, i: jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)))(x, u, i),
        (x, draw.normal(5, 2), draw.integers(-2, 8, 5)),
        gradient=(0, 1),
    )
    yield Case("rolled", lambda x, i: jnp.roll(x, i, axis=0), (x, *at(2)), gradient=(0,))


def gathers():
    x = draw.normal(5, 6)
    rows = draw.integers(0, 5, 4)
    outside = np.array([0, 4, 5, -1, -5, -6, 17, 2], np.int32)
    for mode in ["fill", "clip", "promise_in_bounds"]:
        indices = rows if mode == "promise_in_bounds" else outside
        # What is filled in is not a number, and the sum of all results is none then.
        gradient = () if mode == "fill" else (0,)
        yield Case(f"gather_{mode}", lambda x, i: x.at[i].get(mode=mode), (x, indices), gradient=gradient)
        yield Case(f"gather_{mode}_int", lambda x, i: x.at[i].get(mode=mode), (draw.integers(-9, 9, 5, 6), indices))
    yield Case("gather_wrap", lambda x, i: jnp.take(x, i, axis=0, mode="wrap"), (x, outside), gradient=(0,))
    yield Case(
        "gather_fill_value", lambda x, i: x.at[:, i].get(mode="fill", fill_value=-1.5), (x, outside), gradient=(0,)
    )
    yield Case("gather_bf16", lambda x, i: x[i], (x.astype(BF16), rows), gradient=(0,))
    yield Case("gather_unsigned", lambda x, i: x[i], (x, rows.astype(np.uint32)), gradient=(0,))
    yield Case("gather_i8_indices", lambda x, i: x[i], (x, rows.astype(np.int8)))
    yield Case("gather_points", lambda x, i, j: (x[i, j], x[i][:, j]), (x, rows, draw.integers(0, 6, 4)), gradient=(0,))
    yield Case("gather_rank_two", lambda x, i: (x[i], x[:, i]), (x, draw.integers(0, 5, 2, 3)), gradient=(0,))
    yield Case(
        "gather_mixed",
        lambda x, i, j: (x[i, :, j], x[:, i, 1:3], x[i, None, 0]),
        (draw.normal(4, 5, 6), draw.integers(0, 4, 3), draw.integers(0, 6, 3)),
        gradient=(0,),
    )
    dims = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))
    yield Case(
        "gather_windows",
        lambda x, i: lax.gather(x, i, dims, (2, 3), mode="clip"),
        (x, draw.integers(-1, 6, 4, 2)),
        gradient=(0,),
    )
    yield Case(
        "gather_windows_fill",
        lambda x, i: lax.gather(x, i, dims, (2, 3), mode="fill", fill_value=0.5),
        (x, draw.integers(-1, 6, 6, 2)),
        gradient=(0,),
    )
    yield Case(
        "take",
        lambda x, i: (jnp.take(x, i, axis=1), jnp.take(x, i), jnp.take(x, i, axis=0, mode="clip")),
        (x, rows),
        gradient=(0,),
    )
    yield Case(
        "take_along_axis",
        lambda x, i, j: (jnp.take_along_axis(x, i, axis=1), jnp.take_along_axis(x, j, axis=0)),
        (x, draw.integers(0, 6, 5, 3), draw.integers(0, 5, 2, 6)),
        gradient=(0,),
    )
    yield Case(
        "take_along_axis_clip",
        lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="clip"),
        (x, draw.integers(-3, 9, 5, 3)),
        gradient=(0,),
    )
    yield Case(
        "gather_batch",
        lambda x, i: jax.vmap(lambda x, i: x[i])(x, i),
        (draw.normal(3, 5, 2), draw.integers(0, 5, 3, 4)),
        gradient=(0,),
    )
    yield Case("gather_scalar_index", lambda x, i: x[i, 2], (x, np.array(3, np.int32)), gradient=(0,))
    yield Case("gather_from_bool", lambda p, i: p[i], (draw.boolean(5, 3), rows))
    yield Case(
        "embedding", lambda table, ids: table[ids] * 2, (draw.normal(11, 4), draw.integers(0, 11, 3, 5)), gradient=(0,)
    )
    yield Case(
        "cross_entropy",
        lambda logits, labels: -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean(),
        (draw.normal(6, 9), draw.integers(0, 9, 6)),
        16,
        4,
        gradient=(0,),
    )
    yield Case(
        "boolean_mask", lambda x, p: jnp.where(p, x, 0)[jnp.nonzero(p, size=8, fill_value=0)], (x, draw.boolean(5, 6))
    )
    yield Case("gather_i64", lambda x, i: x[i], (x.astype(F64), outside.astype(np.int64)), x64=True)
    yield Case(
        "gather_gradient_traced",
        lambda x, i, g: jax.vjp(lambda x: x[i], x)[1](g)[0],
        (x, rows, draw.normal(4, 6)),
        4,
        2,
    )
    yield Case(
        "interpolation",
        lambda x, r, c: jax.scipy.ndimage.map_coordinates(x, [r, c], order=1),
        (x, draw.uniform(0.1, 3.9, 7), draw.uniform(0.1, 4.9, 7)),
        16,
        8,
        gradient=(0,),
    )


def scatters():
    x = draw.normal(6, 5)
    n = draw.integers(-9, 9, 6, 5)
    rows = np.array([0, 3, 3, 5], np.int32)
    outside = np.array([0, 6, 3, -1, -7, 12, 3], np.int32)
    u = draw.normal(4, 5)
    v = draw.normal(7, 5)
    methods = {"add": "add", "subtract": "subtract", "mul": "multiply", "min": "min", "max": "max"}
    for name, method in methods.items():
        function = lambda x, i, u: getattr(x.at[i], method)(u)
        # Products of repeated rows have no gradient in JAX unless indices are unique.
        unique = lambda x, i, u: getattr(x.at[i], method)(u, unique_indices=True)
        yield Case(f"scatter_{name}", function, (x, rows, u), 4, 2)
        yield Case(f"scatter_{name}_outside", function, (x, outside, v), 4, 2)
        yield Case(
            f"scatter_{name}_clip", lambda x, i, u: getattr(x.at[i], method)(u, mode="clip"), (x, outside, v), 4, 2
        )
        yield Case(f"scatter_{name}_int", function, (n, rows, draw.integers(-3, 4, 4, 5)))
        distinct = np.array([4, 0, 2, 5], np.int32)
        yield Case(
            f"scatter_{name}_unique",
            unique,
            (x, distinct, u),
            4,
            2,
            gradient=(0, 2) if name in ("add", "subtract", "mul") else (),
        )
    yield Case("scatter_add", lambda x, i, u: x.at[i].add(u), (x, rows, u), 8, 4, gradient=(0, 2), gradient_only=True)
    yield Case(
        "scatter_add_outside",
        lambda x, i, u: x.at[i].add(u),
        (x, outside, v),
        8,
        4,
        gradient=(0, 2),
        gradient_only=True,
    )
    yield Case(
        "scatter_add_bf16",
        lambda x, i, u: x.at[i].add(u),
        (x.astype(BF16), rows, u.astype(BF16)),
        4,
        4,
        gradient=(0, 2),
    )
    distinct = np.array([4, 0, 2, 5], np.int32)
    yield Case("scatter_replace", lambda x, i, u: x.at[i].set(u), (x, distinct, u), gradient=(0, 2))
    yield Case(
        "scatter_replace_outside",
        lambda x, i, u: x.at[i].set(u),
        (x, np.array([9, 0, -8, 5], np.int32), u),
        gradient=(0, 2),
    )
    # All rows that meet are equal: which of several replaces the others is not said.
    yield Case("scatter_replace_repeated", lambda x, i, u: x.at[i].set(u[0]), (x, rows, u))
    yield Case("scatter_replace_scalar", lambda x, i: x.at[i].set(1.5), (x, rows), gradient=(0,))
    yield Case("scatter_replace_int", lambda x, i: x.at[i].set(7), (n, rows))
    yield Case("scatter_replace_bool", lambda p, i: p.at[i].set(True), (draw.boolean(6), rows))
    yield Case(
        "scatter_one",
        lambda x, i: (x.at[i, 2].set(3.0), x.at[i, 1].add(1.0), x.at[2, 3].multiply(2.0)),
        (x, np.array(4, np.int32)),
        gradient=(0,),
    )
    yield Case(
        "scatter_points",
        lambda x, i, j, w: x.at[i, j].add(w),
        (x, rows, np.array([1, 2, 2, 4], np.int32), draw.normal(4)),
        4,
        2,
        gradient=(0, 3),
    )
    yield Case(
        "scatter_columns",
        lambda x, i, w: x.at[:, i].add(w),
        (x, np.array([0, 2, 2], np.int32), draw.normal(6, 3)),
        4,
        2,
        gradient=(0, 2),
    )
    yield Case(
        "scatter_slices",
        lambda x, i, w: (x.at[1:3].set(w), x.at[::2, 1].add(1.0), x.at[i].divide(2.0)),
        (x, rows, draw.normal(2, 5)),
    )
    yield Case("scatter_into_zeros", lambda i, u: jnp.zeros((6, 5)).at[i].add(u), (rows, u), 4, 2, gradient=(1,))
    yield Case("scatter_apply", lambda x, i: x.at[i].apply(jnp.tanh), (x, distinct), 8, 2)
    yield Case("scatter_power", lambda x, i: x.at[i].power(2), (x, distinct), 8, 2)
    yield Case(
        "scatter_batch",
        lambda x, i, w: jax.vmap(lambda x, i, w: x.at[i].add(w))(x, i, w),
        (draw.normal(3, 5, 2), draw.integers(0, 5, 3, 4), draw.normal(3, 4, 2)),
        4,
        4,
        gradient=(0, 2),
    )
    yield Case(
        "scatter_batch_replace",
        lambda x, i, w: jax.vmap(lambda x, i, w: x.at[i].set(w))(x, i, w),
        (draw.normal(3, 5), np.array([[0, 2], [4, 1], [3, 9]], np.int32), draw.normal(3, 2)),
        gradient=(0, 2),
    )
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
    )
    corner = np.array([[0, 0], [4, 3], [5, 1], [2, 1], [-1, 0]], np.int32)
    windows = draw.normal(5, 2, 2)
    yield Case(
        "scatter_windows", lambda x, i, w: lax.scatter_add(x, i, w, dims), (x, corner, windows), 4, 4, gradient=(0, 2)
    )
    yield Case(
        "scatter_windows_clip",
        lambda x, i, w: lax.scatter_add(x, i, w, dims, mode="clip"),
        (x, corner, windows),
        4,
        4,
        gradient=(0, 2),
    )
    yield Case(
        "segment_sum",
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=4),
        (x, np.array([0, 2, 2, 1, 5, 0], np.int32)),
        4,
        2,
        gradient=(0,),
    )
    yield Case(
        "segment_sum_sorted",
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=4, indices_are_sorted=True),
        (x, np.array([0, 0, 1, 1, 3, 3], np.int32)),
        4,
        2,
        gradient=(0,),
    )
    yield Case(
        "segment_others",
        lambda x, i: (jax.ops.segment_max(x, i, 4), jax.ops.segment_min(x, i, 4), jax.ops.segment_prod(x, i, 4)),
        (x, np.array([0, 2, 2, 1, 1, 0], np.int32)),
        4,
        2,
    )
    yield Case(
        "bincount",
        lambda i: (jnp.bincount(i, length=6), jnp.histogram(i.astype(jnp.float32), bins=4, range=(0.0, 8.0))[0]),
        (draw.integers(0, 6, 20),),
    )
    yield Case(
        "scatter_f64",
        lambda x, i, u: x.at[i].add(u),
        (x.astype(F64), rows.astype(np.int64), u.astype(F64)),
        4,
        2,
        x64=True,
    )


def cases():
    for family in [slices, gathers, scatters]:
        yield from family()
