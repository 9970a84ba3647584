"""Enumerate draft trees, and verify them as a target pass does."""

import itertools

import jax
import jax.numpy as jnp

from jaxspec.config.token_tree import Path
from jaxspec.models.backend import Backend
from jaxspec.program.controls import Adjust
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.tree.side_branches import Decision, follow_branches
from jaxspec.program.tree.tree import Tree
from jaxspec.program.verify import verify


def paths_below(ranks: int, levels: int) -> list[Path]:
    """Return all paths of one to `levels` ranks, each below `ranks`."""
    found: list[Path] = []
    for length in range(1, levels + 1):
        found += itertools.product(range(ranks), repeat=length)
    return found


def every_tree(ranks: int, levels: int, most: int) -> list[frozenset[Path]]:
    """Return all trees with at most `most` drafts, including the empty tree."""
    known = {frozenset[Path]()}
    newest = set(known)
    for _ in range(most):
        newest = {
            tree | {path}
            for tree in newest
            for path in paths_below(ranks, levels)
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
        known |= newest
    return sorted(known, key=sorted)


def verify_tree(
    tree: Tree,
    proposal: Proposal | None,
    logits: jax.Array,
    num_valid_drafts: jax.Array,
    active: Active,
    *,
    adjust: Adjust | None = None,
    max_model_len: int,
) -> Decision:
    """Verify the main chain, then follow the side branches."""
    inputs = active.last_tokens[:, 1:]
    if proposal is not None:
        inputs = jnp.concatenate([inputs, proposal.tokens], axis=1)
    verdict = verify(
        proposal, logits, num_valid_drafts, active, Backend(), tree=tree, adjust=adjust
    )
    return follow_branches(
        tree,
        verdict,
        inputs,
        logits,
        num_valid_drafts,
        active,
        Backend(),
        max_model_len=max_model_len,
    )
