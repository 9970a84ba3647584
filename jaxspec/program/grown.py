"""The tree of one round, on the device: one that is known, or has grown in it.

What is asked of either is asked here. Of a known `Tree` all are constants.
"""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.program.tree import DynamicTree, Template, Tree


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GrownTree:
    """The drafts of one round as nodes, each sequence's its own.

    The first nodes are the spine, of all levels.

    Attributes:
        row_parents: Of each node the row that it continues: an earlier one.
        row_depths: Of each row. What is deeper than the spine is no draft.
        ancestor_mask: Which rows each row sees, itself included.
        draft_rows: Of each row the one that a draft model was fed it as; 0 for the
            root, and for none. None where that is not asked.
    """

    row_parents: Int[Array, "seq draft"]
    row_depths: Int[Array, "seq row"]
    ancestor_mask: Bool[Array, "seq row row"]
    draft_rows: Int[Array, "seq row"] | None
    num_levels: int = field(metadata={"static": True})

    is_chain = False

    @classmethod
    def of(
        cls,
        row_parents: Int[Array, "seq draft"],
        num_levels: int,
        draft_rows: Int[Array, "seq row"] | None = None,
    ) -> "GrownTree":
        """The tree in which nodes continue these rows.

        Args:
            num_levels: Of the spine; nothing is more than one level deeper.
        """
        rows = jnp.arange(row_parents.shape[1] + 1, dtype=jnp.int32)[None, None]
        above = jnp.pad(row_parents, ((0, 0), (1, 0)))
        at = jnp.broadcast_to(rows[0], above.shape)
        seen = at[:, :, None] == rows
        for _ in range(num_levels + 1):
            at = jnp.take_along_axis(above, at, axis=1)
            seen |= at[:, :, None] == rows
        return cls(
            row_parents=row_parents,
            row_depths=seen.sum(axis=2, dtype=jnp.int32) - 1,
            ancestor_mask=seen,
            draft_rows=draft_rows,
            num_levels=num_levels,
        )

    @property
    def num_nodes(self) -> int:
        """Drafts."""
        return self.row_parents.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows that a model is fed per sequence: the root and the nodes."""
        return self.num_nodes + 1

    @property
    def max_emitted(self) -> int:
        """Most tokens that a round adds: the longest path, and the target's own."""
        return self.num_levels + 1

    @property
    def spine(self) -> Tree:
        """The first nodes."""
        return Tree.chain(self.num_levels)


RoundTree = Tree | GrownTree


def row_parents(tree: RoundTree) -> Int[Array, "some draft"]:
    """Of each node the row that it continues: of each sequence, or alike for all."""
    if isinstance(tree, GrownTree):
        return tree.row_parents
    return jnp.array([tree.parents], jnp.int32) + 1


def row_depths(tree: RoundTree) -> Int[Array, "some row"]:
    """Depths of rows: of each sequence, or alike for all."""
    if isinstance(tree, GrownTree):
        return tree.row_depths
    return jnp.array([tree.depths], jnp.int32)


def ancestor_mask(tree: RoundTree, seqs: int) -> Bool[Array, "seq row row"]:
    """Which rows each row of every sequence sees, itself included."""
    if isinstance(tree, GrownTree):
        return tree.ancestor_mask
    return jnp.broadcast_to(tree.ancestor_mask, (seqs, tree.num_rows, tree.num_rows))


def depth_of(tree: RoundTree, row: Int[Array, " seq"]) -> Int[Array, " seq"]:
    """The depth of one row of each sequence."""
    if isinstance(tree, GrownTree):
        return jnp.take_along_axis(tree.row_depths, row[:, None], axis=1)[:, 0]
    return jnp.asarray(tree.depths)[row]


def seen_by(tree: RoundTree, row: Int[Array, " seq"]) -> Bool[Array, "seq row"]:
    """The rows that one row of each sequence sees, itself included."""
    if isinstance(tree, GrownTree):
        index = row[:, None, None]
        return jnp.take_along_axis(tree.ancestor_mask, index, axis=1)[:, 0]
    return jnp.asarray(tree.ancestor_mask)[row]


def path_to(tree: RoundTree, row: Int[Array, " seq"]) -> Int[Array, "seq depth"]:
    """Rows on the way from the root to one row of each sequence, itself included.

    Entries past the row's own depth repeat the row.
    """
    if isinstance(tree, Tree):
        return jnp.asarray(tree.paths)[row]
    depth = jnp.arange(tree.max_emitted, dtype=jnp.int32)[None]
    rows = jnp.arange(tree.num_rows, dtype=jnp.int32)[None, None]
    is_there = tree.row_depths[:, None] == depth[:, :, None]
    is_there &= seen_by(tree, row)[:, None]
    way = jnp.where(is_there, rows, 0).max(axis=2)
    return jnp.where(depth > depth_of(tree, row)[:, None], row[:, None], way)


def continued(template: Template, level: Array | int) -> Int[Array, " entry"]:
    """Rows that the drafts of a level continue, the spine's first.

    Of a dynamic tree they are rows of a draft model's pass, in which the spine's come
    first, as in any tree; of the first level all are the root.
    """
    if isinstance(template, Tree):
        return jnp.asarray(template.branching)[level]
    entry = jnp.arange(template.top_k, dtype=jnp.int32)
    before = template.num_levels - 1 + (level - 1) * (template.top_k - 1)
    return jnp.where((entry == 0) | (level == 0), level, before + entry)


def tree_of(template: Template, grown: GrownTree | None) -> RoundTree:
    """The tree of a round: the one that is known, or has grown."""
    if isinstance(template, DynamicTree):
        assert grown is not None, "nothing has grown"
        return grown
    return template
