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
from jaxspec.program.plan import RULES, TokenControls
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active, ControlRows
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import place_next, verify
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import check_counts, controlled, filtered_distribution
from tests.support.round_models import DRAFT, TARGET
from tests.support.rows import make_active, make_control_rows

VOCAB, DRAFTS, LENGTH, SEQS = len(TARGET), 3, 4, 15_000
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


def start(rule: str) -> tuple[Active, jax.Array]:
    """Return sequences that have only the prompt, each on its own page."""
    seeds = np.random.default_rng(1).integers(0, 2**32, (SEQS, 2), dtype=np.uint32)
    active = dataclasses.replace(
        make_active(
            SEQS,
            num_tokens=len(PROMPT),
            num_prompt=len(PROMPT),
            temperature=TEMPERATURE,
            rule=RULES[rule],
            seed=seeds,
        ),
        last_tokens=jnp.broadcast_to(jnp.array([PROMPT], jnp.int32), (SEQS, 2)),
        page_table=jnp.arange(SEQS, dtype=jnp.int32)[:, None],
    )
    tokens = np.zeros((SEQS, len(PROMPT) + LENGTH + DRAFTS + 1), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    return active, jnp.asarray(tokens)


@functools.partial(jax.jit, static_argnames="is_plain", compiler_options=UNOPTIMISED)
def play_round(
    active: Active, tokens: jax.Array, asked: ControlRows, is_plain: bool
) -> tuple[Active, jax.Array]:
    """Run one round of a Markov chain."""
    target = jnp.log(jnp.asarray(TARGET, jnp.float32))
    draft = jnp.log(jnp.asarray(DRAFT, jnp.float32))
    adjust = controls.adjuster(
        asked, tokens, active, vocab_size=VOCAB, backend=Backend()
    )
    last, distributions = active.last_tokens[:, 1], []
    logits = [target[last]]
    drafts = jnp.zeros((SEQS, 0 if is_plain else DRAFTS), jnp.int32)
    for index in range(drafts.shape[1]):
        row = adjust(draft[last][:, None], drafts, num_before=index)[:, 0]
        last, distribution = sample_draft(row, index, active, Backend())
        drafts = drafts.at[:, index].set(last)
        distributions.append(distribution)
        logits.append(target[last])
    proposal = None
    if distributions:
        proposal = Proposal(drafts, active.num_tokens, jnp.stack(distributions, axis=1))
    verdict = verify(
        proposal,
        jnp.stack(logits, axis=1).reshape(-1, VOCAB),
        jnp.full((SEQS,), drafts.shape[1], jnp.int32),
        active,
        Backend(),
        tree=Tree.chain(drafts.shape[1]),
        adjust=adjust,
    )
    emitted = place_next(drafts, verdict)
    offset = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    place = active.num_tokens[:, None] + offset
    is_new = offset <= verdict.num_accepted[:, None]
    seq = jnp.arange(SEQS, dtype=jnp.int32)[:, None]
    place = jnp.where(is_new, place, tokens.shape[1])
    tokens = tokens.at[seq, place].set(emitted, mode="drop")
    active = dataclasses.replace(
        active,
        num_tokens=active.num_tokens + verdict.num_accepted + 1,
        last_tokens=jnp.stack([verdict.next_token] * 2, axis=1),
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
    active, tokens = start(rule)
    asked = make_control_rows([ASKED], VOCAB)
    # Keep two entries: the others are padding.
    asked = dataclasses.replace(
        asked, bias_ids=asked.bias_ids[:, :2], bias_values=asked.bias_values[:, :2]
    )
    asked = dataclasses.replace(asked, bad_words=asked.bad_words[:, :2])
    asked = jax.tree.map(lambda leaf: jnp.repeat(leaf, SEQS, axis=0), asked)
    for _ in range(LENGTH):
        active, tokens = play_round(active, tokens, asked, is_plain)
    texts = np.asarray(tokens)[:, len(PROMPT) :][:, :LENGTH]
    cell = texts @ (VOCAB ** np.arange(LENGTH)[::-1])
    check_counts(
        np.bincount(cell, minlength=VOCAB**LENGTH), controlled_distribution(), rule
    )


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


# Controls change distributions before any rule applies, so few rules suffice here.
@pytest.mark.parametrize("rule", [slow("standard"), "block", slow("coupled")])
def test_drafting_rounds_follow_the_controlled_distribution(rule):
    check_distribution(rule)


def test_plain_rounds_follow_the_controlled_distribution():
    check_distribution("standard", is_plain=True)
