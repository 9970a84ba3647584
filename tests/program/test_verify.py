"""In a mixed batch, every sequence's verdict equals that of a float64 loop."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program.plan import BLOCK, COUPLED, STANDARD
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import _group_size, force, verify
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import (
    GREEDY,
    START,
    Round,
    by_force,
    by_loops,
    make_round,
)
from tests.support.distributions import check_counts
from tests.support.rows import make_active

SEQS, DRAFTS, VOCAB = 240, 3, 16
STOP = 2


def make_batch(kinds: tuple[int, ...]) -> tuple[Round, Active, Round]:
    """Return a round, its sequences, and the round with early stop ids masked."""
    one = make_round(SEQS, DRAFTS, VOCAB, seed=4, kinds=kinds)
    # In some sequences, the first two positions may not hold the stop id.
    is_early = np.random.default_rng(4).random(SEQS) < 0.5
    min_total = np.where(is_early, START + 2, 0)
    masked = one.logits.copy()
    masked[is_early, :2, STOP] = -np.inf
    active = one.active(min_total=min_total, stop_ids=[[STOP]] * SEQS)
    return one, active, replace(one, logits=masked)


def run_verify(one: Round, active: Active, **forced: Any) -> np.ndarray:
    tokens, draft, logits, num_valid_drafts, _ = one.arrays
    decide = partial(verify, tree=Tree.chain(DRAFTS), adjust=None, **forced)
    # Jit a new function, because a cached trace would not contain a mutant.
    run = jax.jit(lambda *args: decide(*args, Backend()), compiler_options=UNOPTIMISED)
    proposal = Proposal(tokens, num_valid_drafts, draft)
    return np.array(run(proposal, logits.reshape(-1, VOCAB), num_valid_drafts, active))


def check_mixed_batch(kinds: tuple[int, ...]) -> None:
    """Check the verdict of every sequence of a batch with these kinds."""
    one, active, masked = make_batch(kinds)
    expected = by_loops(masked)
    np.testing.assert_array_equal(run_verify(one, active), expected)
    assert set(expected[0]) == set(range(DRAFTS + 1))
    assert not np.array_equal(by_loops(one), expected), "no early stop id matters"


ALL = STANDARD, COUPLED, GREEDY, BLOCK


# Without coupled and block sequences, the program skips the branches for them.
@pytest.mark.parametrize("kinds", [ALL, (GREEDY,), (STANDARD, GREEDY), (COUPLED,)])
def test_verdicts_equal_those_of_loops(kinds):
    check_mixed_batch(kinds)


def check_groups() -> None:
    """Check the verdicts of a batch that exceeds the memory of one group."""
    most = 4 * VOCAB * (DRAFTS + 1) * 32
    with patch("jaxspec.program.verify.MAX_GROUP_BYTES", most):
        assert _group_size((SEQS, DRAFTS + 1, VOCAB)) == 30
        check_mixed_batch(ALL)


def test_groups_decide_like_the_whole_batch():
    check_groups()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((8, 6, 256_000), 8),
        ((256, 6, 256_000), 32),
        ((256, 1, 256_000), 256),
        ((256, 6, 32_000), 256),  # each of eight shards of the vocabulary
        ((1, 6, 256_000), 1),
    ],
)
def test_group_size_is_bounded_by_logits(shape, size):
    assert _group_size(shape) == size


# There are more rates than drafts, as in a launch with fewer drafts than the engine's
# maximum.
RATES = jnp.array([0.9, 0.6, 0.75, 0.1], jnp.float32)


def test_forced_acceptance_ignores_the_models():
    """A draft passes if its uniform is below its rate."""
    one, active, masked = make_batch((STANDARD, COUPLED, GREEDY))
    is_passed = one.numbers["accept_uniform"] < RATES[None, :DRAFTS]
    is_passed &= jnp.arange(DRAFTS)[None] < one.num_valid_drafts[:, None]
    counts = np.cumprod(is_passed, axis=1).sum(axis=1)
    found = run_verify(one, active, forced_acceptance=RATES)
    np.testing.assert_array_equal(found, by_force(masked, counts))
    assert (found[0] != by_loops(masked)[0]).mean() > 0.3


def test_forced_counts_follow_the_probabilities():
    seqs = 40_000
    seeds = np.random.default_rng(3).integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    active = make_active(seqs, seed=seeds)
    for count, distribution in (
        (3, [0.1, 0.9 * 0.4, 0.54 * 0.25, 0.54 * 0.75]),
        (1, [0.1, 0.9, 0, 0]),
    ):
        found = force(RATES[:3], jnp.full(seqs, count, jnp.int32), active)
        counts = np.bincount(np.asarray(found), minlength=4)
        check_counts(counts, np.array(distribution))
    sure = jnp.array([1.0, 1.0, 0.0], jnp.float32)
    found = force(sure, jnp.full(seqs, 3, jnp.int32), active)
    assert set(np.asarray(found)) == {2}
