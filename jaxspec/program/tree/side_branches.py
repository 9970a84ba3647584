"""Side branches of a tree: continue along them where the main chain is rejected.

The rule of a sequence verifies the main chain and samples one more token. Where a side
branch continues with that token, the target has already computed its row: the next
token is sampled from it, as plain decoding would, and so on from draft to draft. Greedy
and coupled sequences follow plain decoding token by token from the root. For the other
rules the distribution remains the target's, since every token is sampled with numbers
that are used nowhere else, whatever the drafts were.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.program.rows import Active
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify
from jaxspec_kernels.rejection_sampling import Verdict

# Tokens, number of valid tokens, row of the last one, row to continue from (0: none).
_Branch = tuple[Array, Array, Array, Array]


class Decision(NamedTuple):
    """Tokens accepted in a round."""

    tokens: Int[Array, "seq width"]  # accepted drafts, then the target's own
    num_accepted: Int[Array, " seq"]  # on the main chain, by the sequence's rule
    tree_row: Int[Array, " seq"]  # of the last accepted draft


def follow_branches(
    tree: Tree,
    verdict: Verdict,
    inputs: Int[Array, "seq width"],
    logits: Float[Array, "token vocab"],
    num_valid_drafts: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    max_model_len: int,
) -> Decision:
    """Continue from the verdict on the main chain while a draft matches the next token.

    Args:
        verdict: The result of `verify`; a chain has no other drafts.
        inputs: Tokens that the target read: the newest one, then the drafts by node.
        logits, num_valid_drafts: As for `verify`.
        max_model_len: Nodes whose slots would lie past it are ignored.
    """
    seqs, width = inputs.shape[0], tree.max_emitted
    seq = jnp.arange(seqs, dtype=jnp.int32)
    drafts, row = inputs[:, 1:], verdict.num_accepted  # the main chain's rows are first
    tokens = jnp.pad(drafts[:, : tree.main_chain.num_nodes], ((0, 0), (0, 1)))
    tokens = tokens.at[seq, row].set(verdict.next_token)
    if tree.is_chain:
        return Decision(tokens, verdict.num_accepted, row)
    rows = logits.reshape(seqs, tree.num_rows, -1)
    is_usable = _usable_nodes(tree, num_valid_drafts, active, max_model_len)
    parents = jnp.array([tree.parents], jnp.int32) + 1

    def child_of(row: Array, token: Array) -> Array:
        """Return the row of the draft that continues `row` with `token`, or 0."""
        is_child = is_usable & (parents == row[:, None]) & (drafts == token[:, None])
        child = jnp.argmax(is_child, axis=1).astype(jnp.int32) + 1
        return jnp.where(is_child.any(axis=1), child, 0)

    def step(steps: _Branch) -> _Branch:
        tokens, count, row, child = steps
        is_matched = child > 0
        row = jnp.where(is_matched, child, row)
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
        place = jnp.where(is_matched, count, width)
        tokens = tokens.at[seq, place].set(token, mode="drop")
        child = jnp.where(is_matched, child_of(row, token), 0)
        return tokens, count + is_matched.astype(jnp.int32), row, child

    tokens = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    start = tokens, row + 1, row, child_of(row, verdict.next_token)
    tokens, _, row, _ = jax.lax.while_loop(
        lambda steps: (steps[-1] > 0).any(), step, start
    )
    return Decision(tokens, verdict.num_accepted, row)


def _usable_nodes(
    tree: Tree, num_valid_drafts: Int[Array, " seq"], active: Active, max_model_len: int
) -> Bool[Array, "seq draft"]:
    """Return which drafts are in valid levels and have slots for keys and values."""
    depth = jnp.array([tree.depths[1:]], jnp.int32)
    slot = jnp.arange(tree.num_nodes, dtype=jnp.int32)[None]
    slot = active.num_tokens[:, None] + slot
    is_usable = (depth <= num_valid_drafts[:, None]) & (slot < max_model_len)
    return is_usable & active.is_active[:, None]
