"""Drafts are drawn level by level: of a chain, and of what stands beside it.

What is alike for all that make logits of drafts: whoever they are asked, requests'
controls apply to them, the spine's token is drawn as the request samples, and beside it
stand the next best.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import MAX_GROUP_BYTES
from jaxspec.program.propose.proposal import Context, Proposal
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import lowest

# Of a level, the drafts before it and what is kept between levels: logits (of every row
# that is continued there, sequence-major), whose are broken, and what is kept.
Continue = Callable[[Array | int, Any, Any], tuple[Array, Array, Any]]
# Drafts, probabilities by draft, who is broken, what is kept.
_Carry = tuple[Array, Array | None, Array, Any]


@dataclass(frozen=True)
class Levels:
    """Draws the levels of a launch's tree.

    Attributes:
        is_greedy: Take the argmax, a point mass, also where the request samples.
        before: Drafts that take the place of those drawn, as far as they count.
    """

    context: Context
    is_greedy: bool = False
    before: Proposal | None = None

    @property
    def backend(self) -> Backend:
        """Where what proposes runs."""
        return self.context.backend(DRAFT_MESH_AXES)

    def propose(self, first: Continue, following: Continue, kept: Any) -> tuple:
        """Draw every level; the proposal, and what is kept after the last.

        As many as the launch wants: levels are turns of a loop.

        Args:
            first: Gives the logits of the first level, whose drafts are all zeros.
            following: Gives those of the others.
        """
        tree, num_wanted = self.context.tree, self.context.num_wanted
        seqs, levels = self.context.active.row.shape[0], tree.num_levels
        adjust = self.context.adjuster(DRAFT_MESH_AXES)
        none = jnp.zeros((seqs, tree.num_nodes), jnp.int32)
        logits, is_broken, kept = first(0, none, kept)
        drafts, probs = self._draw(logits, 0, none, adjust)
        laws = None
        if probs is not None:
            # By draft: a turn of the loop writes one piece of memory. Every law begins
            # as the first: kept apart it would be memory until the loop ends, and put
            # into zeros before it a TPU moves all of them. What no draft was drawn from
            # is not looked at.
            laws = jnp.broadcast_to(probs, (levels, *probs.shape))
        if levels > 1:

            def turn(level: Array, carry: _Carry) -> _Carry:
                drafts, laws, was_broken, kept = carry
                logits, is_broken, kept = following(level, drafts, kept)
                drafts, probs = self._draw(logits, level, drafts, adjust)
                if laws is not None and probs is not None:
                    laws = jax.lax.dynamic_update_index_in_dim(laws, probs, level, 0)
                return drafts, laws, was_broken | is_broken, kept

            carry: _Carry = drafts, laws, is_broken, kept
            drafts, laws, is_broken, kept = jax.lax.fori_loop(
                1, num_wanted, turn, carry
            )
        probs = None if laws is None else laws.swapaxes(0, 1)
        num_drafts = jnp.where(is_broken, 0, num_wanted)
        return Proposal(drafts, num_drafts, probs, is_broken), kept

    def _draw(
        self,
        every: Float[Array, "seq_entry vocab"],
        level: Array | int,
        drafts: Int[Array, "seq draft"],
        adjust: Adjust | None,
    ) -> tuple[Int[Array, "seq draft"], Float[Array, "seq vocab"] | None]:
        """The drafts with those of one more level, and the spine's law.

        Args:
            every: Of each row that is continued, the spine's first.
        """
        tree, active = self.context.tree, self.context.active
        seqs = active.row.shape[0]
        logits, width = every, every.shape[0] // seqs
        if width > 1:
            logits = every[::width]
        if adjust is not None:
            logits = adjust(logits[:, None], drafts, num_before=level)[:, 0]
        token, probs = sample_draft(
            logits, level, active, self.backend, is_greedy=self.is_greedy
        )
        if self.before is not None:
            token, probs = _keep(self.before, level, token, probs)
        if tree.is_chain:
            return drafts.at[:, level].set(token), probs
        scores = every.reshape(seqs, width, -1)
        if not (self.is_greedy or active.is_greedy):
            scores = _with_noise(scores, level, active)
        return _grow(tree, level, drafts, token, scores), probs


def logits_by_level(
    make: Callable[[Float[Array, "row model"]], Float[Array, "row vocab"]],
    rows: Float[Array, "level row model"],
    vocab_size: int,
) -> Callable[[Array | int], Float[Array, "row vocab"]]:
    """Logits of a level, whose rows are there for all levels.

    Of all levels in one product, which reads the matrix once; where they would be too
    large an array, of each when it is drawn.

    Args:
        make: Logits of any rows.
    """
    levels, count, _ = rows.shape
    if 4 * levels * count * vocab_size > MAX_GROUP_BYTES:
        return lambda level: make(entry_of(rows, level))
    every = make(rows.reshape(levels * count, -1)).reshape(levels, count, -1)
    return lambda level: entry_of(every, level)


def entry_of(every: Array, level: Array | int) -> Array:
    """What belongs to a level, of an array by level."""
    return jax.lax.dynamic_index_in_dim(every, level, keepdims=False)


def finite_rows(
    rows: Float[Array, "row model"], is_finite: Bool[Array, " row"]
) -> Float[Array, "row model"]:
    """Rows, zeros in place of those that came of NaN or infinity."""
    return jnp.where(is_finite[:, None], rows, 0)


def _keep(
    before: Proposal, index: Array | int, token: Array, probs: Array | None
) -> tuple[Array, Array | None]:
    """Draft `index` of each sequence: what others have proposed, else what was drawn.

    Returns:
        The token and what it was drawn from: all of the mass on it where it is theirs.
    """
    assert before.probs is None, "what comes before a draft model is certain"
    is_kept = index < before.num_drafts
    token = jnp.where(is_kept, before.tokens[:, index], token)
    if probs is None:
        return token, None
    every = jnp.arange(probs.shape[1], dtype=jnp.int32)[None]
    certain = (every == token[:, None]).astype(probs.dtype)
    return token, jnp.where(is_kept[:, None], certain, probs)


def _with_noise(
    logits: Float[Array, "seq entry vocab"], step: Array | int, active: Active
) -> Float[Array, "seq entry vocab"]:
    """What coupled sequences rank tokens by: with the noise of a level's position.

    The order that this gives is one of drawing without putting back.
    """

    def add() -> Array:
        purpose = jnp.full_like(active.num_tokens, randomness.SAMPLE)
        words = randomness.words(active.seed, active.num_tokens + step, purpose)
        ids = jnp.arange(logits.shape[2], dtype=jnp.int32)[None]
        noise = jnp.log(exponential(words[:, :1], words[:, 1:], ids))
        temperature = jnp.where(active.is_coupled, active.temperature, 1.0)
        raced = logits / temperature[:, None, None] - noise[:, None]
        return jnp.where(active.is_coupled[:, None, None], raced, logits)

    return jax.lax.cond(active.is_coupled.any(), add, lambda: logits)


def _grow(
    tree: Tree,
    step: Array | int,
    drafts: Int[Array, "seq draft"],
    drawn: Int[Array, " seq"],
    scores: Float[Array, "seq entry vocab"],
) -> Int[Array, "seq draft"]:
    """The drafts with those of one more level.

    Args:
        drawn: The spine's.
        scores: By entry of `Tree.branching`; what follows a row are its best tokens.
    """
    ranked = _rank(scores, drawn, int(tree.ranks.max()) + 1)
    # Entries of other levels do not count.
    found = ranked[:, np.minimum(tree.entries, scores.shape[1] - 1), tree.ranks]
    is_new = jnp.array([tree.depths[1:]], jnp.int32) == step + 1
    return jnp.where(is_new, found, drafts)


def _rank(
    scores: Float[Array, "seq entry vocab"], drawn: Int[Array, " seq"], count: int
) -> Int[Array, "seq entry rank"]:
    """The best tokens of every entry; of the spine's, which is first, the drawn one."""
    vocab, width = scores.shape[2], scores.shape[1]
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    chosen = []
    for rank in range(count):
        best = lowest(scores.reshape(-1, vocab), ids[0])[1].reshape(-1, width)
        if rank == 0:
            best = best.at[:, 0].set(drawn)
        chosen.append(best)
        scores = jnp.where(ids == best[:, :, None], -jnp.inf, scores)
    return jnp.stack(chosen, axis=2)
