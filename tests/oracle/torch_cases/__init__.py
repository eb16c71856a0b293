"""Functions of tensors, by family, with what they are tried on."""

import zlib
from dataclasses import dataclass
from typing import Callable

import torch


@dataclass
class Case:
    name: str
    function: Callable
    # Each a shape of normal floats, or a function of a generator.
    given: tuple
    # Units of rounding that a result may be off: of its own size, and of the largest element's.
    relative: float = 16
    absolute: float = 8
    # Arguments whose gradients are compared.
    trained: tuple = (0, 1, 2, 3, 4)

    def arguments(self):
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        make = lambda g: g(generator) if callable(g) else torch.randn(g, generator=generator)
        return [make(g) for g in self.given]


def ints(high, *shape, low=0, dtype=torch.int64):
    return lambda g: torch.randint(low, high, shape, generator=g, dtype=dtype)


def bools(*shape):
    return lambda g: torch.rand(shape, generator=g) < 0.5


def positive(*shape):
    return lambda g: torch.rand(shape, generator=g) + 0.1


def unit(*shape):
    return lambda g: torch.rand(shape, generator=g) * 0.8 + 0.1


def of(dtype, *shape):
    return lambda g: torch.randn(shape, generator=g).to(dtype)


def fixed(*values, dtype=None):
    return lambda g: torch.tensor(values, dtype=dtype)


from . import arithmetic, networks, places, programs, shapes, signals  # noqa: E402

FAMILIES = {
    "arithmetic": arithmetic.cases,
    "networks": networks.cases,
    "places": places.cases,
    "programs": programs.cases,
    "shapes": shapes.cases,
    "signals": signals.cases,
}
