"""Complex numbers, Fourier transforms, and small linear systems."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import F32, Case, Draw

draw = Draw("signals")


def complex_numbers():
    x, y = draw.normal(3, 4), draw.normal(3, 4)
    z = lambda x, y: lax.complex(x, y)

    def both(f):
        return lambda x, y: (lambda r: (r.real, r.imag))(f(z(x, y)))

    for name, f in {
        "products": lambda z: z * z.conj() + z * 1j - z / (z + 9),
        "functions": lambda z: jnp.exp(z) + jnp.log(z) + jnp.sqrt(z) + z**3,
        "moved": lambda z: jnp.concatenate([z.T.reshape(3, 4), z[::-1], jnp.flip(z, 1)[:, ::-1]]),
        "summed": lambda z: z.sum(0) + z.mean(),
        "chosen": lambda z: jnp.where(z.real > 0, z, 0) + jnp.pad(z, ((0, 0), (1, 0)))[:, :4] + z[jnp.array([2, 0, 1])],
        "matmul": lambda z: z @ z.T,
        "set": lambda z: jnp.zeros((3, 9), z.dtype).at[:, 2:6].set(z),
        "add_at": lambda z: z.at[jnp.array([0, 2, 0])].add(2j * z),
        "constants": lambda z: z * jnp.exp(1j * jnp.arange(4)) + jnp.ones((3, 4), jnp.complex64),
    }.items():
        yield Case(f"complex_{name}", both(f), (x, y), 64, 64, gradient=(0, 1))
    yield Case("complex_abs", lambda x, y: (abs(z(x, y)), jnp.angle(z(x, y))), (x, y), 64, 64, gradient=(0, 1))
    yield Case("complex_loop", both(lambda z: lax.fori_loop(0, 3, lambda i, z: z * z * 0.5, z)), (x, y), 64, 64, gradient=(0, 1))


def transforms():
    parts = lambda z: (z.real, z.imag)
    for n in (1, 6, 16, 96, 97):
        x, y = draw.normal(2, n), draw.normal(2, n)
        yield Case(f"fft_{n}", lambda x, y: parts(jnp.fft.fft(lax.complex(x, y))) + parts(jnp.fft.ifft(lax.complex(x, y))), (x, y), 256, 256, gradient=(0, 1))
        yield Case(f"rfft_{n}", lambda x: parts(jnp.fft.rfft(x)) + (jnp.fft.irfft(jnp.fft.rfft(x) * 2, n=x.shape[-1]),), (x,), 256, 256, gradient=(0,))
    x = draw.normal(3, 6, 8)
    yield Case("fft_dims", lambda x: parts(jnp.fft.fft2(x)) + parts(jnp.fft.rfftn(x)) + (jnp.fft.irfft2(jnp.fft.rfft2(x)),), (x,), 256, 256, gradient=(0,))


def systems():
    x, b = draw.normal(2, 5, 5), draw.normal(2, 5, 3)
    spd = lambda x: x @ x.mT + 0.5 * jnp.eye(5)
    lower = lambda x: jnp.tril(x) * 0.3 + 2 * jnp.eye(5, dtype=F32)
    solve = jax.scipy.linalg.solve_triangular
    yield Case("cholesky", lambda x: jnp.linalg.cholesky(spd(x)), (x,), 256, 256, gradient=(0,))
    for name, options in {"lower": dict(lower=True), "upper": {}, "turned": dict(lower=True, trans=1), "unit": dict(lower=True, unit_diagonal=True)}.items():
        yield Case(f"solve_triangular_{name}", lambda x, b: solve(lower(x) if options.get("lower") else lower(x).mT, b, **options), (x, b), 256, 256, gradient=(0, 1))
    yield Case("solve_right", lambda x, b: lax.linalg.triangular_solve(lower(x), b.mT, left_side=False, lower=True), (x, b), 256, 256, gradient=(0, 1))


def cases():
    for family in (complex_numbers, transforms, systems):
        yield from family()
