"""The shape of a round's drafts: which draft continues which.

A program has one `Tree`, known when it is compiled.

Node 0 is the first draft; its parent is `ROOT`, the last known token. The target reads
the root and then the nodes, in order: row i + 1 is node i. The keys and values of a row
go to the slot after those of the row before it. Its position, and so its rotary
embedding, follows its depth: in a chain the two are the same number.

The first nodes are the main chain, made of each level's first choice: their rows have
the same places as without the other nodes, which form the side branches.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.config.token_tree import ROOT


@dataclass(frozen=True)
class Tree:
    """Drafts as nodes.

    Attributes:
        parents: Of each node: an earlier node, or `ROOT`.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for node, parent in enumerate(self.parents):
            assert ROOT <= parent < node, f"node {node} after node {parent}"

    @classmethod
    @cache
    def chain(cls, num_nodes: int) -> "Tree":
        """Return the tree in which every draft continues the one before it.

        0 drafts are plain decoding. Kept, since every launch asks for its tree.
        """
        return cls(tuple(range(ROOT, num_nodes - 1)))

    @property
    def num_nodes(self) -> int:
        """Drafts."""
        return len(self.parents)

    @property
    def num_rows(self) -> int:
        """Rows of the target's pass per sequence: the root and the nodes.

        The pass writes one slot for each row, the root's included.
        """
        return self.num_nodes + 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each row: 0 for the root, one more than its parent for a node."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @property
    def num_levels(self) -> int:
        """Number of nodes on the longest path."""
        return max(self.depths)

    @property
    def max_emitted(self) -> int:
        """Maximum tokens that a round adds: the longest path, and the target's own."""
        return self.num_levels + 1

    @cached_property
    def main_chain(self) -> "Tree":
        """The first nodes, as long as each continues the one before it."""
        length = 0
        while length < self.num_nodes and self.parents[length] == length - 1:
            length += 1
        return Tree.chain(length)

    @property
    def has_side_paths(self) -> bool:
        """Whether a node outside the main chain has children."""
        return any(parent >= self.main_chain.num_nodes for parent in self.parents)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Rank of each node: the number of its siblings before it."""
        parents = self.parents
        before = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        return np.array(before, np.int32)

    @cached_property
    def branching(self) -> np.ndarray:
        """Rows that have children, by depth: [level, entry], the main chain's first.

        Levels with fewer entries than others repeat their first entry.
        """
        rows_by_level = [
            sorted({parent + 1 for parent in self.parents if self._depth(parent) == n})
            for n in range(self.num_levels)
        ]
        width = max(map(len, rows_by_level), default=0)
        padded = [rows + rows[:1] * (width - len(rows)) for rows in rows_by_level]
        return np.array(padded, np.int32).reshape(len(rows_by_level), width)

    @property
    def max_parents_per_level(self) -> int:
        """Largest number of rows with children at one level."""
        return self.branching.shape[1]

    @cached_property
    def entries(self) -> np.ndarray:
        """Index of each node's parent in its level of `branching`."""
        places = [
            self.branching[self._depth(parent)].tolist().index(parent + 1)
            for parent in self.parents
        ]
        return np.array(places, np.int32)

    def _depth(self, node: int) -> int:
        return self.depths[node + 1]

    @cached_property
    def is_chain(self) -> bool:
        """Whether position and slot are the same, and rows see all rows before them."""
        return self == Tree.chain(self.num_nodes)

    @cached_property
    def paths(self) -> np.ndarray:
        """Rows on the way from the root to each row, itself included: [row, depth].

        Entries past a row's own depth repeat the row.
        """
        paths = np.zeros((self.num_rows, self.max_emitted), np.int32)
        for row in range(1, self.num_rows):
            parent = self.parents[row - 1] + 1
            paths[row] = paths[parent]
            paths[row, self.depths[row] :] = row
        return paths

    @cached_property
    def ancestor_mask(self) -> np.ndarray:
        """Which rows each row sees, itself included: bool [row, row]."""
        mask = np.zeros((self.num_rows, self.num_rows), bool)
        np.put_along_axis(mask, self.paths, True, axis=1)
        return mask


def template_of(speculative: SpeculativeConfig | None) -> Tree | None:
    """Return the tree of an engine's configuration; None for a chain."""
    if speculative is None or not speculative.parents:
        return None
    return Tree(speculative.parents)
