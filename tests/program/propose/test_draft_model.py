"""Drafts follow the draft model's own distribution, given all known tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.engine import ModelConfig
from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.program.plan import COUPLED, NO_TOKEN, STANDARD, TILE, PoolShape
from jaxspec.program.propose import (
    Proposal,
    Seen,
    draft_model,
    draft_sampling,
)
from jaxspec.program.rows import Active
from jaxspec.program.token_batch import make_token_batch
from jaxspec.program.tree.tree import Tree
from tests.kernels.oracle import UNOPTIMISED
from tests.kernels.rejection_rounds import coupled_noise
from tests.support.distributions import filtered_distribution
from tests.support.engines import make_micro
from tests.support.oracles import PagedModel, hf_logits, load_ours, model_config
from tests.support.rows import make_active, make_context

slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# Texts longer than the window of 8, with every number of tokens in the last page of 4.
LENGTHS = (11, 12, slow(13), slow(14))
DRAFTS = 3


class Round(NamedTuple):
    """A proposal of a draft model, with the text it continues."""

    reference: Any
    tokens: np.ndarray  # known tokens
    active: Active
    proposal: Proposal
    paged: PagedModel
    pages: Any


@functools.cache
def program_of(config: ModelConfig, pool: PoolShape, tree: Tree) -> Callable[..., Any]:
    """Compile a proposer for a tree; rule, text and length are data."""

    def run(params, pages, active):
        proposer = draft_model.DraftModel(config=config)
        return proposer.propose(params, pages, make_context(active, tree, pool), None)

    return jax.jit(run, compiler_options=UNOPTIMISED)


def propose(tree: Tree, length: int, **fields: Any) -> Round:
    """Draft after a fully accepted round, when two tokens have no KV yet.

    Args:
        fields: Fields of the only sequence.
    """
    reference = make_micro()
    tokens = np.random.default_rng(length).integers(3, 16, length)
    paged = PagedModel(
        model_config(reference), load_ours(reference), compiler_options=UNOPTIMISED
    )
    paged.run(tokens[:-2])
    active = dataclasses.replace(
        make_active(1, num_tokens=length, **fields),
        last_tokens=jnp.asarray(tokens[None, -2:], jnp.int32),
        page_table=jnp.asarray(paged.page_table),
    )

    run = program_of(paged.config, paged.pool, tree)
    proposal, pages = run(paged.params, paged.kv_pages, active)
    assert proposal.num_valid_drafts.tolist() == [tree.num_levels]
    return Round(reference, tokens, active, proposal, paged, pages)


def check_self_draft(length: int = 13) -> None:
    """Check that a chain's drafts and probabilities are the draft model's own."""
    reference, tokens, _, proposal, *_ = propose(
        Tree.chain(DRAFTS), length, temperature=0.8, top_p=0.95
    )
    assert proposal.probs is not None
    drafts, distributions = map(np.asarray, (proposal.tokens[0], proposal.probs[0]))
    known = np.concatenate([tokens, drafts])
    logits = hf_logits(reference, known)[length - 1 : -1]
    expected = filtered_distribution(logits, 0.8, top_p=np.float32(0.95))
    np.testing.assert_allclose(distributions, expected, atol=1e-4)
    assert (distributions[np.arange(DRAFTS), drafts] > 0).all()


def check_tree_drafts(tree: Tree, length: int = 13, *, rule: int | None = None) -> None:
    """Check that drafts are the next best tokens after their paths.

    Args:
        rule: Acceptance rule of a sampled sequence; None for a greedy one.
    """
    fields: dict[str, Any] = dict(temperature=0.0)
    if rule is not None:
        fields = dict(temperature=0.8, rule=rule, seed=np.array([[3, 9]], np.uint32))
    first = propose(tree, length, **fields)
    check_ranked(tree, first, first.tokens, first.active, first.proposal)


def check_ranked(
    tree: Tree, round_: Round, tokens: np.ndarray, active: Active, proposal: Proposal
) -> None:
    """Check that drafts are the next best after `tokens` and their own paths."""
    rule = None if proposal.probs is None else int(active.rule[0])
    drafts = np.asarray(proposal.tokens[0])
    for row in sorted({parent + 1 for parent in tree.parents}):
        depth = tree.depths[row]
        way = tree.paths[row][1 : depth + 1] - 1
        known = np.concatenate([tokens, drafts[way]])
        scores = hf_logits(round_.reference, known)[-1].astype(np.float64)
        if rule == COUPLED:
            place = active.num_tokens + depth
            size = round_.reference.config.vocab_size
            noise = coupled_noise(active.seed, place, size)
            scores = scores / 0.8 - np.log(noise[0])
        ranked = np.argsort(-scores).tolist()
        said = [
            int(drafts[node])
            for node, parent in enumerate(tree.parents)
            if parent == row - 1
        ]
        if rule == STANDARD and row == depth:
            # The main chain's token is sampled, and its siblings are the best of the
            # others.
            ranked.remove(said[0])
            ranked.insert(0, said[0])
        assert said == ranked[: len(said)], (row, way)


def check_next_round(length: int = 13) -> None:
    """Check the round after an accepted side path, whose keys and values were moved."""
    first = propose(SIDE_PATHS, length, temperature=0.0)
    row = SIDE_PATHS.num_nodes  # the deepest row of a side branch
    depth = SIDE_PATHS.depths[row]
    path = SIDE_PATHS.paths[row][1 : depth + 1] - 1
    assert depth == SIDE_PATHS.num_levels and path[0] != 0
    drafts = np.asarray(first.proposal.tokens[0])
    tokens = np.concatenate([first.tokens, drafts[path], [5]])
    active = dataclasses.replace(
        first.active,
        num_tokens=jnp.array([len(tokens)], jnp.int32),
        last_tokens=jnp.asarray(tokens[None, -2:], jnp.int32),
    )
    pages = draft_model.TreeModel(config=first.paged.config).observe(
        None,
        first.pages,
        make_context(first.active, SIDE_PATHS, first.paged.pool),
        Seen(
            nodes=(),
            tiles=None,
            tree=SIDE_PATHS,
            num_accepted=jnp.array([depth]),
            tree_row=jnp.array([row]),
            next_tokens=active.last_tokens,
            next_tile_tokens=None,
            first_row=None,
        ),
    )
    run = program_of(first.paged.config, first.paged.pool, SIDE_PATHS)
    proposal, _ = run(first.paged.params, pages, active)
    check_ranked(SIDE_PATHS, first, tokens, active, proposal)


LEAVES = Tree(parents_of(leaf_paths(3, 2)))
SIDE_PATHS = Tree(
    parents_of(
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 0, 1)]
    )
)


@pytest.mark.parametrize("tree", [LEAVES, SIDE_PATHS], ids=["leaves", "side paths"])
@pytest.mark.parametrize("length", LENGTHS)
def test_tree_drafts_follow_the_model(tree, length):
    """Page and window borders fall at every offset of the tree."""
    check_tree_drafts(tree, length)


@pytest.mark.parametrize("rule", [STANDARD, COUPLED])
@pytest.mark.parametrize("tree", [LEAVES, SIDE_PATHS], ids=["leaves", "side paths"])
def test_side_drafts_are_the_next_best_tokens(tree, rule):
    """Coupled sequences rank with the noise that the target uses at the position."""
    check_tree_drafts(tree, rule=rule)


@pytest.mark.parametrize("length", LENGTHS)
def test_next_round_reads_the_accepted_side_path(length):
    check_next_round(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_drafts_follow_the_model_over_all_tokens(length):
    check_self_draft(length)


def test_draft_prefill_compares_tokens_of_plain_rounds(monkeypatch):
    """Draft prefill reports how the draft model would have done in plain rounds.

    Logits are computed only for the tiles of these tokens, one tile at a time.
    """
    reference = make_micro()
    tokens = np.random.default_rng(0).integers(3, 16, 2 * TILE)
    paged = PagedModel(model_config(reference), load_ours(reference), num_pages=24)
    pool = dataclasses.replace(paged.pool, num_rows=2)
    own = hf_logits(reference, tokens).argmax(axis=1)
    next_tokens = np.where(np.arange(2 * TILE) % 3, own, (own + 1) % 16)
    next_tokens[: TILE + 5] = NO_TOKEN  # tokens of a prompt
    tiles = jnp.asarray(tokens.reshape(2, TILE), jnp.int32)
    ends = jnp.array([TILE, 2 * TILE], jnp.int32)
    table = jnp.broadcast_to(paged.page_table, (2, paged.page_table.shape[1]))

    def run(params, pages, next_tokens):
        is_written = jnp.ones(tiles.shape, bool)
        prompts = make_token_batch(tiles, ends, table, is_written, pool)
        context = make_context(make_active(1), Tree.chain(0), pool, prompts=prompts)
        proposer = draft_model.DraftModel(config=paged.config)
        active = make_active(2 * TILE, temperature=0.0)
        return proposer.draft_prefill(params, pages, context, active, next_tokens)

    widths, inner = set(), draft_model._finite_logits

    def spy(model, output):
        widths.add(output.hidden_states.shape[0])
        return inner(model, output)

    monkeypatch.setattr(draft_model, "_finite_logits", spy)
    run = jax.jit(run, compiler_options=UNOPTIMISED)
    _, acceptance_probabilities = run(
        paged.params, paged.kv_pages, jnp.asarray(next_tokens)
    )
    expected = np.where(next_tokens == NO_TOKEN, -1, next_tokens == own)
    np.testing.assert_array_equal(acceptance_probabilities, expected)
    assert widths == {TILE}


def test_earlier_proposals_replace_sampled_drafts():
    before = Proposal(jnp.array([[4, 5], [6, 7], [1, 2]]), jnp.array([2, 1, 0]))
    drawn = jnp.array([0, 3, 3], jnp.int32)
    probs = jnp.full((3, 8), 0.125)
    token, distribution = draft_sampling._override(before, jnp.int32(1), drawn, probs)
    np.testing.assert_array_equal(token, [5, 3, 3])
    assert distribution is not None
    np.testing.assert_array_equal(distribution[0], np.arange(8) == 5)
    np.testing.assert_array_equal(distribution[1:], probs[1:])
    token, distribution = draft_sampling._override(before, jnp.int32(1), drawn, None)
    np.testing.assert_array_equal(token, [5, 3, 3])
    assert distribution is None
