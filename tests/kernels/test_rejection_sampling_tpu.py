"""The TPU kernel's statistics are float64's, the verdicts those of whole rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec_kernels.rejection_sampling import tpu
from jaxspec_kernels.rejection_sampling.passes import Slice
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    by_force,
    by_whole_rows,
    forced_counts,
    make_round,
)

COLUMNS, VOCAB_SIZE, TILE = 300, 290, 128  # the third tile is cut, and has pads
# Reads out of bounds raise, memory that nobody wrote is NaN.
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def make_logits(rows: int) -> np.ndarray:
    random = np.random.default_rng(rows)
    logits = random.normal(size=(rows, COLUMNS)).astype(np.float32) * 4
    logits[0] = np.round(logits[0])  # equal logits in several tiles
    logits[1, ::3] = -np.inf
    logits[2, ::2] = np.nan
    logits[3, :128] = -np.inf  # a first tile without any weight
    logits[4] = np.nan
    logits[5, 200] = np.inf
    logits[6] *= 100  # most weights underflow
    logits[:, VOCAB_SIZE:] = np.array([np.nan, np.inf, 900])[np.arange(10) % 3]
    return logits


def oracle(logits: np.ndarray, temperature: np.ndarray, tokens: np.ndarray):
    """Four numbers per row, in float64."""
    exact = np.asarray(logits[:, :VOCAB_SIZE], np.float64)
    exact = np.where(np.isnan(exact), -np.inf, exact)
    exact = np.minimum(exact, float(np.finfo(np.float32).max))
    maximum = exact.max(axis=1)
    peak = np.where(np.isfinite(maximum), maximum, 0)[:, None]
    total = np.exp((exact - peak) / temperature[:, None]).sum(axis=1)
    is_token = (tokens >= 0) & (tokens < VOCAB_SIZE)
    drafted = exact[np.arange(len(exact)), np.where(is_token, tokens, 0)]
    drafted = np.where(is_token, drafted, -np.inf)
    return maximum, exact.argmax(axis=1), total, drafted


@pytest.mark.parametrize("rows", [8, 40])  # 40: the second block of rows is cut
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_statistics_equal_float64(rows, dtype):
    logits = jnp.asarray(make_logits(rows), dtype)
    random = np.random.default_rng(1)
    temperature = random.choice([0.5, 1.0, 1.7], rows).astype(np.float32)
    tokens = random.integers(0, VOCAB_SIZE, rows).astype(np.int32)
    tokens[-3:] = -1, VOCAB_SIZE, 2**30
    part = Slice(columns=COLUMNS, tile=TILE, vocab_size=VOCAB_SIZE, axis_name=None)
    found = tpu.statistics(
        part, logits, jnp.asarray(temperature), jnp.asarray(tokens), interpret=STRICT
    )
    expected = oracle(np.asarray(logits, np.float32), temperature, tokens)
    np.testing.assert_array_equal(found.maximum, expected[0].astype(np.float32))
    np.testing.assert_array_equal(found.best, expected[1])
    np.testing.assert_allclose(found.total, expected[2], rtol=1e-5)
    np.testing.assert_array_equal(found.drafted, expected[3].astype(np.float32))


def test_verdicts_are_those_of_whole_rows():
    run = jax.jit(
        partial(
            tpu.rejection_sampling,
            vocab_size=290,
            axis_name=None,
            tile=128,
            interpret=True,
        ),
        compiler_options=UNOPTIMISED,
    )
    one = make_round(16, vocab=290)
    np.testing.assert_array_equal(run(*one.arrays, **one.numbers), by_whole_rows(one))
    counts = forced_counts(one)
    found = run(*one.arrays, **one.numbers, num_forced=jnp.asarray(counts))
    np.testing.assert_array_equal(found, by_force(one, counts))


def test_slices_agree_on_the_verdict():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = P(None, None, "model")

    def call(*arrays):
        *arrays, numbers = arrays
        return tpu.rejection_sampling(
            *arrays,
            **numbers,
            vocab_size=2**30,
            axis_name="model",
            tile=128,
            interpret=True,
        )

    run = jax.jit(
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(P(), split, split, P(), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )
    one = make_round(16, vocab=290, seed=1)
    found = run(*one.arrays, one.numbers)
    np.testing.assert_array_equal(found, by_whole_rows(one))
