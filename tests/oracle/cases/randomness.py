"""Random bits and what is made from them. Keys are arguments, so that nothing is folded away."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import Case, Draw

draw = Draw("randomness")

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


def cases():
    key = (KEY,)
    random = jax.random
    yield Case("random_seed", lambda seed: random.PRNGKey(seed), (np.array(42, np.int32),))
    yield Case("random_bits", lambda k: (random.bits(k, (3, 5)), random.bits(k, (7,)), random.bits(k)), key)
    yield Case("random_bits_narrow", lambda k: (random.bits(k, (9,), jnp.uint8), random.bits(k, (9,), jnp.uint16)), key)
    yield Case("random_split", lambda k: (random.split(k), random.split(k, 5), random.split(k, (2, 3))), key)
    yield Case(
        "random_fold_in", lambda k, n: (random.fold_in(k, 7), random.fold_in(k, n)), (KEY, np.array(123456, np.int32))
    )
    yield Case("random_chain", lambda k: random.uniform(random.fold_in(random.split(k)[1], 3), (4,)), key)
    # Bits are equal exactly, so numbers made from them by exact steps are too.
    yield Case(
        "random_uniform",
        lambda k: (random.uniform(k, (4, 5)), random.uniform(k, (7,), minval=-2.0, maxval=3.0), random.uniform(k)),
        key,
        2,
        1,
    )
    yield Case(
        "random_uniform_half",
        lambda k: (random.uniform(k, (9,), jnp.bfloat16), random.uniform(k, (9,), jnp.float16)),
        key,
        2,
        1,
    )
    yield Case("random_uniform_f64", lambda k: random.uniform(k, (5,), jnp.float64), key, 2, 1, x64=True)
    yield Case("random_bits_64", lambda k: random.bits(k, (5,), jnp.uint64) >> jnp.uint64(20), key, x64=True)
    yield Case("random_normal", lambda k: (random.normal(k, (4, 5)), random.normal(k, (3,)) * 0.02), key, 16, 2)
    yield Case("random_normal_bf16", lambda k: random.normal(k, (9,), jnp.bfloat16), key, 4, 2)
    yield Case("random_truncated_normal", lambda k: random.truncated_normal(k, -2.0, 2.0, (9,)), key, 32, 4)
    yield Case(
        "random_bernoulli", lambda k: (random.bernoulli(k, 0.3, (20,)), random.bernoulli(k, jnp.linspace(0, 1, 9))), key
    )
    yield Case(
        "random_integers",
        lambda k: (
            random.randint(k, (12,), 0, 10),
            random.randint(k, (9,), -100, 1000),
            random.randint(k, (9,), 0, 200, jnp.uint8),
        ),
        key,
    )
    yield Case(
        "random_permutation",
        lambda k: (random.permutation(k, 12), random.permutation(k, jnp.arange(12.0).reshape(4, 3))),
        key,
    )
    yield Case(
        "random_permutation_independent",
        lambda k: random.permutation(k, jnp.arange(12.0).reshape(4, 3), axis=1, independent=True),
        key,
    )
    yield Case("random_choice", lambda k: (random.choice(k, 10, (5,)), random.choice(k, 10, (5,), replace=False)), key)
    logits = draw.normal(6, 5)
    yield Case("random_categorical", lambda k, l: random.categorical(k, l), (KEY, logits))
    yield Case("random_gumbel", lambda k: random.gumbel(k, (9,)), key, 32, 8)
    yield Case("random_exponential", lambda k: random.exponential(k, (9,)), key, 16, 2)
    yield Case("random_laplace", lambda k: random.laplace(k, (9,)), key, 16, 4)
    yield Case("random_rademacher", lambda k: random.rademacher(k, (9,)), key)
    yield Case("random_typed_key", lambda k: random.key_data(random.split(random.wrap_key_data(k), 3)), key)
    yield Case(
        "random_unsafe_rbg",
        lambda k: random.key_data(random.wrap_key_data(k, impl="rbg")),
        (np.concatenate([KEY, KEY]),),
    )
    threefry = lax.RandomAlgorithm.RNG_THREE_FRY
    philox = lax.RandomAlgorithm.RNG_PHILOX
    key4 = np.concatenate([KEY, KEY[::-1]])
    yield Case("rng_threefry", lambda k: lax.rng_bit_generator(k, (5,), algorithm=threefry), (KEY[[0, 1, 0, 1]],))
    yield Case("rng_philox", lambda k: lax.rng_bit_generator(k, (5,), algorithm=philox), (key4,))
    yield Case("rng_default", lambda k: lax.rng_bit_generator(k, (5,)), (key4,))

    def dropout(x, k):
        keep = random.bernoulli(k, 0.8, x.shape)
        return jnp.where(keep, x / 0.8, 0)

    x = draw.normal(6, 7)
    yield Case("dropout", dropout, (x, KEY), 4, gradient=(0,))
    # Compiled for other platforms the generator is a custom call, or is written out otherwise.
    yield Case("random_bits_tpu", lambda k: random.bits(k, (6,)), key, platform="tpu")
    yield Case("random_bits_cuda", lambda k: random.bits(k, (6,)), key, platform="cuda")
    yield Case("random_unused_half", lambda k: random.bits(k, (33,)), key)
    yield Case(
        "random_in_scan",
        lambda k: lax.scan(lambda k, _: (random.split(k)[0], random.uniform(k, (2,))), k, None, length=4),
        key,
        2,
        1,
    )
    yield Case(
        "random_vmap",
        lambda ks: jax.vmap(lambda k: random.uniform(k, (3,)))(ks),
        (draw.integers(0, 2**32, 4, 2, dtype=np.uint32),),
        2,
        1,
    )
