"""Convolutions and reductions over windows."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import BF16, F16, F32, F64, Case, Draw

draw = Draw("windows")


def convolution(
    name,
    lhs,
    rhs,
    dims=("NCHW", "OIHW", "NCHW"),
    dtype=F32,
    gradient=(0, 1),
    relative=16,
    absolute=8,
    x64=False,
    **options,
):
    options.setdefault("window_strides", (1,) * (len(lhs) - 2))
    options.setdefault("padding", "VALID")
    function = lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=dims, **options)
    arguments = (draw.normal(*lhs, dtype=dtype), draw.normal(*rhs, dtype=dtype))
    return Case(f"conv_{name}", function, arguments, relative, absolute, gradient=gradient, x64=x64)


def convolutions():
    yield convolution("plain", (2, 3, 7, 6), (4, 3, 3, 3))
    yield convolution("same", (2, 3, 7, 6), (4, 3, 3, 3), padding="SAME")
    yield convolution("same_lower", (2, 3, 6, 6), (4, 3, 2, 2), padding="SAME_LOWER")
    yield convolution("strided", (2, 3, 9, 8), (4, 3, 3, 2), window_strides=(2, 3))
    yield convolution("strided_uneven", (1, 2, 10, 10), (2, 2, 3, 3), window_strides=(3, 2))
    yield convolution("strided_same", (2, 3, 9, 8), (4, 3, 3, 3), window_strides=(2, 2), padding="SAME")
    yield convolution("padded", (2, 3, 5, 6), (4, 3, 3, 3), padding=((2, 1), (0, 3)))
    negative = convolution("padded_negative", (2, 3, 7, 7), (4, 3, 3, 3), padding=((-1, 1), (0, -2)))
    # JAX 0.10 reads beyond its input here on a CPU, and gives other numbers every time.
    edges = [(0, 0, 0), (0, 0, 0), (-1, 1, 0), (0, -2, 0)]
    padded = lambda x, k: lax.conv(lax.pad(x, np.float32(0), edges), k, (1, 1), "VALID")
    yield replace(negative, reference=padded)
    yield convolution("dilated_kernel", (2, 3, 9, 9), (4, 3, 3, 3), rhs_dilation=(2, 3))
    yield convolution("dilated_input", (2, 3, 4, 5), (4, 3, 3, 3), lhs_dilation=(2, 3), padding=((1, 1), (2, 2)))
    yield convolution(
        "dilated_both",
        (2, 3, 5, 5),
        (4, 3, 3, 2),
        lhs_dilation=(2, 1),
        rhs_dilation=(2, 2),
        window_strides=(2, 2),
        padding=((2, 3), (1, 1)),
    )
    yield convolution("grouped", (2, 6, 5, 5), (8, 3, 3, 3), feature_group_count=2)
    yield convolution(
        "grouped_strided", (2, 6, 7, 7), (6, 2, 3, 3), feature_group_count=3, window_strides=(2, 2), padding="SAME"
    )
    yield convolution("depthwise", (2, 4, 5, 5), (4, 1, 3, 3), feature_group_count=4, padding="SAME")
    yield convolution("depthwise_multiplied", (2, 3, 5, 5), (6, 1, 3, 3), feature_group_count=3)
    yield convolution("batch_groups", (4, 3, 5, 5), (6, 3, 3, 3), batch_group_count=2)
    yield convolution("pointwise", (2, 3, 4, 5), (6, 3, 1, 1))
    yield convolution("whole", (2, 3, 4, 5), (6, 3, 4, 5))
    yield convolution("patches", (2, 3, 8, 8), (6, 3, 4, 4), window_strides=(4, 4))
    yield convolution("one_dimension", (2, 3, 9), (4, 3, 3), ("NCH", "OIH", "NCH"), padding="SAME")
    yield convolution("causal", (2, 9, 3), (4, 3, 5), ("NHC", "HIO", "NHC"), padding=((3, 0),))
    yield convolution(
        "three_dimensions",
        (1, 2, 4, 5, 4),
        (3, 2, 2, 3, 2),
        ("NCDHW", "OIDHW", "NCDHW"),
        window_strides=(1, 2, 1),
        padding="SAME",
    )
    yield convolution("no_dimensions", (3, 4), (5, 4), ("NC", "OI", "NC"))
    yield convolution("bf16", (2, 3, 7, 6), (4, 3, 3, 3), dtype=BF16, relative=8)
    yield convolution("f16", (2, 3, 7, 6), (4, 3, 3, 3), dtype=F16, relative=8)
    yield convolution(
        "bf16_to_f32", (2, 3, 7, 6), (4, 3, 3, 3), dtype=BF16, preferred_element_type=jnp.float32, gradient=()
    )
    yield convolution("f64", (2, 3, 5, 5), (4, 3, 3, 3), dtype=F64, gradient=(), x64=True)
    integers = draw.integers(-5, 6, 1, 2, 5, 5), draw.integers(-5, 6, 3, 2, 3, 3)
    yield Case("conv_i32", lambda x, k: lax.conv(x, k, (1, 1), "VALID"), integers)
    yield Case(
        "conv_i8_to_i32",
        lambda x, k: lax.conv(x, k, (1, 1), "SAME", preferred_element_type=jnp.int32),
        tuple(t.astype(np.int8) for t in integers),
    )
    layouts = {"N": 2, "C": 3, "H": 6, "W": 5, "O": 4, "I": 3}
    for inputs, kernel, results in [
        ("NHWC", "HWIO", "NHWC"),
        ("NHWC", "OIHW", "NCHW"),
        ("NCHW", "HWIO", "NHWC"),
        ("CHWN", "IHWO", "CHWN"),
        ("HWNC", "OHWI", "HWNC"),
        ("NWHC", "WHIO", "NHWC"),
    ]:
        sizes = [layouts[c] for c in inputs], [2 if c in "HW" else layouts[c] for c in kernel]
        yield convolution(
            f"{inputs}_{kernel}_{results}",
            *sizes,
            (inputs, kernel, results),
            window_strides=(2, 1),
            padding=((1, 0), (0, 1)),
        )
    x, k = draw.normal(2, 4, 5, 3), draw.normal(3, 3, 3, 6)
    for padding in ["SAME", "VALID"]:
        yield Case(
            f"conv_transpose_{padding.lower()}",
            lambda x, k: lax.conv_transpose(x, k, (2, 2), padding),
            (x, k),
            16,
            8,
            gradient=(0, 1),
        )
    yield Case(
        "conv_transpose_kernel",
        lambda x, k: lax.conv_transpose(x, k, (2, 3), "SAME", transpose_kernel=True),
        (x, draw.normal(3, 3, 6, 3)),
        16,
        8,
        gradient=(0, 1),
    )
    conv = lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    yield Case(
        "conv_gradients_traced", lambda x, k, g: jax.vjp(conv, x, k)[1](g), (x, k, draw.normal(2, 2, 3, 6)), 16, 8
    )
    grouped = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=2)
    yield Case(
        "conv_grouped_gradients_traced",
        lambda x, k, g: jax.vjp(grouped, x, k)[1](g),
        (draw.normal(2, 4, 5, 5), draw.normal(6, 2, 3, 3), draw.normal(2, 6, 3, 3)),
        16,
        8,
    )
    yield Case(
        "conv_vmap",
        lambda x, k: jax.vmap(lambda x, k: lax.conv(x, k, (1, 1), "SAME"))(x, k),
        (draw.normal(2, 1, 3, 5, 5), draw.normal(2, 4, 3, 3, 3)),
        16,
        8,
        gradient=(0, 1),
    )
    yield Case(
        "conv_patches",
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 2), "SAME"),
        (draw.normal(2, 3, 5, 6),),
        4,
        gradient=(0,),
    )
    yield Case(
        "conv_local",
        lambda x, k: lax.conv_general_dilated_local(x, k, (1, 1), "VALID", (2, 2)),
        (draw.normal(1, 2, 4, 4), draw.normal(3, 8, 3, 3)),
        16,
        8,
        gradient=(0, 1),
    )
    yield Case(
        "conv_reversed",
        lambda x, k: jnp.convolve(x, k, mode="full"),
        (draw.normal(9), draw.normal(4)),
        16,
        8,
        gradient=(0, 1),
    )


def reductions():
    x = draw.distinct(2, 7, 8)
    settings = {
        "plain": dict(window_dimensions=(1, 2, 3), window_strides=(1, 1, 1), padding="VALID"),
        "strided": dict(window_dimensions=(1, 3, 2), window_strides=(1, 2, 3), padding="VALID"),
        "same": dict(window_dimensions=(1, 3, 3), window_strides=(1, 2, 2), padding="SAME"),
        "padded": dict(window_dimensions=(2, 3, 3), window_strides=(1, 1, 2), padding=((1, 0), (2, 1), (0, 2))),
        "dilated": dict(
            window_dimensions=(1, 3, 2), window_strides=(1, 1, 2), padding="VALID", window_dilation=(1, 2, 3)
        ),
        "base_dilated": dict(
            window_dimensions=(1, 2, 3),
            window_strides=(1, 2, 1),
            padding=((0, 0), (1, 1), (0, 2)),
            base_dilation=(1, 2, 3),
        ),
    }
    reducers = {
        "max": (lax.max, -np.inf, 0),
        "min": (lax.min, np.inf, 0),
        "add": (lax.add, 0, 8),
        "mul": (lax.mul, 1, 8),
    }
    for (kind, options), (name, (reducer, init, noise)) in itertools.product(settings.items(), reducers.items()):
        function = lambda x: lax.reduce_window(x, np.float32(init), reducer, **options)
        # JAX differentiates maxima and sums, and the former without dilation.
        gradient = (0,) if name == "add" or name in ("max", "min") and "dilated" not in kind else ()
        values = x / 8 if name == "mul" else x
        yield Case(f"reduce_window_{name}_{kind}", function, (values,), noise, noise, gradient=gradient)
    n = draw.integers(-9, 9, 2, 7, 8)
    options = settings["padded"]
    yield Case(
        "reduce_window_int",
        lambda n: (
            lax.reduce_window(n, 0, lax.add, **options),
            lax.reduce_window(n, np.int32(-(2**31)), lax.max, **options),
        ),
        (n,),
    )
    yield Case(
        "reduce_window_init",
        lambda x: (
            # Without padding, whose elements JAX on a CPU leaves out and StableHLO's document counts as initial values.
            lax.reduce_window(x, np.float32(2), lax.add, **settings["strided"]),
            lax.reduce_window(x, np.float32(0.5), lax.max, **settings["padded"]),
        ),
        (x,),
        8,
        4,
    )
    yield Case(
        "reduce_window_bool",
        lambda p: lax.reduce_window(p, False, lax.bitwise_or, (2, 2), (1, 1), "VALID"),
        (draw.boolean(5, 6),),
    )
    yield Case(
        "reduce_window_bf16",
        lambda x: (
            lax.reduce_window(x, BF16(-np.inf), lax.max, **settings["same"]),
            lax.reduce_window(x, BF16(0), lax.add, **settings["same"]),
        ),
        (draw.normal(2, 7, 8, dtype=BF16),),
        4,
        4,
    )
    yield Case(
        "reduce_window_custom",
        lambda x: lax.reduce_window(x, np.float32(-np.inf), jnp.logaddexp, (2, 3), (1, 2), "VALID"),
        (draw.normal(5, 7),),
        16,
        8,
    )
    nan = draw.normal(4, 6)
    nan[1, 2] = np.nan
    yield Case(
        "reduce_window_nan",
        lambda x: (
            lax.reduce_window(x, np.float32(-np.inf), lax.max, (2, 2), (1, 1), "VALID"),
            lax.reduce_window(x, np.float32(0), lax.add, (2, 2), (1, 1), "VALID"),
        ),
        (nan,),
        4,
        4,
    )
    image = draw.distinct(2, 8, 8, 3)
    pool = lambda x, init, f, size, stride, padding: lax.reduce_window(
        x, np.float32(init), f, (1, size, size, 1), (1, stride, stride, 1), padding
    )
    yield Case(
        "max_pool",
        lambda x: (pool(x, -np.inf, lax.max, 2, 2, "VALID"), pool(x, -np.inf, lax.max, 3, 2, "SAME")),
        (image,),
        gradient=(0,),
    )
    ties = draw.integers(0, 3, 2, 8, 8, 3).astype(F32)
    yield Case("max_pool_ties", lambda x: pool(x, -np.inf, lax.max, 3, 2, "SAME"), (ties,), gradient=(0,))
    yield Case(
        "max_pool_bf16",
        lambda x: lax.reduce_window(x, BF16(-np.inf), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (draw.distinct(2, 4, 4, 2, dtype=BF16),),
        gradient=(0,),
    )
    yield Case(
        "average_pool",
        lambda x: pool(x, 0, lax.add, 3, 2, "SAME") / pool(jnp.ones_like(x), 0, lax.add, 3, 2, "SAME"),
        (image,),
        8,
        4,
        gradient=(0,),
    )
    for padding, size, stride in [("VALID", 2, 2), ("SAME", 3, 2), ("SAME", 3, 1)]:
        traced = lambda x, w: jax.grad(lambda x: (pool(x, -np.inf, lax.max, size, stride, padding) * w).sum())(x)
        shape = jax.eval_shape(lambda x: pool(x, -np.inf, lax.max, size, stride, padding), image).shape
        yield Case(f"select_and_scatter_{padding.lower()}_{size}_{stride}", traced, (image, draw.normal(*shape)), 4, 2)
        yield Case(
            f"select_and_scatter_ties_{padding.lower()}_{size}_{stride}", traced, (ties, draw.normal(*shape)), 4, 2
        )
    least = lambda x: jax.grad(lambda x: (pool(x, np.inf, lax.min, 2, 2, "VALID") ** 2).sum())(x)
    yield Case("select_and_scatter_min", least, (image,), 4, 2)
    yield Case(
        "average_pool_traced",
        lambda x: jax.grad(lambda x: (pool(x, 0, lax.add, 3, 2, "SAME") ** 2).sum())(x),
        (image,),
        8,
        4,
    )

    maximum = lambda x: pool(x, -np.inf, lax.max, 3, 2, "SAME")
    yield Case(
        "max_pool_forward_derivative", lambda x, t: jax.jvp(maximum, (x,), (t,)), (image, image[:, ::-1].copy()), 4, 2
    )


def resizing():
    image = draw.normal(2, 5, 6, 3)
    for method in ["nearest", "bilinear", "bicubic", "lanczos3"]:
        yield Case(
            f"resize_{method}",
            lambda x: (jax.image.resize(x, (2, 10, 9, 3), method), jax.image.resize(x, (2, 3, 4, 3), method)),
            (image,),
            32,
            16,
            gradient=(0,),
        )
    yield Case(
        "resize_bilinear_plain",
        lambda x: jax.image.resize(x, (2, 3, 3, 3), "bilinear", antialias=False),
        (image,),
        32,
        16,
        gradient=(0,),
    )
    yield Case(
        "pixel_shuffle",
        lambda x: x.reshape(2, 5, 6, 1, 3).transpose(0, 1, 3, 2, 4).reshape(2, 5, 18),
        (image,),
        gradient=(0,),
    )


def cases():
    for family in [convolutions, reductions, resizing]:
        yield from family()
