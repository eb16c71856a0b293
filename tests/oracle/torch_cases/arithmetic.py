"""Elementwise functions, element types, reductions, orders."""

import torch
import torch.nn.functional as F

from . import Case, bools, fixed, ints, of, positive, unit

A, B = (3, 4), (4,)

UNARY = """exp expm1 sigmoid tanh sin cos tan erf erfc neg abs sign floor ceil round trunc frac square relu sinh cosh
atan asinh exp2 isnan isinf isfinite logical_not""".split()
POSITIVE = "log log1p log2 log10 sqrt rsqrt reciprocal".split()
BINARY = "add sub mul div maximum minimum atan2 eq ne lt le gt ge hypot logaddexp".split()
REDUCTIONS = "sum mean amax amin prod logsumexp var std".split()


def cases():
    for name in UNARY:
        flat = name in ("isnan", "isinf", "isfinite", "logical_not")
        yield Case(name, getattr(torch, name), (A,), trained=() if flat else (0,))
    for name in POSITIVE:
        yield Case(name, getattr(torch, name), (positive(*A),), relative=32)
    for name in ("asin", "acos", "logit", "atanh", "erfinv"):
        yield Case(name, getattr(torch, name), (unit(*A),), relative=64, absolute=32)
    yield Case("ndtri", torch.special.ndtri, (unit(*A),), relative=64, absolute=64)
    yield Case("ndtr", torch.special.ndtr, (A,), relative=64)
    yield Case("acosh", lambda x: torch.acosh(x + 1), (positive(*A),), relative=64, absolute=32)
    for name in ("lgamma", "digamma"):
        # At whole numbers too, and where the reflection formula holds.
        yield Case(name, getattr(torch, name), (fixed(1, 2, 3, 7, 0.2, 0.5, 1.5, 4.4, 9.3),), relative=64, absolute=64)
        yield Case(f"{name}_negative", getattr(torch, name), (fixed(-0.3, -1.6, -2.5),), relative=256, absolute=64)
    yield Case("odd_functions_at_zero", lambda x: (x.asinh(), x.atanh(), x.sinh(), x.asin(), x.erfinv()), (fixed(0, 0.5),), relative=64)
    for name in ("exp", "sqrt", "sigmoid", "tanh"):
        yield Case(f"{name}_of_ints", getattr(torch, name), (ints(5, *A, low=1),))
    for name in BINARY:
        yield Case(name, getattr(torch, name), (A, B), relative=32)
        yield Case(f"{name}_outer", getattr(torch, name), ((3, 1), (1, 4)), relative=32, trained=(0,))
    yield Case("compare_number", lambda x: (x > 0, x == 1, x <= 0.5), (A,), trained=())
    yield Case("add_alpha", lambda x, y: torch.add(x, y, alpha=2.5), (A, B))
    yield Case("sub_alpha", lambda x, y: torch.sub(x, y, alpha=3), (A, B))
    yield Case("rsub", lambda x, y: torch.rsub(x, y, alpha=2), (A, A))
    yield Case("rsub_number", lambda x: 1 - x, (A,))
    yield Case("add_number", lambda x: x + 1, (A,))
    yield Case("mul_number", lambda x: x * 0.3, (A,))
    yield Case("div_number", lambda x: x / 3, (A,))
    yield Case("number_div", lambda x: 3 / x, (positive(*A),))
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float64):
        mine = bools(*A) if dtype == torch.bool else (
            of(dtype, *A) if dtype.is_floating_point else ints(5, *A, dtype=dtype))
        tag = str(dtype).removeprefix("torch.")
        yield Case(f"promote_f32_{tag}", lambda x, y: (x + y, x * y), (A, mine), trained=())
        yield Case(f"promote_scalar_tensor_{tag}", lambda x, y: x + y, (A, lambda g, m=mine: m(g)[0, 0]), trained=())
        yield Case(f"promote_number_{tag}", lambda x: (x * 2, x * 2.5, x + True), (mine,), trained=())
        yield Case(f"promote_i64_{tag}", lambda x, y: x * y, (ints(5, *A), mine), trained=())
        yield Case(f"true_div_{tag}", lambda x: x / 2, (mine,), trained=())
        yield Case(f"sum_{tag}", lambda x: x.sum(0), (mine,), trained=())
        yield Case(f"to_f32_{tag}", lambda x: x.to(torch.float32) * 2, (mine,))
        yield Case(f"f32_to_{tag}", lambda x, d=dtype: (x * 3).abs().to(d), (A,), trained=())
    yield Case("bf16_f16", lambda x, y: x + y, (of(torch.bfloat16, 3), of(torch.float16, 3)), trained=())
    yield Case("u8_i8", lambda x, y: x + y, (ints(9, 3, dtype=torch.uint8), ints(9, 3, dtype=torch.int8)), trained=())
    for mode in ("floor", "trunc"):
        yield Case(f"div_{mode}", lambda x, y, m=mode: torch.div(x, y, rounding_mode=m), (A, positive(*A)), trained=())
        yield Case(f"div_{mode}_ints", lambda x, y, m=mode: torch.div(x, y, rounding_mode=m),
                   (ints(20, *A, low=-20), ints(5, *A, low=1)), trained=())
    yield Case("floor_divide", lambda x: x // 3, (ints(20, *A, low=-20),), trained=())
    yield Case("floor_divide_negative", lambda x: x // -3, (ints(20, *A, low=-20),), trained=())
    yield Case("remainder", lambda x: x % 3, (ints(20, *A, low=-20),), trained=())
    yield Case("remainder_floats", lambda x: torch.remainder(x, 0.7), (A,), relative=64, absolute=64)
    yield Case("fmod", lambda x: torch.fmod(x, 0.7), (A,), relative=64, absolute=64)
    for power in (2, 3, 4, 0.5, -1, -0.5, -2, 1, 2.5):
        yield Case(f"pow_{power}", lambda x, p=power: torch.pow(x, p), (positive(*A),), relative=64)
    yield Case("pow_tensor", torch.pow, (positive(*A), A), relative=64)
    yield Case("pow_scalar_base", lambda x: torch.pow(2.0, x), (A,), relative=64)
    yield Case("pow_ints", lambda x: x**3, (ints(5, *A, low=-5),), trained=())
    yield Case("round_decimals", lambda x: torch.round(x, decimals=2), (A,), trained=(), absolute=2**10)
    yield Case("where", torch.where, (bools(*A), A, B))
    yield Case("where_number", lambda m, x: torch.where(m, x, 0.0), (bools(*A), A))
    yield Case("masked_fill", lambda x, m: x.masked_fill(m, float("-inf")), (A, bools(*B)), trained=())
    yield Case("masked_fill_finite", lambda x, m: x.masked_fill(m, -5), (A, bools(*B)))
    yield Case("clamp", lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(max=0.2)), (A,))
    yield Case("clamp_tensor", torch.clamp, (A, lambda g: torch.full(B, -0.4), lambda g: torch.full(B, 0.4)), trained=(0,))
    yield Case("clamp_min", lambda x: torch.clamp_min(x, 0), (A,))
    yield Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (A, A, B))
    yield Case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), (A, A, positive(*B)), relative=64)
    yield Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), (A, A))
    yield Case("lerp_tensor", torch.lerp, (A, A, unit(*A)))
    yield Case("xlogy", torch.xlogy, (A, positive(*A)), relative=64)
    yield Case("nan_to_num", lambda x: torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0),
               (fixed(float("nan"), float("inf"), -float("inf"), 0.5),), trained=())
    yield Case("logical", lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y)),
               (ints(2, *A), bools(*A)), trained=())
    yield Case("bitwise", lambda x, y: (x & y, x | y, x ^ y, ~x, x << 2, x >> 1), (ints(99, *A), ints(99, *A)), trained=())
    yield Case("bool_ops", lambda x, y: (x & y, x | y, ~x), (bools(*A), bools(*A)), trained=())

    for name in REDUCTIONS:
        f = getattr(torch, name)
        for tag, dims in (("last", dict(dim=-1)), ("keep", dict(dim=0, keepdim=True)), ("two", dict(dim=(0, 2)))):
            if name == "prod" and tag == "two":
                continue
            yield Case(f"{name}_{tag}", lambda x, f=f, d=dims: f(x, **d), ((3, 4, 5),), relative=64, absolute=32)
        if name not in ("amax", "amin", "logsumexp"):
            yield Case(f"{name}_all", lambda x, f=f: f(x), ((3, 4),), relative=64, absolute=32)
    yield Case("mean_dtype", lambda x: x.mean(-1, dtype=torch.float32), (of(torch.bfloat16, *A),), trained=())
    yield Case("var_biased", lambda x: torch.var(x, dim=1, unbiased=False), (A,), relative=64, absolute=32)
    yield Case("var_mean", lambda x: torch.var_mean(x, dim=1, correction=0), (A,), relative=64, absolute=32)
    yield Case("std_mean", lambda x: torch.std_mean(x, dim=1), (A,), relative=64, absolute=32)
    yield Case("max_all", lambda x: (x.max(), x.min()), (A,))
    yield Case("max_dim", lambda x: tuple(torch.max(x, 1)) + tuple(torch.min(x, 0, keepdim=True)), (A,))
    yield Case("max_other", torch.max, (A, A))
    yield Case("argmax", lambda x: (x.argmax(), x.argmax(1), x.argmin(0, keepdim=True)), (A,), trained=())
    yield Case("any_all", lambda x: (x.any(), x.all(), x.any(1), x.all(0, keepdim=True)), (bools(*A),), trained=())
    yield Case("any_ints", lambda x: (x.any(1), x.all(1)), (ints(2, *A),), trained=())
    yield Case("norms", lambda x: (x.norm(), x.norm(1, dim=1), x.norm(dim=0, keepdim=True), torch.linalg.vector_norm(x, 3)),
               (A,), relative=64, absolute=32)
    yield Case("normalize", lambda x: F.normalize(x, dim=-1), (A,), relative=64, absolute=32)
    yield Case("count_nonzero", lambda x: torch.count_nonzero(x, dim=1), (ints(3, *A),), trained=())
    yield Case("cumsum", lambda x: x.cumsum(1), (A,), absolute=32)
    yield Case("cumsum_bools", lambda x: x.cumsum(-1), (bools(*A),), trained=())
    yield Case("cumprod", lambda x: x.cumprod(0), (positive(*A),), relative=64, absolute=32)
    yield Case("diff", lambda x: (x.diff(), torch.diff(x, dim=0, n=2), torch.diff(x, prepend=x[:, :1])), (A,))
    yield Case("topk", lambda x: tuple(x.topk(2)) + tuple(x.topk(2, dim=0, largest=False)), (A,))
    yield Case("sort", lambda x: tuple(x.sort()) + tuple(x.sort(0, descending=True)), (A,))
    yield Case("argsort", lambda x: x.argsort(dim=1, descending=True, stable=True), (ints(4, *A),), trained=())
    yield Case("searchsorted", lambda x: (torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
                                          torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True)), (A,), trained=())
    yield Case("trace", torch.trace, ((4, 4),))
    yield Case("item_of_constant", lambda x: x * torch.arange(4).sum(), (A,))
