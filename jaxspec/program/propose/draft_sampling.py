"""Sample drafts level by level, for a chain and for side branches.

Shared by every proposer that produces logits: the requests' controls apply to them, the
main chain's token is sampled with the request's parameters, and the side branches are
the next best tokens.
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
from jaxspec.program.propose.proposal import Proposal, ProposerContext
from jaxspec.program.rows import Active
from jaxspec.program.sampling import sample_draft
from jaxspec.program.tree.tree import Tree
from jaxspec.sharding import DRAFT_MESH_AXES
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import lowest

# (level, drafts of earlier levels, state) -> logits (of every row with children at the
# level, sequence-major), sequences with NaN or infinity, and the new state.
LevelLogits = Callable[[Array | int, Any, Any], tuple[Array, Array, Any]]
# Drafts, probabilities by draft, broken sequences, state.
_Carry = tuple[Array, Array | None, Array, Any]


@dataclass(frozen=True)
class DraftSampler:
    """Samples the levels of a launch's tree.

    Attributes:
        drafts_argmax: Take the argmax, a point mass, even if the request samples.
        before: Drafts of an earlier proposer, which replace the sampled ones.
    """

    context: ProposerContext
    drafts_argmax: bool = False
    before: Proposal | None = None

    @property
    def backend(self) -> Backend:
        """Where the proposer runs."""
        return self.context.backend(DRAFT_MESH_AXES)

    def propose(
        self, first_level: LevelLogits, later_level: LevelLogits, state: Any
    ) -> tuple:
        """Sample the levels that the launch wants, in a loop.

        Args:
            first_level: Computes the logits of the first level; drafts are still zeros.
            later_level: Computes those of the later levels.

        Returns:
            The proposal, and the state after the last level.
        """
        tree, max_wanted_levels = self.context.tree, self.context.max_wanted_levels
        seqs, levels = self.context.active.row.shape[0], tree.num_levels
        adjust = self.context.adjuster(DRAFT_MESH_AXES)
        none = jnp.zeros((seqs, tree.num_nodes), jnp.int32)
        logits, is_broken, state = first_level(0, none, state)
        drafts, probs = self._sample_level(logits, 0, none, adjust)
        every = None
        if probs is not None:
            # Draft-major: an iteration writes one piece of memory. All entries start as
            # the first distribution: a separate copy of it would be kept until the
            # loop ends, and starting from zeros makes a TPU move all entries. Entries
            # without a draft are never read.
            every = jnp.broadcast_to(probs, (levels, *probs.shape))
        if levels > 1:

            def sample_level(level: Array, carry: _Carry) -> _Carry:
                drafts, every, was_broken, state = carry
                logits, is_broken, state = later_level(level, drafts, state)
                drafts, probs = self._sample_level(logits, level, drafts, adjust)
                if every is not None and probs is not None:
                    every = jax.lax.dynamic_update_index_in_dim(every, probs, level, 0)
                return drafts, every, was_broken | is_broken, state

            carry: _Carry = drafts, every, is_broken, state
            drafts, every, is_broken, state = jax.lax.fori_loop(
                1, max_wanted_levels, sample_level, carry
            )
        probs = None if every is None else every.swapaxes(0, 1)
        # A sequence that wants no drafts may have pages that the draft model has not
        # filled: their contents are junk.
        is_broken &= self.context.wanted_levels > 0
        num_valid_drafts = jnp.where(is_broken, 0, max_wanted_levels)
        return Proposal(drafts, num_valid_drafts, probs, is_broken), state

    def _sample_level(
        self,
        all_logits: Float[Array, "seq_entry vocab"],
        level: Array | int,
        drafts: Int[Array, "seq draft"],
        adjust: Adjust | None,
    ) -> tuple[Int[Array, "seq draft"], Float[Array, "seq vocab"] | None]:
        """Add the drafts of one level; also return the main chain's distribution.

        Args:
            all_logits: One row for each row with children, the main chain's first.
        """
        tree, active = self.context.tree, self.context.active
        seqs = active.row.shape[0]
        logits, width = all_logits, all_logits.shape[0] // seqs
        if width > 1:
            logits = all_logits[::width]
        if adjust is not None:
            logits = adjust(logits[:, None], drafts, num_before=level)[:, 0]
        token, probs = sample_draft(
            logits, level, active, self.backend, drafts_argmax=self.drafts_argmax
        )
        if self.before is not None:
            token, probs = _override(self.before, level, token, probs)
        if tree.is_chain:
            return drafts.at[:, level].set(token), probs
        scores = all_logits.reshape(seqs, width, -1)
        if not (self.drafts_argmax or active.all_greedy):
            scores = _add_noise(scores, level, active)
        return _fill_level(tree, level, drafts, token, scores), probs


def logits_by_level(
    make: Callable[[Float[Array, "row model"]], Float[Array, "row vocab"]],
    rows: Float[Array, "level row model"],
    vocab_size: int,
) -> Callable[[Array | int], Float[Array, "row vocab"]]:
    """Return a function that gives a level's logits, from the rows of all levels.

    One product computes all levels and reads the matrix once. If its result would be
    too large, each level is computed when it is sampled.

    Args:
        make: Computes the logits of any rows.
    """
    levels, count, _ = rows.shape
    if 4 * levels * count * vocab_size > MAX_GROUP_BYTES:
        return lambda level: make(at_level(rows, level))
    every = make(rows.reshape(levels * count, -1)).reshape(levels, count, -1)
    return lambda level: at_level(every, level)


def at_level(every: Array, level: Array | int) -> Array:
    """Return the entry of a level from an array by level."""
    return jax.lax.dynamic_index_in_dim(every, level, keepdims=False)


def zero_broken_rows(
    rows: Float[Array, "row model"], is_finite: Bool[Array, " row"]
) -> Float[Array, "row model"]:
    """Replace rows that hold NaN or infinity by zeros."""
    return jnp.where(is_finite[:, None], rows, 0)


def _override(
    before: Proposal, index: Array | int, token: Array, probs: Array | None
) -> tuple[Array, Array | None]:
    """Replace the sampled draft `index` by that of an earlier proposer, if it has one.

    Returns:
        The token, and its distribution: a point mass if it was replaced.
    """
    assert before.probs is None, "drafts of an earlier proposer are certain"
    is_given = index < before.num_valid_drafts
    token = jnp.where(is_given, before.tokens[:, index], token)
    if probs is None:
        return token, None
    every = jnp.arange(probs.shape[1], dtype=jnp.int32)[None]
    certain = (every == token[:, None]).astype(probs.dtype)
    return token, jnp.where(is_given[:, None], certain, probs)


def _add_noise(
    logits: Float[Array, "seq entry vocab"], step: Array | int, active: Active
) -> Float[Array, "seq entry vocab"]:
    """Add the noise of a level's position to the logits of coupled sequences.

    Ranking the result is sampling without replacement.
    """

    def add() -> Array:
        purpose = jnp.full_like(active.num_tokens, randomness.SAMPLE)
        words = randomness.words(active.seed, active.num_tokens + step, purpose)
        ids = jnp.arange(logits.shape[2], dtype=jnp.int32)[None]
        noise = jnp.log(exponential(words[:, :1], words[:, 1:], ids))
        temperature = jnp.where(active.is_coupled, active.temperature, 1.0)
        noisy = logits / temperature[:, None, None] - noise[:, None]
        return jnp.where(active.is_coupled[:, None, None], noisy, logits)

    return jax.lax.cond(active.is_coupled.any(), add, lambda: logits)


def _fill_level(
    tree: Tree,
    step: Array | int,
    drafts: Int[Array, "seq draft"],
    drawn: Int[Array, " seq"],
    scores: Float[Array, "seq entry vocab"],
) -> Int[Array, "seq draft"]:
    """Write the drafts of one level.

    Args:
        drawn: Tokens of the main chain.
        scores: By entry of `Tree.branching`; the children of a row are its best tokens.
    """
    ranked = _top_tokens(scores, drawn, int(tree.ranks.max()) + 1)
    # Entries of other levels are not used.
    found = ranked[:, np.minimum(tree.entries, scores.shape[1] - 1), tree.ranks]
    is_new = jnp.array([tree.depths[1:]], jnp.int32) == step + 1
    return jnp.where(is_new, found, drafts)


def _top_tokens(
    scores: Float[Array, "seq entry vocab"], drawn: Int[Array, " seq"], count: int
) -> Int[Array, "seq entry rank"]:
    """Return the best tokens of every entry; the main chain's start with `drawn`."""
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
