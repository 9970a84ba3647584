"""Passes in C++: sums are float64's, a row's bits its own, verdicts of whole rows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec_kernels.rejection_sampling import cpu
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import Draft, Law, Slice
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import by_whole_rows, make_round
from tests.kernels.test_rejection_sampling_gpu import ROWS, exact_law, exact_rows
from tests.kernels.test_rejection_sampling_tpu import COLUMNS, VOCAB_SIZE, oracle

pytestmark = pytest.mark.usefixtures("has_native")

# Neither whole registers nor all tokens.
PART = Slice(columns=COLUMNS, tile=COLUMNS, vocab_size=VOCAB_SIZE, axis_name=None)
INFINITY = float("inf")


@pytest.fixture(scope="module")
def rows() -> tuple[jax.Array, np.ndarray, np.ndarray]:
    return exact_rows(jnp.float32)


def test_statistics_equal_float64(rows):
    logits, _, heat = rows
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, ROWS).astype(np.int32)
    tokens[-3:] = -1, VOCAB_SIZE, 2**30
    is_sampled = jnp.arange(ROWS) == 1
    run = partial(cpu.statistics, PART, logits, jnp.asarray(heat), jnp.asarray(tokens))
    found = run(is_sampled)
    expected = oracle(np.asarray(logits, np.float32), heat, tokens)
    np.testing.assert_array_equal(found.maximum, expected[0].astype(np.float32))
    np.testing.assert_array_equal(found.best, expected[1])
    np.testing.assert_allclose(found.total, expected[2], rtol=2e-6)
    np.testing.assert_array_equal(found.drafted, expected[3].astype(np.float32))
    assert not np.asarray(run(None).total).any()


@pytest.mark.parametrize("counts", [True, False])
def test_amounts_equal_float64(rows, counts):
    logits, exact, heat = rows
    law, weights = exact_law(exact, heat)
    limits = np.sort(exact[:, [3, 50, 200]], axis=1).clip(-1e30).astype(np.float32)
    found = cpu.amounts(PART, logits, law, jnp.asarray(limits), counts=counts)
    is_in = exact[:, None] >= limits[:, :, None]
    unit = np.ones_like(weights) if counts else weights
    expected = np.where(is_in, unit[:, None], 0.0).sum(axis=2)
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_probabilities_equal_float64(rows):
    logits, exact, heat = rows
    law, weights = exact_law(exact, heat)
    total = weights.sum(axis=1, keepdims=True)
    found = cpu.probabilities(PART, logits, law)
    # Of exponents as low as -87, in 24 bits.
    np.testing.assert_allclose(
        found, weights / np.where(total > 0, total, 1), rtol=6e-6, atol=1e-37
    )
    assert not np.asarray(found)[:, VOCAB_SIZE:].any()


def test_race_is_won_as_in_float64(rows):
    logits, exact, heat = rows
    law, weights = exact_law(exact, heat)
    for seed in range(20):
        words = np.random.default_rng(seed).integers(0, 2**32, (ROWS, 2), np.uint32)
        words = jnp.asarray(words)
        ids = jnp.arange(COLUMNS, dtype=jnp.int32)[None]
        noise = exponential(words[:, :1], words[:, 1:], ids)
        scores = weights / np.asarray(noise, np.float64)
        score, best = cpu.race(PART, logits, law, words)
        np.testing.assert_array_equal(best, scores.argmax(axis=1))
        np.testing.assert_allclose(score, scores.max(axis=1), rtol=2e-6)


@pytest.mark.parametrize("is_certain", [False, True])
def test_excess_equals_float64(rows, is_certain):
    seqs, inner = 3, 2
    logits, exact, heat = rows
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
    found = cpu.excess(PART, logits, law, draft, jnp.asarray(joint))
    total = weights.sum(axis=1, keepdims=True)
    target = weights / np.where(total > 0, total, 1)
    target = target.reshape(seqs, inner + 2, COLUMNS)[:, 1:-1]
    above = np.maximum(joint[:, :, None] * target - probs[:, 1:], 0)
    np.testing.assert_allclose(found, above.sum(axis=2), rtol=1e-5, atol=1e-7)


def law_of(logits: np.ndarray) -> tuple[Law, np.ndarray]:
    """Everything that a row has, and its weights."""
    maximum = logits.max(axis=1)
    weights = np.exp(logits.astype(np.float64) - maximum[:, None])
    arrays = np.ones(len(logits)), maximum, np.full(len(logits), -INFINITY)
    arrays = *arrays, weights.sum(axis=1)
    return Law(*(jnp.asarray(array, jnp.float32) for array in arrays)), weights


@pytest.mark.parametrize("counts", [True, False])
def test_borders_are_those_that_sorting_finds(counts):
    """Sharp and flat rows, equal logits, sorted ones, and one that is not searched."""
    random = np.random.default_rng(0)
    part = Slice(columns=700, tile=700, vocab_size=697, axis_name=None)
    for spread in (0.01, 3, 60):
        logits = (random.normal(size=(8, 700)) * spread).astype(np.float32)
        logits[1::2] = np.round(logits[1::2])
        logits[2], logits[4] = np.sort(logits[2]), -np.sort(logits[4])
        logits[6] = 1.0
        logits[:, 697:] = -INFINITY
        law, weights = law_of(logits)
        unit = (weights > 1e-37) * 1.0 if counts else weights
        wanted = random.uniform(0.05, 0.95, 8) * unit.sum(axis=1)
        wanted = np.ceil(wanted) if counts else wanted
        is_searched = np.arange(8) != 5
        found, amount = cpu.search(
            part,
            jnp.asarray(logits),
            law,
            jnp.asarray(wanted, jnp.float32),
            is_searched=jnp.asarray(is_searched),
            counts=counts,
        )
        for row in range(8):
            order = np.argsort(-logits[row], kind="stable")
            reached = np.cumsum(unit[row][order]) >= wanted[row]
            expected = logits[row][order][np.argmax(reached)]
            assert found[row] == (expected if is_searched[row] else -INFINITY)
            kept = logits[row] >= float(found[row])
            share = unit[row][kept].sum() if is_searched[row] else law.total[row]
            np.testing.assert_allclose(amount[row], share, rtol=1e-6)


def test_tokens_are_drawn_where_the_sum_of_chances_passes_the_uniform():
    """Of the target after all drafts or none, of the residual after a rejection."""
    random = np.random.default_rng(0)
    seqs, columns, size = 400, 600, 597
    part = Slice(columns=columns, tile=columns, vocab_size=size, axis_name=None)
    logits = (random.normal(size=(seqs, columns)) * 3).astype(np.float32)
    logits[:, size:] = 90.0
    law, weights = law_of(np.where(np.arange(columns) < size, logits, -INFINITY))
    target = weights / weights.sum(axis=1, keepdims=True)
    probs = random.dirichlet(np.full(columns, 0.05), (seqs, 2)).astype(np.float32)
    index, joint = random.integers(0, 2, seqs), random.uniform(0.3, 1, seqs)
    is_rejected, uniform = random.random(seqs) < 0.7, random.random(seqs)
    tokens = random.integers(0, size, (seqs, 2))
    for certain in (False, True):
        own = probs[np.arange(seqs), index]
        if certain:
            own = np.eye(columns)[tokens[np.arange(seqs), index]]
        residual = np.maximum(joint[:, None] * target - own, 0)
        chances = np.where(is_rejected[:, None], residual, target)
        sums = np.cumsum(chances, axis=1)
        goal = uniform * sums[:, -1]
        found = cpu.draw(
            part,
            jnp.asarray(logits),
            law,
            Draft(jnp.asarray(tokens), None if certain else jnp.asarray(probs)),
            row=jnp.arange(seqs),
            index=jnp.asarray(index),
            is_rejected=jnp.asarray(is_rejected),
            joint=jnp.asarray(joint, jnp.float32),
            uniform=jnp.asarray(uniform, jnp.float32),
        )
        at = np.asarray(found)
        here, before = sums[np.arange(seqs), at], chances[np.arange(seqs), at]
        assert (chances[np.arange(seqs), at] > 0).all()
        np.testing.assert_array_less(goal, here + 1e-6)
        np.testing.assert_array_less(here - before, goal + 1e-6)


def by_cpu(vocab_size: int, **settings):
    run = partial(cpu.rejection_sampling, vocab_size=vocab_size, **settings)
    return jax.jit(run, compiler_options=UNOPTIMISED)


def test_verdicts_are_those_of_whole_rows():
    run = by_cpu(50, axis_name=None)
    for seed in range(6):
        one = make_round(seed=seed)
        np.testing.assert_array_equal(
            run(*one.arrays, **one.numbers), by_whole_rows(one)
        )


def test_a_row_is_decided_alike_whatever_rows_are_beside_it():
    one = make_round(16, vocab=2100, seed=7)
    run = by_cpu(2100, axis_name=None)
    together = np.asarray(run(*one.arrays, **one.numbers))
    for seq in range(16):
        rows = jax.tree.map(lambda part, at=seq: part[at : at + 1], one.arrays)
        numbers = jax.tree.map(lambda part, at=seq: part[at : at + 1], one.numbers)
        np.testing.assert_array_equal(
            np.asarray(run(*rows, **numbers))[:, 0], together[:, seq]
        )


def test_slices_agree_on_the_verdict():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = P(None, None, "model")
    decide = partial(cpu.rejection_sampling, vocab_size=2**30, axis_name="model")
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


def test_what_is_no_number_is_no_token():
    one = make_round(16, vocab=50, seed=2, is_filtered=False)
    logits = one.logits.copy()
    logits[:, :, 7], logits[:, :, 9] = np.nan, -np.inf
    logits[0] = np.nan
    one = replace(one, logits=logits)
    accepted, token = map(
        np.asarray, by_cpu(50, axis_name=None)(*one.arrays, **one.numbers)
    )
    assert (accepted[0], token[0]) == (0, 0)
    assert not np.isin(token[1:], (7, 9)).any()
    np.testing.assert_array_equal(
        (accepted[1:], token[1:]), np.asarray(by_whole_rows(one))[:, 1:]
    )
