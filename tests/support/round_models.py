"""Rounds of Markov chains: thousands of sequences whose models read one token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.backend import Backend
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import RULES
from jaxspec.program.propose import Proposal, draft_sampling
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from tests.support.rows import make_active
from tests.support.trees import verify_tree

VOCAB, DRAFTS, LENGTH = 4, 3, 4
FAR = 1000  # a length limit past all slots


_random = np.random.default_rng(0)


# Next-token probabilities, by last token. The draft model prefers tokens that are rare
# in the target.
TARGET = _random.dirichlet([0.7] * VOCAB, VOCAB)


DRAFT = 0.5 * _random.dirichlet([0.7] * VOCAB, VOCAB) + 0.5 * TARGET


class Found(NamedTuple):
    """Result of a round."""

    num_accepted: Any
    row: Any
    depth: Any


def start(
    rule: str, seqs: int, *, prompt: tuple[int, ...] = (0,), temperature: float = 1.0
) -> tuple[Active, jax.Array]:
    """Return sequences that have only a prompt, and their tokens, each on one page."""
    seeds = np.random.default_rng(1).integers(0, 2**32, (seqs, 2), dtype=np.uint32)
    active = make_active(
        seqs,
        num_tokens=len(prompt),
        num_prompt=len(prompt),
        temperature=temperature,
        rule=RULES[rule],
        seed=seeds,
    )
    last = jnp.array([(0, *prompt)[-2:]], jnp.int32)
    active = dataclasses.replace(
        active,
        last_tokens=jnp.broadcast_to(last, (seqs, 2)),
        page_table=jnp.arange(seqs, dtype=jnp.int32)[:, None],
    )
    # Room for a last round that accepts all of a tree.
    tokens = np.zeros((seqs, len(prompt) + LENGTH + 8), np.int32)
    tokens[:, : len(prompt)] = prompt
    return active, jnp.asarray(tokens)


def grow(
    tree: Tree, draft: jax.Array, active: Active, adjust: Adjust | None
) -> Proposal:
    """Return the proposal of a draft model that reads only the last token."""
    seqs = len(active.row)
    drafts, probs = jnp.zeros((seqs, tree.num_nodes), jnp.int32), []
    for level in range(tree.num_levels):
        known = jnp.concatenate([active.last_tokens[:, 1:], drafts], axis=1)
        scores = draft[known[:, tree.branching[level]]]
        if adjust is not None:
            scores = adjust(scores, drafts, num_before=level)
        token, distribution = sample_draft(scores[:, 0], level, active, Backend())
        if not active.all_greedy:
            scores = draft_sampling._add_noise(scores, level, active)
        drafts = draft_sampling._fill_level(tree, level, drafts, token, scores)
        probs.append(distribution)
    distributions = None if active.all_greedy else jnp.stack(probs, axis=1)
    return Proposal(drafts, active.num_tokens, distributions)


def play_round(
    active: Active,
    tokens: jax.Array,
    num_valid_drafts: jax.Array,
    distributions: tuple[Any, Any] = (TARGET, DRAFT),
    *,
    tree: Tree,
    adjust: Adjust | None = None,
    max_model_len: int = FAR,
) -> tuple[Active, jax.Array, Found]:
    """Run a round; return sequences, their tokens, and the result."""
    target, draft = (jnp.log(jnp.asarray(one, jnp.float32)) for one in distributions)
    inputs, proposal = active.last_tokens[:, 1:], None
    if tree.num_nodes:
        proposal = grow(tree, draft, active, adjust)
        inputs = jnp.concatenate([inputs, proposal.tokens], axis=1)
    found = verify_tree(
        tree,
        proposal,
        target[inputs].reshape(-1, VOCAB),
        num_valid_drafts,
        active,
        adjust=adjust,
        max_model_len=max_model_len,
    )
    depth = jnp.asarray(tree.depths)[found.tree_row]
    offset = jnp.arange(tree.max_emitted, dtype=jnp.int32)[None]
    place = active.num_tokens[:, None] + offset
    place = jnp.where(offset <= depth[:, None], place, tokens.shape[1])
    seq = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    tokens = tokens.at[seq, place].set(found.tokens, mode="drop")
    newest = jnp.take_along_axis(found.tokens, depth[:, None], axis=1)
    active = dataclasses.replace(
        active,
        num_tokens=active.num_tokens + depth + 1,
        last_tokens=jnp.repeat(newest, 2, axis=1),
    )
    return active, tokens, Found(found.num_accepted, found.tree_row, depth)


def count_words(tokens: Any, num_prompt: int = 1) -> np.ndarray:
    """Count the texts of `LENGTH` tokens, by index among all texts."""
    words = np.asarray(tokens)[:, num_prompt:][:, :LENGTH]
    cells = words @ (VOCAB ** np.arange(LENGTH)[::-1])
    return np.bincount(cells, minlength=VOCAB**LENGTH)


def word_distribution() -> np.ndarray:
    """Return the probability of every text of `LENGTH` tokens after token 0."""
    distribution = TARGET[0]
    for _ in range(LENGTH - 1):
        last = np.arange(distribution.size) % VOCAB
        distribution = (distribution[:, None] * TARGET[last]).reshape(-1)
    return distribution
