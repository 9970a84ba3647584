"""Consecutive rounds follow the target's joint distribution, with real random keys.

Even if each round is exact, a sequence of rounds may be biased: block verification uses
the random numbers of drafts past those that it accepts, so a later round must not use
them again.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program.plan import RULES
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
from tests.support.round_models import DRAFT, DRAFTS, LENGTH, TARGET, VOCAB
from tests.support.rows import make_active

# Numbers of sequences in `make test` and in the long suite, which finds smaller errors.
FEWER, SEQS = 50_000, 150_000


def start(rule: str, seqs: int) -> Active:
    seeds = np.random.default_rng(1).integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    return make_active(
        seqs,
        num_tokens=1,
        num_prompt=1,
        temperature=1.0,
        rule=RULES[rule],
        seed=seeds,
    )


@jax.jit
def play_round(
    active: Active, history: jax.Array, num_draft_tokens: jax.Array
) -> tuple[Active, jax.Array]:
    """Run a round of the Markov chain; history is `[seq, LENGTH + DRAFTS + 1]`."""
    target = jnp.log(jnp.asarray(TARGET, jnp.float32))
    draft = jnp.log(jnp.asarray(DRAFT, jnp.float32))
    last, tokens, probs = active.last_tokens[:, 1], [], []
    logits = [target[last]]
    for index in range(DRAFTS):
        last, distribution = sample_draft(draft[last], index, active, Backend())
        tokens.append(last)
        probs.append(distribution)
        logits.append(target[last])
    drafts = jnp.stack(tokens, axis=1)
    proposal = Proposal(drafts, active.num_tokens, jnp.stack(probs, axis=1))
    verdict = verify(
        proposal,
        jnp.stack(logits, axis=1).reshape(-1, VOCAB),
        num_draft_tokens,
        active,
        Backend(),
        tree=Tree.chain(DRAFTS),
        adjust=None,
    )
    row = jnp.arange(len(history), dtype=jnp.int32)
    emitted = jnp.pad(drafts, ((0, 0), (0, 1)))
    emitted = emitted.at[row, verdict.num_accepted].set(verdict.next_token)
    offset = jnp.arange(DRAFTS + 1, dtype=jnp.int32)[None]
    place = jnp.where(
        offset <= verdict.num_accepted[:, None],
        active.num_tokens[:, None] - 1 + offset,
        history.shape[1],
    )
    history = history.at[row[:, None], place].set(emitted, mode="drop")
    active = dataclasses.replace(
        active,
        num_tokens=active.num_tokens + verdict.num_accepted + 1,
        last_tokens=jnp.stack([verdict.next_token] * 2, axis=1),
    )
    return active, history


def always(active: Active) -> jax.Array:
    """Choose the same K in every round."""
    return jnp.full_like(active.num_tokens, DRAFTS)


def by_the_past(active: Active) -> jax.Array:
    """Choose K by known tokens, the only thing that a controller may depend on."""
    return (active.last_tokens[:, 1] + active.num_tokens) % (DRAFTS + 1)


@jax.jit
def by_peeking(active: Active) -> jax.Array:
    """Choose K by this round's random numbers, which biases the texts.

    It is 0 if the first draft would be token 0.
    """
    draft = jnp.log(jnp.asarray(DRAFT, jnp.float32))
    token, _ = sample_draft(draft[active.last_tokens[:, 1]], 0, active, Backend())
    return jnp.where(token == 0, 0, DRAFTS)


def statistic_of(
    rule: str, seqs: int, choose: Callable[[Active], jax.Array] = always
) -> tuple[float, int]:
    """Return chi-square of the words against the target, and its degrees of freedom.

    Args:
        choose: K of each sequence in the next round.
    """
    active = start(rule, seqs)
    history = jnp.zeros((seqs, LENGTH + DRAFTS + 1), jnp.int32)
    for _ in range(LENGTH):
        active, history = play_round(active, history, choose(active))
    words = np.asarray(history)[:, :LENGTH]
    cell = words @ (VOCAB ** np.arange(LENGTH)[::-1])
    observed = np.bincount(cell, minlength=VOCAB**LENGTH)
    distribution = TARGET[0]
    for _ in range(LENGTH - 1):
        last = np.arange(distribution.size) % VOCAB
        distribution = (distribution[:, None] * TARGET[last]).reshape(-1)
    expected = distribution * seqs
    # Cells with fewer than 20 expected texts are merged. With 200 degrees of freedom,
    # the statistic is nearly normal.
    rare = expected < 20
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(expected) - 1
    return float(((observed - expected) ** 2 / expected).sum()), freedom


def follows_the_distribution(statistic: float, freedom: int) -> bool:
    return statistic < freedom + 5.5 * np.sqrt(2 * freedom)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
counted = pytest.mark.parametrize("seqs", [FEWER, slow(SEQS)])


# A constant K is a special case of the next test, so some rules are slow tests here.
@pytest.mark.parametrize("rule", [slow("standard"), "block", slow("coupled")])
@counted
def test_joint_distribution_over_rounds(rule, seqs):
    found = statistic_of(rule, seqs)
    assert follows_the_distribution(*found), found


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@counted
def test_k_may_depend_on_known_tokens(rule, seqs):
    found = statistic_of(rule, seqs, by_the_past)
    assert follows_the_distribution(*found), found


@pytest.mark.parametrize("rule", ["standard", slow("block"), "coupled"])
@counted
def test_k_that_depends_on_the_rounds_noise_is_detected(rule, seqs):
    """With the coupled rule K cannot change a text, so it is left out here."""
    found = statistic_of(rule, seqs, by_peeking)
    assert follows_the_distribution(*found) == (rule == "coupled"), found
