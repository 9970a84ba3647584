"""Consecutive rounds follow the target's joint distribution, with real random keys.

Even if each round is exact, a sequence of rounds may be biased: block verification uses
the random numbers of drafts past those that it accepts, so a later round must not use
them again.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from tests.support import round_models
from tests.support.round_models import DRAFT, DRAFTS, LENGTH

# Numbers of sequences in `make test` and in the long suite, which finds smaller errors.
FEWER, SEQS = 50_000, 150_000


play_round = jax.jit(
    functools.partial(round_models.play_round, tree=Tree.chain(DRAFTS))
)


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
    active, tokens = round_models.start(rule, seqs)
    for _ in range(LENGTH):
        active, tokens, _ = play_round(active, tokens, choose(active))
    observed = round_models.count_words(tokens)
    expected = round_models.word_distribution() * seqs
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
