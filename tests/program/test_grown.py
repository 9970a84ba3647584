"""A tree that has grown says of its nodes what the same tree says as constants."""

import jax.numpy as jnp
import numpy as np

from jaxspec.program import grown
from jaxspec.program.grown import GrownTree
from jaxspec.program.tree import ROOT, Tree

LEVELS, NODES = 4, 11


def random_tree(seed: int) -> Tree:
    """A spine of all levels, and nodes that continue any that is not at the end."""
    random, parents = np.random.default_rng(seed), list(range(ROOT, LEVELS - 1))
    while len(parents) < NODES:
        parent = int(random.integers(ROOT, len(parents)))
        if Tree(tuple([*parents, parent])).num_levels <= LEVELS:
            parents.append(parent)
    return Tree(tuple(parents))


TREES = [random_tree(seed) for seed in range(12)]
GROWN = GrownTree.of(
    jnp.asarray([tree.parents for tree in TREES], jnp.int32) + 1, LEVELS
)


def test_sizes_and_arrays_are_those_of_the_same_trees():
    assert (GROWN.num_nodes, GROWN.num_rows) == (NODES, NODES + 1)
    assert GROWN.max_emitted == LEVELS + 1
    assert GROWN.spine == Tree.chain(LEVELS)
    assert not GROWN.is_chain
    masks = grown.ancestor_mask(GROWN, len(TREES))
    for seq, tree in enumerate(TREES):
        assert grown.row_parents(GROWN)[seq].tolist() == (
            grown.row_parents(tree)[0].tolist()
        )
        assert grown.row_depths(GROWN)[seq].tolist() == list(tree.depths)
        np.testing.assert_array_equal(masks[seq], tree.ancestor_mask)


def test_rows_are_asked_for_alike():
    for row in range(NODES + 1):
        rows = jnp.full(len(TREES), row, jnp.int32)
        depth, seen = grown.depth_of(GROWN, rows), grown.seen_by(GROWN, rows)
        path = grown.path_to(GROWN, rows)
        for seq, tree in enumerate(TREES):
            one = rows[:1]
            assert depth[seq] == grown.depth_of(tree, one)[0]
            np.testing.assert_array_equal(seen[seq], grown.seen_by(tree, one)[0])
            own = grown.path_to(tree, one)[0].tolist()
            # Of shallower trees there are fewer levels.
            assert path[seq].tolist()[: len(own)] == own
