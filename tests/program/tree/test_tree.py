"""Properties of a draft tree equal those found on the way to the root."""

import numpy as np
import pytest

from jaxspec.program.tree.tree import ROOT, Tree

# Node 0 has two children and a sibling; node 2 is a child of node 1.
BRANCHED = Tree((ROOT, 0, 1, 0, ROOT))


def walk(tree: Tree, row: int) -> list[int]:
    """Return the rows on the way from the root to a row, by its parents."""
    way = [row]
    while way[0]:
        way.insert(0, tree.parents[way[0] - 1] + 1)
    return way


def random_tree(seed: int) -> Tree:
    random = np.random.default_rng(seed)
    return Tree(tuple(int(random.integers(ROOT, node)) for node in range(12)))


@pytest.mark.parametrize(
    "tree", [Tree.chain(0), Tree.chain(5), BRANCHED, *map(random_tree, range(5))]
)
def test_rows_equal_a_walk_to_the_root(tree: Tree):
    ways = [walk(tree, row) for row in range(tree.num_rows)]
    assert tree.depths == tuple(len(way) - 1 for way in ways)
    assert tree.max_emitted == max(map(len, ways))
    for row, way in enumerate(ways):
        padded = way + [row] * (tree.max_emitted - len(way))
        assert tree.paths[row].tolist() == padded
        assert np.flatnonzero(tree.ancestor_mask[row]).tolist() == sorted(way)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_is_as_wide_as_it_is_deep(length: int):
    tree = Tree.chain(length)
    assert tree.is_chain and not BRANCHED.is_chain
    assert tree.num_nodes == length
    assert tree.num_rows == tree.max_emitted == length + 1


@pytest.mark.parametrize("tree", [Tree.chain(5), BRANCHED, *map(random_tree, range(5))])
def test_drafts_are_found_by_level_parent_and_rank(tree: Tree):
    count = tree.main_chain.num_nodes
    assert tree.parents[:count] == tuple(range(ROOT, count - 1))
    assert count == tree.num_nodes or tree.parents[count] != count - 1
    assert tree.num_levels == len(tree.branching)
    places = zip(tree.parents, tree.entries, tree.ranks, strict=True)
    seen: dict[int, int] = {}
    for node, (parent, entry, rank) in enumerate(places):
        level = tree.depths[node + 1] - 1
        assert tree.branching[level][entry] == parent + 1
        assert rank == seen.get(parent, 0)
        seen[parent] = rank + 1
    for level, rows in enumerate(tree.branching):
        assert {tree.depths[row] for row in rows} == {level}
        if level < count:
            assert rows[0] == level


def test_leaves_need_no_passes_of_their_own():
    leaves = Tree((ROOT, 0, 1, ROOT, 0, 1, 0))
    assert leaves.main_chain == Tree.chain(3)
    assert not leaves.has_side_paths
    assert leaves.branching.tolist() == [[0], [1], [2]]
    assert not Tree.chain(3).has_side_paths
    assert BRANCHED.has_side_paths == (2 in BRANCHED.parents)
    assert Tree((ROOT, 0, ROOT, 2)).has_side_paths


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (ROOT, -2)])
def test_a_parent_comes_before_its_node(parents: tuple[int, ...]):
    with pytest.raises(AssertionError, match="after node"):
        Tree(parents)
