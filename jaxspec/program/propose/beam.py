"""Trees that grow by what is probable: which drafts are continued, and which are kept.

The best drafts of a level, by how probable their whole path is, are continued; of all
that were considered the best make the round's tree. The spine is in it whatever it is
worth: the rule of a sequence judges it, and may have drawn it.
"""

import dataclasses
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.program.grown import GrownTree, continued
from jaxspec.program.tree import DynamicTree


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Beam:
    """How far a round's trees have grown.

    A candidate is a draft that may come into the tree: of every level those that
    continue one of its rows, each row's `top_k` best, the spine's first.

    Attributes:
        tree: The sizes.
        tokens: Drafts that are continued, by row of a draft model's pass after the
            root.
        row_parents: Of each the row that it continues.
        places: Of each its place among all candidates; past them before it is drawn.
        scores: Log-probability of the paths to the newest of them, the spine's first.
        candidates: Tokens.
        paths: Log-probability of the path to each candidate; -inf for what is none.
        rows: The row that each continues.
    """

    tree: DynamicTree = dataclasses.field(metadata={"static": True})
    tokens: Int[Array, "seq fed"]
    row_parents: Int[Array, "seq fed"]
    places: Int[Array, "seq fed"]
    scores: Float[Array, "seq entry"]
    candidates: Int[Array, "seq level candidate"]
    paths: Float[Array, "seq level candidate"]
    rows: Int[Array, "seq level candidate"]

    @classmethod
    def empty(cls, tree: DynamicTree, seqs: int) -> "Beam":
        """Nothing but the root, whose path is certain."""
        fed, size = tree.num_draft_rows - 1, tree.top_k**2
        shape = seqs, tree.num_levels, size
        return cls(
            tree=tree,
            tokens=jnp.zeros((seqs, fed), jnp.int32),
            row_parents=jnp.zeros((seqs, fed), jnp.int32),
            places=jnp.full((seqs, fed), tree.num_levels * size, jnp.int32),
            scores=jnp.zeros((seqs, tree.top_k)),
            candidates=jnp.zeros(shape, jnp.int32),
            paths=jnp.full(shape, -jnp.inf),
            rows=jnp.zeros(shape, jnp.int32),
        )

    @property
    def grown(self) -> GrownTree:
        """What a draft model's pass takes; no row sees those that are not drawn yet."""
        return GrownTree.of(self.row_parents, self.tree.num_levels - 1)

    def grow(
        self,
        level: Array | int,
        tokens: Int[Array, "seq entry rank"],
        logprobs: Float[Array, "seq entry rank"],
    ) -> "Beam":
        """With the drafts of one more level, and the best of them to be continued.

        Args:
            tokens: After each row that the level continues, the spine's draft first.
            logprobs: Of each, after its row.
        """
        tree, seqs = self.tree, tokens.shape[0]
        top_k, size = tree.top_k, tree.top_k**2
        entries = tokens.shape[1]
        paths = (self.scores[:, :entries, None] + logprobs).reshape(seqs, -1)
        rows = jnp.repeat(continued(tree, level)[:entries], tokens.shape[2])
        rows = jnp.broadcast_to(rows[None], paths.shape)
        tokens = tokens.reshape(seqs, -1)
        # The spine's goes on in any case.
        _, best = jax.lax.top_k(paths.at[:, 0].set(jnp.inf), top_k)
        is_fed = jnp.asarray(level) + 1 < tree.num_levels
        fed = jnp.where(
            is_fed, continued(tree, jnp.asarray(level) + 1) - 1, self.tokens.shape[1]
        )

        def take(part: Array) -> Array:
            return jnp.take_along_axis(part, best, axis=1)

        def put(whole: Array, part: Array) -> Array:
            return whole.at[:, fed].set(part, mode="drop")

        def note(whole: Array, part: Array, fill: float) -> Array:
            pads = ((0, 0), (0, size - part.shape[1]))
            part = jnp.pad(part, pads, constant_values=fill)
            return jax.lax.dynamic_update_index_in_dim(whole, part, level, 1)

        return dataclasses.replace(
            self,
            tokens=put(self.tokens, take(tokens)),
            row_parents=put(self.row_parents, take(rows)),
            places=put(self.places, best + jnp.asarray(level) * size),
            scores=take(paths),
            candidates=note(self.candidates, tokens, 0),
            paths=note(self.paths, paths, -jnp.inf),
            rows=note(self.rows, rows, 0),
        )

    def best(self) -> tuple[Int[Array, "seq draft"], GrownTree]:
        """The round's drafts and their tree: the spine, and the best of all others.

        A path is never more probable than its beginning, which comes before it: what a
        draft continues is there. In place of candidates that there are too few of, as
        where fewer levels are drawn, stands what is deeper than any draft.
        """
        tree, seqs = self.tree, self.tokens.shape[0]
        levels, size = tree.num_levels, tree.top_k**2
        total = levels * size
        candidates, paths, rows = (
            part.reshape(seqs, total)
            for part in (self.candidates, self.paths, self.rows)
        )
        spine = jnp.arange(levels, dtype=jnp.int32) * size
        # What is no candidate comes after all that are, but before the spine once more.
        order = jnp.maximum(paths, jnp.finfo(paths.dtype).min)
        order = order.at[:, spine].set(-jnp.inf)
        _, beside = jax.lax.top_k(order, tree.num_nodes - levels)
        beside = jnp.sort(beside, axis=1)
        place = jnp.concatenate(
            [jnp.broadcast_to(spine[None], (seqs, levels)), beside], axis=1
        )
        # From places of candidates to rows of the tree and of a draft model's passes.
        seq = jnp.arange(seqs, dtype=jnp.int32)[:, None]
        number = jnp.arange(1, tree.num_rows, dtype=jnp.int32)[None]
        row_of = jnp.zeros((seqs, total), jnp.int32).at[seq, place].set(number)
        fed = jnp.arange(1, tree.num_draft_rows, dtype=jnp.int32)[None]
        fed_as = jnp.zeros((seqs, total), jnp.int32)
        fed_as = fed_as.at[seq, self.places].set(fed, mode="drop")

        def take(part: Array, index: Array) -> Array:
            return jnp.take_along_axis(part, index, axis=1)

        root = jnp.zeros((seqs, 1), jnp.int32)
        row_of_fed = jnp.concatenate(
            [root, row_of.at[seq, self.places].get(mode="fill", fill_value=0)], axis=1
        )
        parents = take(row_of_fed, take(rows, place))
        is_known = take(paths, beside) > -jnp.inf
        above = jnp.arange(levels, dtype=jnp.int32)[None]
        above = jnp.broadcast_to(above, (seqs, levels))
        parents = jnp.concatenate(
            [above, jnp.where(is_known, parents[:, levels:], levels)], axis=1
        )
        draft_rows = jnp.concatenate([root, take(fed_as, place)], axis=1)
        return take(candidates, place), GrownTree.of(parents, levels, draft_rows)
