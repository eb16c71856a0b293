"""Elementwise functions, of all element types that they take."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import BF16, E4M3, E5M2, F16, F32, F64, I4, SPECIAL, Case, Draw

# Function, the range to draw from, epsilons relative to the value and to the largest value. Where the function passes
# through zero away from zero (lgamma at 1), its result is a difference of larger terms.
UNARY = {
    "abs": (lax.abs, -3, 3, 0, 0),
    "neg": (lax.neg, -3, 3, 0, 0),
    "sign": (lax.sign, -3, 3, 0, 0),
    "floor": (lax.floor, -5, 5, 0, 0),
    "ceil": (lax.ceil, -5, 5, 0, 0),
    "round_away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), -5, 5, 0, 0),
    "round_even": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), -5, 5, 0, 0),
    "exp": (lax.exp, -4, 4, 4, 0),
    "exp2": (lax.exp2, -4, 4, 4, 0),
    "expm1": (lax.expm1, -2, 2, 4, 0),
    "log": (lax.log, 0.1, 10, 4, 1),
    "log1p": (lax.log1p, -0.5, 5, 4, 1),
    "logistic": (lax.logistic, -6, 6, 4, 0),
    "tanh": (lax.tanh, -4, 4, 6, 0),
    "sin": (lax.sin, -6, 6, 4, 1),
    "cos": (lax.cos, -6, 6, 4, 1),
    "tan": (lax.tan, -1.2, 1.2, 6, 0),
    "asin": (lax.asin, -0.95, 0.95, 6, 0),
    "acos": (lax.acos, -0.95, 0.95, 6, 1),
    "atan": (lax.atan, -4, 4, 4, 0),
    "sinh": (lax.sinh, -3, 3, 8, 0),
    "cosh": (lax.cosh, -3, 3, 6, 0),
    "asinh": (lax.asinh, -4, 4, 8, 0),
    "acosh": (lax.acosh, 1.2, 6, 8, 1),
    "atanh": (lax.atanh, -0.9, 0.9, 8, 1),
    "sqrt": (lax.sqrt, 0, 9, 4, 0),
    "rsqrt": (lax.rsqrt, 0.1, 9, 4, 0),
    "cbrt": (lax.cbrt, -9, 9, 4, 0),
    "square": (lax.square, -3, 3, 2, 0),
    "integer_pow": (lambda x: lax.integer_pow(x, 5), -2, 2, 8, 1),
    "integer_pow_negative": (lambda x: lax.integer_pow(x, -3), 0.5, 2, 8, 0),
    "erf": (lax.erf, -3, 3, 4, 0),
    "erfc": (lax.erfc, -2, 2, 8, 2),
    "erf_inv": (lax.erf_inv, -0.95, 0.95, 8, 0),
    "lgamma": (lax.lgamma, 0.2, 9, 8, 2),
    "lgamma_negative": (lax.lgamma, -3.8, -3.2, 16, 8),
    "digamma": (lax.digamma, 0.2, 9, 8, 2),
    "bessel_i0e": (lax.bessel_i0e, -4, 4, 8, 0),
    "bessel_i1e": (lax.bessel_i1e, -4, 4, 8, 1),
    "relu": (jax.nn.relu, -3, 3, 0, 0),
    "relu6": (jax.nn.relu6, -3, 9, 0, 0),
    "gelu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), -3, 3, 8, 4),
    "gelu_erf": (lambda x: jax.nn.gelu(x, approximate=False), -3, 3, 8, 4),
    "silu": (jax.nn.silu, -4, 4, 8, 0),
    "softplus": (jax.nn.softplus, -4, 4, 8, 1),
    "log_sigmoid": (jax.nn.log_sigmoid, -4, 4, 8, 1),
    "elu": (jax.nn.elu, -3, 3, 6, 0),
    "selu": (jax.nn.selu, -3, 3, 6, 0),
    "celu": (jax.nn.celu, -3, 3, 6, 0),
    "leaky_relu": (jax.nn.leaky_relu, -3, 3, 2, 0),
    "hard_tanh": (jax.nn.hard_tanh, -3, 3, 0, 0),
    "hard_silu": (jax.nn.hard_silu, -5, 5, 6, 1),
    "mish": (jax.nn.mish, -3, 3, 12, 4),
    "squareplus": (jax.nn.squareplus, -3, 3, 8, 4),
    "softmax": (lambda x: jax.nn.softmax(x, axis=-1), -3, 3, 8, 0),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, axis=-1), -3, 3, 8, 2),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), -3, 3, 8, 2),
    "standardize": (lambda x: jax.nn.standardize(x, axis=-1), -3, 3, 16, 8),
    "sinc": (jnp.sinc, 0.1, 3, 8, 4),
    "nan_to_num": (jnp.nan_to_num, -3, 3, 0, 0),
}

# Those whose derivative jumps inside the range, which differences and another order of operations may see differently.
STEPS = {
    "sign",
    "floor",
    "ceil",
    "round_away",
    "round_even",
    "nan_to_num",
    "bessel_i0e",
    "bessel_i1e",
    "lgamma_negative",
}

# Where a formula changes, or the one that is not taken has no slope.
CORNERS = {
    "sinh": (-1, 0, 1),
    "asinh": (-1, 0, 1),
    "atanh": (0,),
    "lgamma": (0.5, 1, 2, 3, 7),
    "digamma": (0.5, 1, 2, 3, 7),
}

BINARY = {
    "add": (lax.add, 2, 0),
    "sub": (lax.sub, 2, 1),
    "mul": (lax.mul, 2, 0),
    "div": (lax.div, 3, 0),
    "max": (lax.max, 0, 0),
    "min": (lax.min, 0, 0),
    "pow": (lambda a, b: lax.pow(lax.abs(a) + np.array(0.5, a.dtype), b), 16, 0),
    "atan2": (lax.atan2, 6, 0),
    "rem": (lax.rem, 4, 4),
    "logaddexp": (jnp.logaddexp, 8, 4),
    "hypot": (jnp.hypot, 8, 0),
    "where": (lambda a, b: jnp.where(a > b, a, -b), 0, 0),
}


def floats():
    for name, (function, low, high, relative, absolute) in UNARY.items():
        draw = Draw(name)
        several = lambda *xs, f=function: tuple(f(x) for x in xs)
        # In bf16 JAX rounds after each op of a composed function, in another order than one that computes in f32.
        arguments = tuple(draw.uniform(low, high, 3, 7, dtype=d) for d in (F32, BF16, F16))
        yield Case(f"unary_{name}", several, arguments, relative, absolute)
        yield Case(
            f"unary_{name}_f64", function, (draw.uniform(low, high, 4, 3).astype(F64),), relative, absolute, x64=True
        )
        if name not in STEPS:
            x = draw.uniform(low, high, 5, 4)
            # Away from the corners of the piecewise functions.
            x = np.where(np.abs(x - np.round(x)) < 0.02, x + 0.05, x).astype(F32).clip(low, high)
            yield Case(f"unary_{name}", function, (x,), 16, 4, gradient=(0,), gradient_only=True)
    for name, points in CORNERS.items():
        x = np.array(points, F32)
        yield Case(f"unary_{name}_corners", UNARY[name][0], (x,), 16, 4, gradient=(0,), gradient_only=True)
    for name, (function, relative, absolute) in BINARY.items():
        draw = Draw(name)
        several = lambda *xs, f=function: tuple(f(a, b) for a, b in zip(xs[::2], xs[1::2]))
        arguments = tuple(draw.normal(3, 7, dtype=d) for d in (F32, F32, BF16, BF16, F16, F16))
        if name == "rem":
            # Quotients that are not near an integer, where the remainder jumps.
            arguments = tuple(draw.integers(1, 40, 3, 7).astype(d) for d in (F32, F32, BF16, BF16, F16, F16))
        yield Case(f"binary_{name}", several, arguments, relative, absolute)
        yield Case(
            f"binary_{name}",
            function,
            (draw.normal(5, 4), draw.normal(5, 4)),
            16,
            4,
            gradient=(0, 1),
            gradient_only=True,
        )
        x, y = draw.normal(4, 3).astype(F64), draw.normal(4, 3).astype(F64)
        if name != "rem":
            yield Case(f"binary_{name}_f64", function, (x, y), relative, absolute, x64=True)


def special_values():
    names = [
        "abs",
        "neg",
        "sign",
        "floor",
        "ceil",
        "round_even",
        "round_away",
        "exp",
        "log1p",
        "logistic",
        "tanh",
        "sqrt",
    ]
    names += ["rsqrt", "relu", "atan", "erf", "expm1", "nan_to_num", "cbrt"]
    for name in names:
        yield Case(f"special_{name}", UNARY[name][0], (SPECIAL,), 4)
    yield Case(
        "special_is_finite", lambda x: (lax.is_finite(x), jnp.isnan(x), jnp.isinf(x), jnp.signbit(x)), (SPECIAL,)
    )
    a, b = (g.reshape(-1).astype(F32) for g in np.meshgrid(SPECIAL, SPECIAL))
    for name in ["add", "sub", "mul", "div", "max", "min", "where"]:
        yield Case(f"special_{name}", BINARY[name][0], (a, b), 4)
    yield Case("special_compare", compare, (a, b))
    # The sign of a zero is seen in its reciprocal.
    zeros = np.array([0.0, -0.0, 0.0, -0.0], F32)
    others = np.array([0.0, 0.0, -0.0, -0.0], F32)
    signs = lambda x, y: (1 / x, 1 / lax.neg(x), 1 / (x * y), 1 / lax.abs(x), jnp.copysign(jnp.ones_like(x), x))
    yield Case("special_signed_zero", signs, (zeros, others))


def compare(a, b):
    return lax.eq(a, b), lax.ne(a, b), lax.lt(a, b), lax.le(a, b), lax.gt(a, b), lax.ge(a, b)


def integers():
    def shifts(x, by):
        return lax.shift_left(x, by), lax.shift_right_logical(x, by), lax.shift_right_arithmetic(x, by)

    for dtype in [np.int32, np.uint32, np.int8, np.uint8, np.int16, np.uint16]:
        name, info = np.dtype(dtype).name, np.iinfo(dtype)
        draw = Draw(name)
        ends = np.array([info.min, info.max, 0, 1, info.max - 1, info.min + 1], dtype)
        x = np.concatenate([ends, draw.integers(info.min, info.max, 14, dtype=dtype)])
        y = np.concatenate([draw.integers(info.min, info.max, 14, dtype=dtype), ends])
        bits = info.bits
        yield Case(
            f"{name}_arithmetic", lambda a, b: (a + b, a - b, a * b, lax.neg(a), lax.max(a, b), lax.min(a, b)), (x, y)
        )
        divisor = np.where((y == 0) | (y == -1 if info.min < 0 else False), 3, y).astype(dtype)
        yield Case(f"{name}_division", lambda a, b: (lax.div(a, b), lax.rem(a, b), a // b, a % b), (x, divisor))
        yield Case(f"{name}_bitwise", lambda a, b: (a & b, a | b, a ^ b, ~a), (x, y))
        amounts = draw.integers(0, bits + 3, 20, dtype=dtype)
        yield Case(f"{name}_shifts", shifts, (x, amounts))
        yield Case(f"{name}_bits", lambda a: (lax.population_count(a), lax.clz(a)), (x,))
        yield Case(f"{name}_compare", compare, (x, y))
        small = draw.integers(0, 4, 20, dtype=dtype)
        yield Case(f"{name}_sign_pow", lambda a, b: (lax.sign(a), jnp.abs(a), a**3, jnp.power(a, b)), (x, small))
        yield Case(f"{name}_clamp", lambda a: lax.clamp(np.array(3, dtype), a, np.array(100, dtype)), (x,))
    wide = Draw("int64")
    x, y = (wide.integers(-(2**40), 2**40, 12, dtype=np.int64) for _ in range(2))
    yield Case(
        "int64_arithmetic", lambda a, b: (a + b, a - b, a // b, a % b, a & b, a | b, a ^ b, a >> 3), (x, y), x64=True
    )
    yield Case("int64_product", lambda a, b: a * b, (x, y), x64=True)
    x = Draw("hash").integers(0, 2**32, 64, dtype=np.uint32)
    mixed = lambda x: (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    yield Case("uint32_hash", lambda x: mixed(mixed(x)) ^ (x << 5), (x,))
    x = Draw("i4").integers(-8, 8, 16)
    yield Case("int4_arithmetic", lambda x: (x.astype(jnp.int4) + x.astype(jnp.int4)).astype(jnp.int32), (x,))
    yield Case("uint4_arithmetic", lambda x: (x.astype(jnp.uint4) * x.astype(jnp.uint4)).astype(jnp.int32), (x + 8,))
    yield Case("int4_argument", lambda x: (-x, x.astype(jnp.float32) * 0.5), (x.astype(I4),))
    p, q = Draw("p").boolean(12), Draw("q").boolean(12)
    yield Case(
        "bool_logic",
        lambda p, q: (p & q, p | q, p ^ q, ~p, p == q, p < q, lax.max(p, q), p.sum(), p.any(), q.all()),
        (p, q),
    )


def conversions():
    draw = Draw("convert")
    sources = {
        "f32": draw.normal(20, scale=20),
        "bf16": draw.normal(20, dtype=BF16, scale=20),
        "f16": draw.normal(20, dtype=F16, scale=20),
        "i32": draw.integers(-100, 100, 20),
        "u32": draw.integers(0, 200, 20, dtype=np.uint32),
        "i8": draw.integers(-100, 100, 20, dtype=np.int8),
        "u8": draw.integers(0, 200, 20, dtype=np.uint8),
        "i16": draw.integers(-100, 100, 20, dtype=np.int16),
        "bool": draw.boolean(20),
    }
    targets = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.int16, jnp.bool_]
    for name, x in sources.items():
        # Floats beyond the narrow integers' ranges, and negative ones as unsigned, are nobody's promise.
        yield Case(f"convert_{name}", lambda x: tuple(lax.convert_element_type(x, t) for t in targets), (x,), 1)
        yield Case(
            f"convert_{name}_unsigned",
            lambda x: (
                tuple(abs(x).astype(t) for t in (jnp.uint8, jnp.uint32)) if x.dtype != bool else x.astype(jnp.uint8)
            ),
            (x,),
            1,
        )
    yield Case(
        "convert_i32_wraps",
        lambda x: tuple(x.astype(t) for t in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.uint32)),
        (draw.integers(-(2**31), 2**31, 32),),
    )
    # Halfway cases, overflow, values below the smallest normal number.
    edges = np.array(
        [
            1 + 2**-8,
            1 + 3 * 2**-8,
            65504,
            3.3e38,
            1e-3,
            448,
            464,
            0.0195,
            0.001,
            -0.002,
            1.0625,
            1.1875,
            240,
            57344,
            5e-6,
        ],
        F32,
    )
    for target in [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]:
        yield Case(f"round_to_{np.dtype(target).name}", lambda x: x.astype(target), (edges,), 0)
    x = draw.normal(4, 8)
    for dtype, name in [(E4M3, "f8e4m3fn"), (E5M2, "f8e5m2")]:
        yield Case(f"{name}_argument", lambda x: (x.astype(jnp.float32), x.astype(jnp.bfloat16)), (x.astype(dtype),), 0)
        yield Case(f"{name}_result", lambda x: x.astype(dtype), (x,), 0)
        yield Case(
            f"{name}_arithmetic",
            lambda a, b: (a + b, a * b, lax.neg(a), lax.max(a, b), a < b),
            (x.astype(dtype), draw.normal(4, 8, dtype=dtype)),
            1,
        )
    for name in [
        "float8_e4m3",
        "float8_e3m4",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3b11fnuz",
        "float8_e8m0fnu",
    ]:
        positive = np.abs(x) + 0.25 if name == "float8_e8m0fnu" else x
        yield Case(f"round_to_{name}", lambda x: x.astype(getattr(jnp, name)), (positive.astype(F32),), 0)
    yield Case(
        "convert_f64",
        lambda x: (x.astype(jnp.float32), x.astype(jnp.bfloat16), x.astype(jnp.int64)),
        (x.astype(F64),),
        1,
        x64=True,
    )


def bits():
    draw = Draw("bits")
    x, b, w = draw.normal(4, 6), draw.normal(4, 6, dtype=BF16), draw.integers(0, 2**32, 4, 6, dtype=np.uint32)
    cast = lambda *ts: lambda x: tuple(lax.bitcast_convert_type(x, t) for t in ts)
    yield Case("bitcast_f32", cast(jnp.int32, jnp.uint32), (x,))
    yield Case("bitcast_f32_special", cast(jnp.uint32), (SPECIAL[np.isfinite(SPECIAL) | np.isinf(SPECIAL)],))
    yield Case("bitcast_f32_narrower", cast(jnp.uint8, jnp.uint16, jnp.int8), (x,))
    yield Case(
        "bitcast_f32_halves", cast(jnp.bfloat16), (draw.integers(0, 2**14, 4, dtype=np.uint32) * np.uint32(65537),), 0
    )
    yield Case("bitcast_bf16", cast(jnp.uint16, jnp.int16), (b,))
    yield Case("bitcast_bf16_wider", cast(jnp.uint32), (b.reshape(12, 2),))
    yield Case("bitcast_u32", cast(jnp.int32, jnp.uint8, jnp.uint16), (w,))
    yield Case("bitcast_u8_wider", cast(jnp.uint32, jnp.float32), (x.view(np.uint8).reshape(4, 6, 4),), 0)
    yield Case(
        "bitcast_round_trip",
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ 1, jnp.float32),
        (x,),
        0,
    )
    yield Case("bitcast_f16", cast(jnp.uint16), (draw.normal(5, dtype=F16),))
    for exponent, mantissa in [(8, 7), (5, 10), (5, 2), (4, 3), (8, 23), (11, 52), (8, 0), (3, 4)]:
        values = np.concatenate([draw.normal(30, scale=4), SPECIAL]).astype(F32)
        yield Case(
            f"reduce_precision_{exponent}_{mantissa}",
            lambda x: lax.reduce_precision(x, exponent, mantissa),
            (values,),
            0,
        )
    yield Case(
        "reduce_precision_gradient", lambda x: lax.reduce_precision(x, 5, 7), (x,), gradient=(0,), gradient_only=True
    )
    yield Case("nextafter", lax.nextafter, (x, draw.normal(4, 6)), 0)
    yield Case("frexp", lambda x: jnp.frexp(x), (x,), 0)
    yield Case("ldexp", lambda x, e: jnp.ldexp(x, e), (x, draw.integers(-4, 5, 4, 6)), 0)


def choices():
    draw = Draw("choices")
    a, b, c = (draw.normal(3, 5) for _ in range(3))
    p = draw.boolean(3, 5)
    yield Case("select", lambda p, a, b: lax.select(p, a, b), (p, a, b), gradient=(1, 2))
    yield Case("select_scalar_predicate", lambda p, a, b: lax.select(p, a, b), (np.array(True), a, b), gradient=(1, 2))
    yield Case(
        "select_n",
        lambda which, a, b, c: lax.select_n(which, a, b, c),
        (draw.integers(0, 3, 3, 5), a, b, c),
        gradient=(1, 2, 3),
    )
    yield Case("select_n_scalar", lambda which, a, b, c: lax.select_n(which, a, b, c), (np.array(1, np.int32), a, b, c))
    yield Case("clamp_scalars", lambda x: lax.clamp(-0.5, x, 0.75), (a,), gradient=(0,))
    yield Case("clamp_tensors", lambda low, x, high: lax.clamp(low, x, high), (a - 1, b, a + 1), gradient=(0, 1, 2))
    yield Case("clip_bf16", lambda x: jnp.clip(x, -0.5, 0.5), (a.astype(BF16),), 0)
    yield Case("select_bool", lambda p, q: jnp.where(p, q, ~q), (p, draw.boolean(3, 5)))
    yield Case("select_int", lambda p, x: jnp.where(p, x, -x), (p, draw.integers(-9, 9, 3, 5, dtype=np.int8)))
    yield Case("empty", lambda x: (x + 1, x.sum(), jnp.concatenate([x, x])), (np.zeros((0, 3), F32),))
    yield Case("scalar", lambda x, y: (x + y, x * y, -x), (np.array(2.0, F32), np.array(3.0, F32)), gradient=(0, 1))
    yield Case(
        "one_hot",
        lambda i: (jax.nn.one_hot(i, 7), jax.nn.one_hot(i, 7, dtype=jnp.int32, axis=0)),
        (draw.integers(-1, 8, 5),),
    )


def cases():
    for family in [floats, special_values, integers, conversions, bits, choices]:
        yield from family()
