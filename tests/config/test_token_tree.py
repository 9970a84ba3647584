"""Trees as users write them: valid and malformed trees, and the order of drafts."""

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest

from jaxspec.config.token_tree import (
    MAX_NODES,
    Hits,
    Path,
    Place,
    best_tree,
    count_ranks,
    has_side_paths,
    leaf_paths,
    most_tokens,
    parents_of,
    read_paths,
)
from jaxspec.errors import ConfigError
from jaxspec.program.tree.tree import Tree
from tests.support.trees import every_tree


def test_strings_and_lists_are_equivalent():
    paths = ((0,), (0, 0), (1,))
    texts = ("[(0,), (0, 0), (1,)]", "[(0,),(0,0),(1,)]")
    for written in (*texts, paths, list(paths), list(map(list, paths))):
        assert read_paths(written) == paths


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("[(0,), (0, 0", "a list of tuples"),
        ("nonsense", "a list of tuples"),
        ("[(0,), (0.5,)]", "rank of each draft"),
        ("[(0,), (True,)]", "rank of each draft"),
        ("[(0,), ()]", "rank of each draft"),
        ("[(0,), (-1,)]", "rank of each draft"),
        ("{(0,): 1}", "a list of tuples"),
        ("[0, 1]", "a list of tuples"),
        (5, "a list of tuples"),
        ("[]", f"1 to {MAX_NODES} drafts, got '[]'"),
        ("[(0,), (0,)]", "(0,) appears twice"),
        ("[(0,), (1, 0)]", "(1, 0) has no parent: add (1,)"),
        ("[(0,), (0, 0, 0)]", "(0, 0, 0) has no parent: add (0, 0)"),
        ("[(0,), (2,)]", "(2,) comes after (1,), which is missing"),
        ("[(1,)]", "(1,) comes after (0,), which is missing"),
        (str([(n,) for n in range(MAX_NODES + 1)]), f"It has {MAX_NODES + 1}"),
    ],
)
def test_rejects_malformed_trees(written: object, hint: str):
    with pytest.raises(ConfigError) as caught:
        read_paths(written)
    assert caught.value.parameter == "speculative_token_tree"
    assert caught.value.value == written
    assert hint in str(caught.value)


def test_main_chain_comes_first_then_other_drafts_by_level():
    paths = [(1, 0), (1,), (0, 1), (0, 0), (0,), (0, 0, 0), (2,), (0, 1, 0)]
    # The drafts are (0,) (0, 0) (0, 0, 0) (1,) (2,) (0, 1) (1, 0) (0, 1, 0).
    assert parents_of(paths) == (-1, 0, 1, -1, -1, 0, 3, 5)


@pytest.mark.parametrize(("levels", "leaves"), [(1, 1), (3, 1), (2, 3), (5, 0)])
def test_every_draft_has_leaves(levels: int, leaves: int):
    paths = leaf_paths(levels, leaves)
    assert read_paths(str(list(paths))) == paths
    chain = [-1, *range(levels - 1)]
    leaf_parents = [parent for parent in chain for _ in range(leaves)]
    assert parents_of(paths) == (*chain, *leaf_parents)


def brings(tree: Iterable[Path], rates: dict[Place, float]) -> float:
    """Return the mean accepted drafts: the sum over paths of products of rates."""
    total = 0.0
    for path in tree:
        ways = [path[:length] for length in range(1, len(path) + 1)]
        total += math.prod(
            rates.get(Place(any(way[:-1]), len(way), way[-1]), 0.0) for way in ways
        )
    return total


def random_rates(seed: int) -> dict[Place, float]:
    """Return rates of three ranks and levels; some are missing or not descending."""
    random = np.random.default_rng(seed)
    places = itertools.product((False, True), (1, 2, 3), (0, 1, 2))
    return {
        Place(*place): float(random.random() ** (1 + place[2]))
        for place in places
        if random.random() < 0.8
    }


SMALL_TREES = every_tree(3, 3, 5)


@pytest.mark.parametrize("seed", range(6))
def test_most_tokens_equals_brute_force(seed: int):
    rates = random_rates(seed)
    for num_levels, num_nodes in itertools.product((1, 2, 3), range(6)):
        paths, gain = most_tokens(rates, num_nodes, num_levels)
        allowed = [
            tree
            for tree in SMALL_TREES
            if len(tree) <= num_nodes and all(len(path) <= num_levels for path in tree)
        ]
        assert frozenset(paths) in allowed
        assert gain == pytest.approx(brings(paths, rates))
        assert gain == pytest.approx(max(brings(tree, rates) for tree in allowed))


@pytest.mark.parametrize("seed", range(6))
def test_best_tree_equals_brute_force(seed: int):
    rates, random = random_rates(seed), np.random.default_rng(seed)
    levels, rows, sides = random.random(3) * (0.4, 0.2, 0.4)

    def seconds(num_levels: int, num_nodes: int, has_side_paths: bool) -> float:
        passes = levels + sides * has_side_paths
        return float(1 + passes * num_levels + rows * num_nodes)

    def speed(tree: Iterable[Path]) -> float:
        tree = list(tree)
        has_side_paths = any(any(path[:-1]) for path in tree)
        depth = max(map(len, tree), default=0)
        return (1 + brings(tree, rates)) / seconds(depth, len(tree), has_side_paths)

    found = best_tree(rates, seconds, num_nodes=5, num_levels=3)
    assert found.tokens == pytest.approx(1 + brings(found.paths, rates))
    assert found.tokens / found.seconds == pytest.approx(speed(found.paths))
    assert speed(found.paths) == pytest.approx(max(map(speed, SMALL_TREES)))
    if found.paths:
        assert read_paths(str(list(found.paths))) == found.paths


def test_free_drafts_are_all_used_and_costly_drafts_are_not():
    rates = random_rates(0) | {Place(False, 1, 0): 0.9}
    free = best_tree(rates, lambda *sizes: 1.0, num_nodes=5, num_levels=3)
    assert 1 + most_tokens(rates, 5, 3)[1] == pytest.approx(free.tokens)
    dear = best_tree(
        rates, lambda levels, *sizes: 1.0 + 5 * levels, num_nodes=5, num_levels=3
    )
    assert dear == ((), 1.0, 1.0)


def test_ranks_are_counted_if_the_parent_was_accepted():
    # The drafts are (0,) (0, 0) (1,) (0, 1) (1, 0).
    parents = parents_of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    ends = {
        (2, 0): 5,  # no draft accepted
        (2, 1): 4,  # (0,)
        (2, 2): 3,  # (0,), (0, 0)
        (2, 5): 2,  # (1,), (1, 0)
        (1, 3): 7,  # (1,), of one level
    }
    assert count_ranks(parents, ends) == {
        Place(False, 1, 0): Hits(21, 7),
        Place(False, 1, 1): Hits(21, 9),
        Place(False, 2, 0): Hits(7, 3),
        Place(False, 2, 1): Hits(7, 0),
        Place(True, 2, 0): Hits(2, 2),
    }
    assert Hits(21, 7).rate == pytest.approx(1 / 3)
    assert Hits(0, 0).rate == 0


@pytest.mark.parametrize(
    ("paths", "has_some"),
    [
        (leaf_paths(3, 0), False),
        (leaf_paths(3, 2), False),
        (((0,), (1,), (0, 0), (1, 0)), True),
        (((0,), (0, 0), (0, 1), (0, 1, 0)), True),
    ],
)
def test_has_side_paths(paths, has_some):
    assert has_side_paths(parents_of(paths)) is has_some
    assert Tree(parents_of(paths)).has_side_paths is has_some
