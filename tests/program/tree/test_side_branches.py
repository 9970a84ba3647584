"""Rounds over draft trees give the tokens of plain decoding, if a seed determines them.

The target and the draft are Markov chains over a few tokens, so that thousands of
sequences run at once. The draft model's own code fills the trees.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.program.tree.tree import Tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support import round_models
from tests.support.distributions import check_counts
from tests.support.round_models import DRAFT, FAR, LENGTH, TARGET, VOCAB, Found

SEQS = 4_000
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


@functools.cache
def program_of(tree: Tree, max_model_len: int) -> Callable[..., Any]:
    """Compile a round of a tree; rule, distributions and draft lengths are data."""
    return jax.jit(
        functools.partial(
            round_models.play_round, tree=tree, max_model_len=max_model_len
        ),
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
    """Return the prompt and the next tokens of all sequences, and the rounds.

    Args:
        draft: "same" drafts with the target itself, "other" with another model.
        few: Whether sequences want different numbers of levels.
    """
    active, tokens = round_models.start(rule, SEQS, temperature=temperature)
    if all_greedy:
        first = jnp.arange(SEQS, dtype=jnp.int32)[:, None] % VOCAB
        last = jnp.repeat(first, 2, axis=1)
        active = dataclasses.replace(active, last_tokens=last, all_greedy=True)
    distributions = TARGET, TARGET if draft == "same" else DRAFT
    given = tuple(jnp.asarray(one, jnp.float32) for one in distributions)
    run = program_of(tree, FAR if tree.is_chain else max_model_len)
    num_valid_drafts, rounds = jnp.full(SEQS, tree.num_levels, jnp.int32), []
    if few:
        num_valid_drafts = jnp.arange(SEQS, dtype=jnp.int32) % (tree.num_levels + 1)
    for _ in range(LENGTH):
        active, tokens, found = run(active, tokens, num_valid_drafts, given)
        rounds.append(jax.tree.map(np.asarray, found))
    return np.asarray(tokens)[:, : 1 + LENGTH], rounds


def num_side_drafts(found: Found) -> np.ndarray:
    """Return the number of accepted drafts on side branches."""
    return found.depth - found.num_accepted


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


# Compiling a tree's program takes most of the time, so `make test` has mostly one tree.
BOTH = ["branched", pytest.param("many leaves", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", BOTH)
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
@pytest.mark.parametrize("name", BOTH)
def test_draft_equal_to_the_target_is_fully_accepted(rule: str, name: str):
    tree = TREES[name]
    for found in play(tree, rule, draft="same")[1]:
        assert (found.num_accepted == tree.main_chain.num_nodes).all()


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", BOTH)
def test_words_follow_the_distribution_of_the_target(rule: str, name: str):
    words, rounds = play(TREES[name], rule)
    assert (num_side_drafts(rounds[0]) > 0).mean() > 0.05
    expected = round_models.word_distribution()
    check_counts(round_models.count_words(words), expected, (rule, name))


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
@pytest.mark.parametrize("name", BOTH)
def test_side_branches_raise_the_number_of_accepted_tokens(rule: str, name: str):
    chain = play(Tree.chain(3), rule)[1][0]
    branched = play(TREES[name], rule)[1][0]
    np.testing.assert_array_equal(branched.num_accepted, chain.num_accepted)
    assert num_side_drafts(branched).mean() > 0.1
