"""Where a round leaves the spine: the target walks on among the drafts beside it.

The rule of a sequence judges the spine, and closes with a token of the target's. Where
a draft beside the spine is that token, the target was fed it already: what follows is
drawn from its row, as plain decoding would there, and so on from draft to draft. Greedy
and coupled sequences thus walk from the root as plain decoding goes, token by token;
for the others the law stays the target's, since every token on the way is drawn with
numbers that nothing has used, whatever drafts there were.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.program.controls import Adjust
from jaxspec.program.propose.proposal import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.tree import Tree
from jaxspec.program.verify import place_next, verify
from jaxspec_kernels.rejection_sampling import Verdict

# Tokens, how many of them count, rows of the last, rows to go to (0: none).
_Steps = tuple[Array, Array, Array, Array]


class Decision(NamedTuple):
    """What comes of a round, per sequence."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]  # of the spine, by the sequence's rule
    row: Int[Array, " seq"]  # the tree's, of the last draft that stayed


def decide(
    tree: Tree,
    proposal: Proposal | None,
    fed: Int[Array, "seq width"],
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    adjust: Adjust | None,
    forced_acceptance: Float[Array, " chance"] | None,
    max_model_len: int,
) -> Decision:
    """Judge the spine by each sequence's rule, then walk on beside it.

    Args:
        fed: The newest token, then the drafts by node of the tree.
        logits: Sequence-major, of all rows of the tree.
        num_draft: Drafts of each sequence that count: levels of the tree.
        adjust, forced_acceptance: As for `verify`; of a chain alone.
        max_model_len: Nodes whose slots would lie behind it are not there.
    """
    if tree.is_chain:
        verdict = verify(
            proposal,
            logits,
            num_draft,
            active,
            backend,
            tree=tree,
            adjust=adjust,
            forced_acceptance=forced_acceptance,
        )
        accepted = verdict.num_accepted
        return Decision(place_next(fed[:, 1:], verdict), accepted, accepted)
    assert proposal is not None, "a tree without drafts"
    assert adjust is None, "what is asked of tokens is made for one path"
    assert forced_acceptance is None, "forced acceptance is of a chain"
    spine = tree.spine
    rows = logits.reshape(len(num_draft), tree.num_rows, -1)
    verdict = verify(
        proposal.first(spine.num_nodes),
        rows[:, : spine.num_rows].reshape(-1, rows.shape[2]),
        jnp.minimum(num_draft, spine.num_nodes),
        active,
        backend,
        tree=spine,
        adjust=None,
    )
    is_there = _nodes_there(tree, num_draft, active, max_model_len)
    drafts = fed[:, 1:]
    tokens, row = _walk_on(tree, drafts, rows, verdict, is_there, active, backend)
    return Decision(tokens, verdict.num_accepted, row)


def _walk_on(
    tree: Tree,
    drafts: Int[Array, "seq draft"],
    rows: Float[Array, "seq width vocab"],
    verdict: Verdict,
    is_there: Bool[Array, "seq draft"],
    active: Active,
    backend: Backend,
) -> tuple[Int[Array, "seq _"], Int[Array, " seq"]]:
    """Go on from a verdict on the spine, as far as there are drafts for what comes.

    Args:
        rows: Logits of all rows of the tree.
        is_there: Drafts that count.

    Returns:
        The round's tokens, and the row of the last draft that stayed.
    """
    seqs, width = drafts.shape[0], tree.max_emitted
    seq = jnp.arange(seqs, dtype=jnp.int32)
    parents = jnp.array([tree.parents], jnp.int32) + 1

    def child_of(row: Array, token: Array) -> Array:
        """The row of a draft that continues a row with a token; 0 for none."""
        is_child = is_there & (parents == row[:, None]) & (drafts == token[:, None])
        child = jnp.argmax(is_child, axis=1).astype(jnp.int32) + 1
        return jnp.where(is_child.any(axis=1), child, 0)

    def step(steps: _Steps) -> _Steps:
        tokens, count, row, child = steps
        is_going = child > 0
        row = jnp.where(is_going, child, row)
        later = dataclasses.replace(active, num_tokens=active.num_tokens + count)
        token = verify(
            None,
            jnp.take_along_axis(rows, row[:, None, None], axis=1)[:, 0],
            jnp.zeros_like(row),
            later,
            backend,
            tree=Tree.chain(0),
            adjust=None,
        ).next_token
        place = jnp.where(is_going, count, width)
        tokens = tokens.at[seq, place].set(token, mode="drop")
        child = jnp.where(is_going, child_of(row, token), 0)
        return tokens, count + is_going.astype(jnp.int32), row, child

    length = tree.spine.num_nodes
    tokens = place_next(drafts[:, :length], verdict)
    tokens = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    row = verdict.num_accepted  # the spine's rows come first
    start = tokens, row + 1, row, child_of(row, verdict.next_token)
    tokens, _, row, _ = jax.lax.while_loop(
        lambda steps: (steps[-1] > 0).any(), step, start
    )
    return tokens, row


def _nodes_there(
    tree: Tree, num_draft: Int[Array, " seq"], active: Active, max_model_len: int
) -> Bool[Array, "seq draft"]:
    """Drafts of levels that count, which have keys and values."""
    depth = jnp.array([tree.depths[1:]], jnp.int32)
    slot = jnp.arange(tree.num_nodes, dtype=jnp.int32)[None]
    slot = active.num_tokens[:, None] + slot
    is_there = (depth <= num_draft[:, None]) & (slot < max_model_len)
    return is_there & active.is_active[:, None]
