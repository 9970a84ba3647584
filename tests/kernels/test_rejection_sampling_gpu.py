"""The GPU kernels' sums are float64's, and the verdicts are those of whole rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec_kernels.rejection_sampling import gpu
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import Draft, Law, Slice
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import by_whole_rows, make_round
from tests.kernels.test_rejection_sampling_tpu import (
    COLUMNS,
    VOCAB_SIZE,
    make_logits,
    oracle,
)

# Three tiles, of which the last is cut and has pads.
PART = Slice(columns=COLUMNS, tile=COLUMNS, vocab_size=VOCAB_SIZE, axis_name=None)
LAUNCH: dict[str, Any] = dict(tile=128, interpret=True)
ROWS = 12


def exact_rows(dtype) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Logits, their values where they are tokens, and temperatures."""
    logits = jnp.asarray(make_logits(ROWS), dtype)
    exact = np.asarray(logits, np.float64)
    exact[:, VOCAB_SIZE:] = -np.inf
    exact = np.where(np.isnan(exact), -np.inf, exact)
    exact = np.minimum(exact, float(np.finfo(np.float32).max))
    heat = np.random.default_rng(1).choice([0.5, 1.0, 1.7], ROWS).astype(np.float32)
    return logits, exact, heat


def exact_law(exact: np.ndarray, heat: np.ndarray) -> tuple[Law, np.ndarray]:
    """A law that leaves half of each row, and the weights by it."""
    maximum = exact.max(axis=1)
    threshold = np.median(exact[:, :VOCAB_SIZE], axis=1).astype(np.float32)
    peak = np.where(np.isfinite(maximum), maximum, 0)[:, None]
    weights = np.exp((exact - peak) / heat[:, None])
    weights = np.where(exact >= threshold[:, None], weights, 0.0)
    arrays = heat, maximum, threshold, weights.sum(axis=1)
    return Law(*(jnp.asarray(array, jnp.float32) for array in arrays)), weights


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_statistics_equal_float64(dtype):
    logits, _, heat = exact_rows(dtype)
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, ROWS).astype(np.int32)
    tokens[-3:] = -1, VOCAB_SIZE, 2**30
    found = gpu.statistics(
        PART, logits, jnp.asarray(heat), jnp.asarray(tokens), **LAUNCH
    )
    expected = oracle(np.asarray(logits, np.float32), heat, tokens)
    np.testing.assert_array_equal(found.maximum, expected[0].astype(np.float32))
    np.testing.assert_array_equal(found.best, expected[1])
    np.testing.assert_allclose(found.total, expected[2], rtol=1e-5)
    np.testing.assert_array_equal(found.drafted, expected[3].astype(np.float32))


@pytest.mark.parametrize("counts", [True, False])
def test_amounts_equal_float64(counts):
    logits, exact, heat = exact_rows(jnp.float32)
    law, weights = exact_law(exact, heat)
    limits = np.sort(exact[:, [3, 50, 200]], axis=1).clip(-1e30).astype(np.float32)
    found = gpu.amounts(PART, logits, law, jnp.asarray(limits), counts=counts, **LAUNCH)
    is_in = exact[:, None] >= limits[:, :, None]
    unit = np.ones_like(weights) if counts else weights
    expected = np.where(is_in, unit[:, None], 0.0).sum(axis=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_race_is_won_as_in_float64():
    logits, exact, heat = exact_rows(jnp.float32)
    law, weights = exact_law(exact, heat)
    words = np.random.default_rng(3).integers(0, 2**32, (ROWS, 2), dtype=np.uint32)
    words = jnp.asarray(words)
    ids = jnp.arange(COLUMNS, dtype=jnp.int32)[None]
    noise = exponential(words[:, :1], words[:, 1:], ids)
    scores = weights / np.asarray(noise, np.float64)
    score, best = gpu.race(PART, logits, law, words, **LAUNCH)
    np.testing.assert_array_equal(best, scores.argmax(axis=1))
    np.testing.assert_allclose(score, scores.max(axis=1), rtol=1e-5)


@pytest.mark.parametrize("is_certain", [False, True])
def test_excess_equals_float64(is_certain):
    seqs, inner = 3, 2
    logits, exact, heat = exact_rows(jnp.float32)
    law, weights = exact_law(exact, heat)
    random = np.random.default_rng(4)
    tokens = random.integers(0, VOCAB_SIZE, (seqs, inner + 1)).astype(np.int32)
    probs = random.dirichlet(np.full(COLUMNS, 0.1), tokens.shape)
    if is_certain:
        probs = np.eye(COLUMNS)[tokens]
    joint = random.uniform(0.3, 1, (seqs, inner)).astype(np.float32)
    draft = Draft(
        jnp.asarray(tokens), None if is_certain else jnp.asarray(probs, jnp.float32)
    )
    found = gpu.excess(PART, logits, law, draft, jnp.asarray(joint), **LAUNCH)
    total = weights.sum(axis=1, keepdims=True)
    target = weights / np.where(total > 0, total, 1)
    target = target.reshape(seqs, inner + 2, COLUMNS)[:, 1:-1]
    above = np.maximum(joint[:, :, None] * target - probs[:, 1:], 0)
    np.testing.assert_allclose(found, above.sum(axis=2), rtol=1e-5, atol=1e-7)


def test_verdicts_are_those_of_whole_rows():
    run = jax.jit(
        partial(gpu.rejection_sampling, vocab_size=290, axis_name=None, **LAUNCH),
        compiler_options=UNOPTIMISED,
    )
    one = make_round(16, vocab=290)
    np.testing.assert_array_equal(run(*one.arrays, **one.numbers), by_whole_rows(one))


def test_slices_agree_on_the_verdict():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = P(None, None, "model")
    decide = partial(
        gpu.rejection_sampling, vocab_size=2**30, axis_name="model", **LAUNCH
    )
    run = jax.jit(
        jax.shard_map(
            lambda *arrays: decide(*arrays[:-1], **arrays[-1]),
            mesh=mesh,
            in_specs=(P(), split, split, P(), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )
    one = make_round(16, vocab=290, seed=1)
    np.testing.assert_array_equal(run(*one.arrays, one.numbers), by_whole_rows(one))
