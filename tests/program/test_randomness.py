"""Random numbers: their keys, their distributions, and their independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.program import randomness
from jaxspec.program.randomness import ACCEPT, DRAFT, SAMPLE
from tests.kernels.rejection_rounds import coupled_noise
from tests.support.distributions import LEVEL, check_counts

COUNT = 40_000
# Limit for the correlation of independent columns: five standard deviations.
MAX_CORRELATION = 5 / COUNT**0.5


def seeds_of(values: np.ndarray) -> jax.Array:
    """Seeds as the engine makes them: small numbers in the low word."""
    low = np.asarray(values, np.uint32)
    return jnp.asarray(np.stack([np.zeros_like(low), low], axis=-1))


def uniform(seeds, positions, role, index=0) -> np.ndarray:
    shape = np.broadcast_shapes(np.shape(seeds), np.shape(positions), np.shape(index))
    numbers = randomness.uniform(
        seeds_of(np.broadcast_to(seeds, shape)),
        jnp.asarray(np.broadcast_to(positions, shape), jnp.int32),
        role,
        jnp.asarray(np.broadcast_to(index, shape), jnp.int32),
    )
    return np.asarray(numbers)


def test_numbers_depend_on_their_own_key_only():
    """The batch around a key and its shape do not change the key's numbers."""
    seed, position = np.arange(12).reshape(3, 4) % 5, np.arange(12).reshape(3, 4)
    together, noise = uniform(seed, position, ACCEPT, 1), noise_of(seed, position, 16)
    for at in np.ndindex(3, 4):
        key = seed[at][None], position[at][None]
        assert uniform(*key, ACCEPT, 1)[0] == together[at]
        np.testing.assert_array_equal(noise_of(*key, 16)[0], noise[at])


@pytest.mark.parametrize("role", [DRAFT, ACCEPT, SAMPLE])
def test_uniforms_are_uniform_and_below_one(role):
    for numbers in (
        uniform(np.arange(COUNT), 5, role),
        uniform(1, np.arange(COUNT), role),
    ):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert stats.kstest(numbers.astype(np.float64), "uniform").pvalue >= LEVEL
        # The lowest of the 24 bits is random too.
        assert (np.round(numbers * 2.0**24) % 2).mean() == pytest.approx(0.5, abs=0.02)


def test_roles_positions_indices_and_seeds_are_independent():
    seeds = np.arange(COUNT)
    columns = [
        uniform(seeds, position, role, index)
        for role in (DRAFT, ACCEPT, SAMPLE)
        for position in (6, 7)
        for index in (0, 1, 2)
    ]
    columns.append(uniform(seeds + 1, 6, ACCEPT))
    correlation = np.corrcoef(np.stack(columns))
    # The last two columns are neighbours: with numbers shifted by one row, they would
    # correlate.
    np.testing.assert_array_equal(columns[-1][:-1], uniform(seeds, 6, ACCEPT)[1:])
    off = np.abs(correlation - np.eye(len(columns)))
    assert off.max() <= MAX_CORRELATION
    distinct = {tuple(column[:50]) for column in columns}
    assert len(distinct) == len(columns)


def test_high_and_low_words_of_the_seed_both_count():
    position = jnp.zeros(3, jnp.int32)
    seeds = jnp.array([[0, 1], [1, 0], [1, 1]], jnp.uint32)
    assert len(set(np.asarray(randomness.uniform(seeds, position, SAMPLE)))) == 3


def noise_of(seeds: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    return coupled_noise(seeds_of(seeds), positions, size)


def mix(bits: np.ndarray) -> np.ndarray:
    """Compute the finaliser of MurmurHash3 in numpy."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def test_noise_is_the_hash_of_ids_and_words():
    """Noise equals the hash bit for bit, but for the rounding of the logarithm.

    Draft models and kernels must compute the same noise.
    """
    seeds, positions = np.arange(3), np.array([5, 5, 70_000])
    words = randomness.words(
        seeds_of(seeds), jnp.asarray(positions, jnp.int32), jnp.full(3, SAMPLE)
    )
    first, second = np.asarray(words)[:, :1], np.asarray(words)[:, 1:]
    bits = mix(mix(np.arange(1000, dtype=np.uint32) + first) ^ second)
    unit = ((bits >> 9) + 0.5) / 2.0**23
    np.testing.assert_allclose(noise_of(seeds, positions, 1000), -np.log(unit), 2e-7)


def test_noise_is_exponential_and_positive():
    noise = noise_of(np.zeros(1), np.zeros(1), 200_000)[0]
    assert noise.min() > 0 and np.isfinite(noise).all()
    assert stats.kstest(noise, "expon").pvalue >= LEVEL
    across = noise_of(np.arange(COUNT), np.full(COUNT, 3), 2)
    for column in across.T:
        assert stats.kstest(column, "expon").pvalue >= LEVEL


def test_noise_of_neighbours_is_independent():
    """Neighbouring seeds, positions and vocabulary entries have independent noise."""
    rows = [
        noise_of(np.array([seed]), np.array([position]), COUNT)[0]
        for seed in (0, 1, 2)
        for position in (0, 1, 2)
    ]
    rows.append(np.roll(rows[0], 1))
    off = np.abs(np.corrcoef(np.stack(rows)) - np.eye(len(rows)))
    assert off.max() <= MAX_CORRELATION
    assert len({row.tobytes() for row in rows}) == len(rows)
    # No stream is another one shifted, which a hash of two counter words might cause.
    heads = [set(row[:200].tolist()) for row in rows[:-1]]
    shared = [len(a & b) for i, a in enumerate(heads) for b in heads[i + 1 :]]
    assert max(shared) <= 2


def test_noise_race_samples_from_the_weights():
    distribution = np.random.default_rng(2).dirichlet(np.full(16, 0.6))
    distribution[3] = 0
    distribution /= distribution.sum()
    for key in (
        (np.arange(COUNT), np.full(COUNT, 9)),
        (np.full(COUNT, 9), np.arange(COUNT)),
    ):
        tokens = (distribution / noise_of(*key, 16)).argmax(axis=1)
        check_counts(np.bincount(tokens, minlength=16), distribution)
