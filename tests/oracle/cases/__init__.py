"""Cases of single ops: what they are, and how far off a result may be."""

import zlib
from dataclasses import dataclass, field
from typing import Any, Callable

import ml_dtypes
import numpy as np

F32, F64, BF16, F16 = np.float32, np.float64, ml_dtypes.bfloat16, np.float16
E4M3, E5M2, I4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4

# The distance from 1 to the next number. f64 counts as f32: the CPU kernels compute in single precision at most.
EPSILON = {np.dtype(d): float(ml_dtypes.finfo(d).eps) for d in [F32, BF16, F16, E4M3, E5M2]}
EPSILON[np.dtype(F64)] = EPSILON[np.dtype(F32)]


@dataclass
class Case:
    """A function of arrays.

    A float result may differ by `relative` epsilons of its type times the expected value, since every op rounds once and
    functions of a few ops a few times, and by `absolute` epsilons times the largest expected value: sums of terms that
    cancel are no better than their terms. `compute` is a coarser type that intermediate values are rounded to.
    """

    name: str
    function: Callable
    arguments: tuple
    relative: float = 4
    absolute: float = 0
    compute: Any = None
    # Positions of the arguments with respect to which the sum of the results is differentiated as well.
    gradient: tuple = ()
    # Without its results: the gradient alone is what the case is about.
    gradient_only: bool = False
    # What computes the expected values, where JAX goes wrong with the function as it is.
    reference: Callable | None = None
    x64: bool = False
    platform: str = "cpu"

    def epsilon(self, dtype):
        return max(EPSILON.get(np.dtype(d), 0) for d in (dtype, self.compute) if d is not None)

    def tolerance(self, dtype):
        return np.array([self.relative, self.absolute], F32) * F32(self.epsilon(dtype))


@dataclass
class Draw:
    """Numbers that depend on a name only."""

    name: str
    numbers: Any = field(init=False)

    def __post_init__(self):
        self.numbers = np.random.default_rng(zlib.crc32(self.name.encode()))

    def normal(self, *shape, dtype=F32, scale=1.0):
        return (self.numbers.normal(0, scale, shape)).astype(F32).astype(dtype)

    def uniform(self, low, high, *shape, dtype=F32):
        """Rounded to `dtype` and then moved inside, so that the ends of a function's domain are kept."""
        return np.clip(self.numbers.uniform(low, high, shape).astype(F32).astype(dtype).astype(F32), low, high).astype(
            dtype
        )

    def integers(self, low, high, *shape, dtype=np.int32):
        return self.numbers.integers(low, high, shape, dtype=np.int64).astype(dtype)

    def distinct(self, *shape, dtype=F32):
        """No two are equal or close: for functions that choose among their elements."""
        n = int(np.prod(shape))
        return ((self.numbers.permutation(n) - n // 2) / 4).reshape(shape).astype(dtype)

    def boolean(self, *shape):
        return self.numbers.integers(0, 2, shape).astype(bool)


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, -1.5, 2.5, 1e9, -1e9], F32)
