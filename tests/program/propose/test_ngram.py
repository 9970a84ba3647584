"""N-gram lookups equal a search in Python, on random and chosen texts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import leaf_paths, parents_of
from jaxspec.program.propose import ngram, ngram_match
from jaxspec.program.tree.tree import Tree
from tests.kernels.oracle import UNOPTIMISED
from tests.support.lookups import (
    DRAFTS,
    JUNK,
    PAGE_SIZE,
    TABLE_LEN,
    drafts_of,
    in_pages,
    search_ngram,
)


def found_in(
    texts: list[list[int]], lookup: ngram.NGram, **given: Any
) -> list[list[int]]:
    """Return the valid drafts of each sequence."""
    tree = Tree.chain(given.get("num_draft_tokens", DRAFTS))
    sizes = dict(longest=lookup.longest, shortest=lookup.shortest)
    return drafts_of(
        texts,
        lambda active, pages: ngram.look_up(active, pages, **sizes, tree=tree),
        **given,
    )


def check_chosen_texts() -> None:
    """Check texts that test one rule each."""
    lookup = ngram.NGram(3, 1)
    cases = [
        # No match; a match of one token; no other match than the token itself.
        ([1, 2, 3, 4], []),
        ([5], []),
        ([5, 5], [5, 5, 5, 5]),
        # The longest match wins over a more recent shorter one.
        ([1, 2, 3, 7, 8, 4, 3, 6, 1, 2, 3], [7, 8, 4, 3]),
        # The most recent of two equally long matches.
        ([1, 2, 7, 4, 1, 2, 8, 5, 1, 2], [8, 5, 1, 2]),
        # A continuation that reaches the end of the known tokens starts over.
        ([6, 1, 2, 9, 1, 2], [9, 1, 2, 9]),
        # A match may overlap with the end, by all but one token.
        ([4, 4, 4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        # A match may be at the start of the text.
        ([1, 2, 3, 1], [2, 3, 1, 2]),
    ]
    texts = [text for text, _ in cases]
    assert found_in(texts, lookup) == [drafts for _, drafts in cases]
    # A page border after every token, and a text that fills its table.
    full = list(range(10, 10 + TABLE_LEN * PAGE_SIZE - 2)) + [10, 11]
    assert found_in([full], lookup) == [[12, 13, 14, 15]]


def test_chosen_texts_have_the_expected_drafts():
    check_chosen_texts()


@pytest.mark.parametrize("lookup", [(1, 1), (2, 1), (3, 2), (5, 5), (9, 3), (32, 1)])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_drafts_of_random_texts_equal_the_search(
    lookup: tuple[int, int], num_draft_tokens: int
):
    random = np.random.default_rng(sum(lookup) + num_draft_tokens)
    lengths = random.integers(1, TABLE_LEN * PAGE_SIZE + 1, 60)
    vocab = random.integers(2, 5, 60)
    texts = [
        random.integers(0, size, length).tolist()
        for size, length in zip(vocab, lengths, strict=True)
    ]
    texts += [[0], [0, 1]]
    one = ngram.NGram(*lookup)
    expected = [search_ngram(text, one, num_draft_tokens) for text in texts]
    assert found_in(texts, one, num_draft_tokens=num_draft_tokens) == expected
    counts = {len(drafts) for drafts in expected}
    assert 0 in counts
    assert num_draft_tokens in counts


def test_matches_below_the_minimum_length_are_ignored():
    texts = [[1, 2, 3, 4, 1, 2, 3], [9, 2, 3, 4, 1, 2, 3]]
    assert found_in(texts, ngram.NGram(5, 3)) == [[4, 1, 2, 3], []]
    # A match may have one token fewer than the text, but not more.
    assert found_in([[1, 1], [1, 1, 1]], ngram.NGram(2, 2)) == [[], [1] * DRAFTS]


def test_inactive_sequences_have_no_drafts():
    texts = [[1, 2, 1], [1, 2, 1]]
    found = found_in(texts, ngram.NGram(1, 1), is_active=[True, False])
    assert found == [[2, 1, 2, 1], []]


def branches(tokens: list[int], lookup: ngram.NGram, tree: Tree) -> list[int] | None:
    """Return the drafts of a tree of the matches' continuations, most frequent first.

    This is the specification. Nodes without a known continuation are `JUNK`.
    """
    found = []
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(lookup.longest, end + 1) and (
            tokens[end - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        if length >= lookup.shortest:
            found.append((length, end))
    found = sorted(found, reverse=True)[: ngram_match.NUM_BRANCHES]
    depth = tree.num_levels
    texts = [(tokens[end + 1 :] * depth)[:depth] for _, end in found]
    if not texts:
        return None
    drafts = texts[0][: tree.main_chain.num_nodes]
    for node in range(len(drafts), tree.num_nodes):
        parent = tree.parents[node]
        way = [drafts[row - 1] for row in tree.paths[parent + 1] if row]
        way = way[: tree.depths[parent + 1]]
        after = [text[len(way)] for text in texts if text[: len(way)] == way]
        siblings = [drafts[one] for one in range(node) if tree.parents[one] == parent]
        left = [token for token in after if token not in siblings]
        drafts.append(max(left, key=left.count) if left else JUNK)
    return drafts


TREES = [
    Tree(parents_of(leaf_paths(4, 1))),
    Tree(parents_of(leaf_paths(3, 2))),
    Tree(parents_of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0, 0)])),
]


def check_branches(tree: Tree = TREES[2]) -> None:
    """Check random texts over few tokens, whose matches have many continuations."""
    lookup, random = ngram.NGram(3, 1), np.random.default_rng(tree.num_nodes)
    texts = [
        random.integers(0, random.integers(2, 6), random.integers(1, 60)).tolist()
        for _ in range(80)
    ]
    active, pages = in_pages(texts, random)
    # Jit a new function, because a cached trace would not contain a mutant.
    run = jax.jit(
        lambda active, pages: ngram.look_up(
            active,
            pages,
            longest=lookup.longest,
            shortest=lookup.shortest,
            tree=tree,
        ),
        compiler_options=UNOPTIMISED,
    )
    found, num_unknown = run(active, jnp.asarray(pages)), []
    for text, drafts, count in zip(
        texts, np.asarray(found.tokens), np.asarray(found.num_valid_drafts), strict=True
    ):
        expected = branches(text, lookup, tree)
        assert count == (0 if expected is None else tree.num_levels)
        if expected is not None:
            num_unknown.append(expected.count(JUNK))
            # Nodes without a known continuation may hold anything.
            known = np.where(np.equal(expected, JUNK), JUNK, drafts)
            assert known.tolist() == expected, text
    assert min(num_unknown) < tree.num_nodes / 4 < max(num_unknown)


@pytest.mark.parametrize("tree", TREES, ids=["leaf", "leaves", "side paths"])
def test_side_branches_continue_other_matches(tree: Tree):
    check_branches(tree)
