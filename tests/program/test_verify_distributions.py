"""Rounds with controls follow the joint distribution of plain decoding with them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.backend import Backend
from jaxspec.program import controls
from jaxspec.program.plan import TokenControls
from jaxspec.program.rows import Active, ControlRows
from jaxspec.program.tree.tree import Tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support import round_models
from tests.support.distributions import check_counts, controlled, filtered_distribution
from tests.support.round_models import DRAFTS, LENGTH, TARGET, VOCAB
from tests.support.rows import make_control_rows

SEQS = 15_000
PROMPT = (0, 3)
TEMPERATURE = 0.7
# The controls are strong enough that each changes the distribution of four tokens.
ASKED = TokenControls(
    presence_penalty=0.4,
    frequency_penalty=0.6,
    repetition_penalty=1.4,
    bias=((2, 0.8), (1, -0.3)),
    bad_words=((1, 2), (3, 3, 0)),
)


@functools.partial(jax.jit, static_argnames="is_plain", compiler_options=UNOPTIMISED)
def play_round(
    active: Active, tokens: jax.Array, asked: ControlRows, is_plain: bool
) -> tuple[Active, jax.Array]:
    adjust = controls.adjuster(
        asked, tokens, active, vocab_size=VOCAB, backend=Backend()
    )
    tree = Tree.chain(0 if is_plain else DRAFTS)
    wanted = jnp.full(SEQS, tree.num_levels, jnp.int32)
    active, tokens, _ = round_models.play_round(
        active, tokens, wanted, tree=tree, adjust=adjust
    )
    return active, tokens


def controlled_distribution() -> np.ndarray:
    """Return the probability of every text of `LENGTH` tokens, in float64."""
    distribution = []
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        known: list[int] = list(PROMPT)
        probability = 1.0
        for token in text:
            row = controlled(np.log(TARGET[known[-1]]), known, len(PROMPT), ASKED)
            probability *= filtered_distribution(row, TEMPERATURE)[token]
            known.append(token)
        distribution.append(probability)
    return np.array(distribution)


def check_distribution(rule: str, *, is_plain: bool = False) -> None:
    play_round.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    active, tokens = round_models.start(
        rule, SEQS, prompt=PROMPT, temperature=TEMPERATURE
    )
    asked = make_control_rows([ASKED], VOCAB)
    # Keep two entries: the others are padding.
    asked = dataclasses.replace(
        asked, bias_ids=asked.bias_ids[:, :2], bias_values=asked.bias_values[:, :2]
    )
    asked = dataclasses.replace(asked, bad_words=asked.bad_words[:, :2])
    asked = jax.tree.map(lambda leaf: jnp.repeat(leaf, SEQS, axis=0), asked)
    for _ in range(LENGTH):
        active, tokens = play_round(active, tokens, asked, is_plain)
    counts = round_models.count_words(tokens, len(PROMPT))
    check_counts(counts, controlled_distribution(), rule)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


# Controls change distributions before any rule applies, so few rules suffice here.
@pytest.mark.parametrize("rule", [slow("standard"), "block", slow("coupled")])
def test_drafting_rounds_follow_the_controlled_distribution(rule):
    check_distribution(rule)


def test_plain_rounds_follow_the_controlled_distribution():
    check_distribution("standard", is_plain=True)
