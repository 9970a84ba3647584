"""Rounds over draft trees follow the target's distribution, or its exact tokens.

The target and the draft are Markov chains over a few tokens, so that thousands of
sequences run at once. The draft model's own code fills the trees.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.models.backend import Backend
from jaxspec.program.plan import RULES
from jaxspec.program.propose import Proposal, draft_sampling
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.program.tree.verify import verify_tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support.distributions import check_counts
from tests.support.round_models import DRAFT, TARGET
from tests.support.rows import make_active

VOCAB, LENGTH, SEQS = len(TARGET), 4, 16_000
FAR = 1000  # a length limit past all slots
PLAIN = Tree.chain(0)
LEAVES = Tree(parents_of(leaf_paths(2, 1)))
MANY_LEAVES = Tree(parents_of(leaf_paths(3, 2)))
BRANCHED = Tree(
    parents_of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0)])
)
# The deepest drafts are not on the main chain.
ASIDE = Tree(parents_of([(0,), (1,), (1, 0), (1, 1), (1, 0, 0)]))
TREES: dict[str, Tree] = {
    "leaves": LEAVES,
    "many leaves": MANY_LEAVES,
    "branched": BRANCHED,
    "aside": ASIDE,
}
# Rules and trees whose distribution `make test` checks.
SOME = ("standard", "many leaves"), ("block", "branched")


class Found(NamedTuple):
    """Result of a round."""

    num_accepted: Any
    row: Any
    depth: Any


def start(rule: str, *, temperature: float = 1.0) -> Active:
    seeds = np.random.default_rng(1).integers(0, 2**32, (SEQS, 2), dtype=np.uint32)
    return make_active(
        SEQS,
        num_tokens=1,
        num_prompt=1,
        temperature=temperature,
        rule=RULES[rule],
        seed=seeds,
    )


def grow(tree: Tree, draft: jax.Array, active: Active) -> Proposal:
    """Return the proposal of a draft model that reads only the last token."""
    drafts, probs = jnp.zeros((SEQS, tree.num_nodes), jnp.int32), []
    for level in range(tree.num_levels):
        known = jnp.concatenate([active.last_tokens[:, 1:], drafts], axis=1)
        scores = draft[known[:, tree.branching[level]]]
        token, distribution = sample_draft(scores[:, 0], level, active, Backend())
        if not active.all_greedy:
            scores = draft_sampling._add_noise(scores, level, active)
        drafts = draft_sampling._fill_level(tree, level, drafts, token, scores)
        probs.append(distribution)
    distributions = None if active.all_greedy else jnp.stack(probs, axis=1)
    return Proposal(drafts, active.num_tokens, distributions)


def play_round(
    active: Active,
    history: jax.Array,
    num_draft_tokens: jax.Array,
    distributions: tuple[jax.Array, jax.Array],
    *,
    tree: Tree,
    max_model_len: int,
) -> tuple[Active, jax.Array, Found]:
    """Run a round of the Markov chain; return sequences, history and the result."""
    target, draft = map(jnp.log, distributions)
    inputs, proposal = active.last_tokens[:, 1:], None
    if tree.num_nodes:
        proposal = grow(tree, draft, active)
        inputs = jnp.concatenate([inputs, proposal.tokens], axis=1)
    found = verify_tree(
        tree,
        proposal,
        inputs,
        target[inputs].reshape(-1, VOCAB),
        num_draft_tokens,
        active,
        Backend(),
        adjust=None,
        forced_acceptance=None,
        max_model_len=max_model_len,
    )
    depth = jnp.asarray(tree.depths)[found.tree_row]
    count = depth + 1
    offset = jnp.arange(tree.max_emitted, dtype=jnp.int32)[None]
    place = active.num_tokens[:, None] - 1 + offset
    place = jnp.where(offset < count[:, None], place, history.shape[1])
    seq = jnp.arange(SEQS, dtype=jnp.int32)[:, None]
    history = history.at[seq, place].set(found.tokens, mode="drop")
    newest = jnp.take_along_axis(found.tokens, count[:, None] - 1, axis=1)
    active = dataclasses.replace(
        active,
        num_tokens=active.num_tokens + count,
        last_tokens=jnp.repeat(newest, 2, axis=1),
    )
    return active, history, Found(found.num_accepted, found.tree_row, depth)


@functools.cache
def program_of(tree: Tree, max_model_len: int) -> Callable[..., Any]:
    """Compile a round of a tree; rule, distributions and draft lengths are data."""
    return jax.jit(
        functools.partial(play_round, tree=tree, max_model_len=max_model_len),
        compiler_options=UNOPTIMISED,
    )


@functools.cache
def play(
    tree: Tree,
    rule: str,
    *,
    temperature: float = 1.0,
    all_greedy: bool = False,
    draft: str = "other",
    max_model_len: int = FAR,
    few: bool = False,
) -> tuple[np.ndarray, list[Found]]:
    """Return words of `LENGTH` tokens of all sequences, and the rounds.

    Args:
        draft: "same" drafts with the target itself, "other" with another model.
        few: Whether sequences want different numbers of levels.
    """
    active = start(rule, temperature=temperature)
    first = jnp.asarray(np.arange(SEQS) % VOCAB if all_greedy else np.zeros(SEQS, int))
    first = jnp.repeat(first.astype(jnp.int32)[:, None], 2, axis=1)
    active = dataclasses.replace(active, last_tokens=first, all_greedy=all_greedy)
    history = jnp.zeros((SEQS, LENGTH + tree.max_emitted), jnp.int32)
    distributions = TARGET, TARGET if draft == "same" else DRAFT
    given = tuple(
        jnp.asarray(distribution, jnp.float32) for distribution in distributions
    )
    run = program_of(tree, FAR if tree.is_chain else max_model_len)
    num_draft_tokens, rounds = jnp.full(SEQS, tree.num_levels, jnp.int32), []
    if few:
        num_draft_tokens = jnp.arange(SEQS, dtype=jnp.int32) % (tree.num_levels + 1)
    for _ in range(LENGTH):
        active, history, found = run(active, history, num_draft_tokens, given)
        rounds.append(jax.tree.map(np.asarray, found))
    return np.asarray(history)[:, :LENGTH], rounds


def num_side_drafts(found: Found) -> np.ndarray:
    """Return the number of accepted drafts on side branches."""
    return found.depth - found.num_accepted


def check_tree_distribution(rule: str, name: str) -> None:
    """Check words of four tokens, over rounds of which many accept side branches."""
    play.cache_clear()
    tree = TREES[name]
    words, rounds = play(tree, rule)
    assert (num_side_drafts(rounds[0]) > 0).mean() > 0.05
    cell = words @ (VOCAB ** np.arange(LENGTH)[::-1])
    distribution = TARGET[0]
    for _ in range(LENGTH - 1):
        last = np.arange(distribution.size) % VOCAB
        distribution = (distribution[:, None] * TARGET[last]).reshape(-1)
    counts = np.bincount(cell, minlength=VOCAB**LENGTH)
    check_counts(counts, distribution, (rule, name))
    # Also check pairs of adjacent tokens: an error in few pairs is too small among all
    # words.
    shape = (VOCAB,) * LENGTH
    for place in range(LENGTH - 1):
        others = tuple({*range(LENGTH)} - {place, place + 1})
        found, wanted = (
            one.reshape(shape).sum(axis=others) for one in (counts, distribution)
        )
        check_counts(found, wanted, (rule, name, place))


def check_same_words(name: str, **changes: Any) -> None:
    """Check that tokens equal plain decoding's, for rules that a seed determines."""
    play.cache_clear()
    tree, settings = TREES[name], dict(rule="coupled") | changes
    words, rounds = play(tree, **settings)
    plain, _ = play(PLAIN, **settings)
    np.testing.assert_array_equal(words, plain)
    num_side = num_side_drafts(rounds[0])
    assert (num_side > 0).mean() > 0.02
    assert (num_side >= 0).all()


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        pytest.param(
            rule,
            name,
            marks=() if (rule, name) in SOME else pytest.mark.slow,
        )
        for rule in ("standard", "block", "coupled")
        for name in TREES
    ],
)
def test_words_follow_the_distribution_of_the_target(rule: str, name: str):
    check_tree_distribution(rule, name)


@pytest.mark.parametrize("name", ["many leaves", "branched"])
def test_words_equal_plain_decoding(name: str):
    check_same_words(name)


@pytest.mark.parametrize("name", ["branched", "aside"])
def test_greedy_words_equal_plain_decoding(name: str):
    check_same_words(name, temperature=0.0, all_greedy=True)


def check_few_levels() -> None:
    """Check that sequences get no more levels than each wants."""
    check_same_words("branched", few=True)
    _, rounds = play(BRANCHED, "coupled", few=True)
    wanted = np.arange(SEQS) % (BRANCHED.num_levels + 1)
    for found in rounds:
        assert (found.depth <= wanted).all()


def test_sequences_get_no_more_levels_than_wanted():
    check_few_levels()


def check_last_slots() -> None:
    """Check that drafts whose slots would be past `max_model_len` are ignored."""
    check_same_words("branched", max_model_len=7)
    _, rounds = play(BRANCHED, "coupled", max_model_len=7)
    # At first a sequence has one token, so the draft of row r has slot r.
    assert 3 < rounds[0].row.max() < 7


def test_drafts_past_max_model_len_are_ignored():
    check_last_slots()


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize(
    "name", ["many leaves", pytest.param("branched", marks=pytest.mark.slow)]
)
def test_draft_equal_to_the_target_is_fully_accepted(rule: str, name: str):
    tree = TREES[name]
    for found in play(tree, rule, draft="same")[1]:
        assert (found.num_accepted == tree.main_chain.num_nodes).all()


@pytest.mark.parametrize(
    "rule",
    [
        "standard",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("block", "coupled")),
    ],
)
def test_side_leaves_raise_the_number_of_accepted_tokens(rule: str):
    chain = play(Tree.chain(3), rule)[1][0]
    leaves = play(MANY_LEAVES, rule)[1][0]
    np.testing.assert_array_equal(leaves.num_accepted, chain.num_accepted)
    assert num_side_drafts(leaves).mean() > 0.1
