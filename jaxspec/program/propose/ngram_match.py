"""Find earlier occurrences of a sequence's newest tokens, and what followed them.

Integer comparisons over the known tokens. Proposers decide how far to trust a match.
Several matches with different continuations fill a tree of drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec.program import history
from jaxspec.program.rows import Active
from jaxspec.program.tree.tree import Tree

# Maximum number of matches that fill a tree.
NUM_BRANCHES = 8


class Matches(NamedTuple):
    """Earlier occurrences of a sequence's newest tokens, longest first, then latest.

    Attributes:
        length: Number of tokens equal to the newest; 0 is no match.
        following: The tokens after them; junk without a match.
        num_following: Number of `following` that are known: the first ones.
    """

    length: Int[Array, "seq match"]
    following: Int[Array, "seq match draft"]
    num_following: Int[Array, "seq match"]


def find_matches(
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    longest: int,
    shortest: int,
    num_matches: int,
    num_levels: int,
) -> Matches:
    """Find earlier occurrences of the newest tokens.

    A match must end before the last token and may overlap with it. A continuation that
    reaches the end of the known tokens starts over, as a repeating text would.

    Args:
        longest: Largest number of tokens compared.
        shortest: Smallest number that must be equal, at least 1.
    """
    tokens = history.whole(token_pages, active.page_table)
    size = tokens.shape[1]
    length = _match_lengths(tokens, active, longest)
    position = jnp.arange(size, dtype=jnp.int32)[None]
    is_match = (length >= shortest) & (position < active.num_tokens[:, None] - 1)
    is_match &= active.is_active[:, None]
    # in lengths [0,2,3,1,3] -> the last 3, then the other, then the 2
    rank = jnp.where(is_match, length * size + position, 0)
    best = _top_ranks(rank, num_matches)
    place = best % size
    num_known = jnp.maximum(active.num_tokens[:, None] - 1 - place, 1)
    offset = jnp.arange(num_levels, dtype=jnp.int32)[None, None]
    following = place[:, :, None] + 1 + offset % num_known[:, :, None]
    drafts = jnp.take_along_axis(
        tokens, following.reshape(tokens.shape[0], -1), axis=1, mode="clip"
    )
    return Matches(
        length=best // size,
        following=drafts.reshape(following.shape),
        num_following=jnp.full_like(best, num_levels),
    )


def merge_matches(kinds: Sequence[Matches], count: int) -> Matches:
    """Return the longest of several kinds of matches; ties go to the earlier kind."""
    parts = zip(*kinds, strict=True)
    every = Matches(*(jnp.concatenate(one, axis=1) for one in parts))
    size = every.length.shape[1]
    rank = every.length * size + jnp.arange(size - 1, -1, -1, dtype=jnp.int32)[None]
    ranks = _top_ranks(rank, count)
    index = size - 1 - ranks % size
    return Matches(
        length=ranks // size,
        following=jnp.take_along_axis(every.following, index[:, :, None], axis=1),
        num_following=jnp.take_along_axis(every.num_following, index, axis=1),
    )


def fill_tree(
    matches: Matches, main_chain: Int[Array, "seq level"], tree: Tree
) -> Int[Array, "seq draft"]:
    """Fill a tree: children are continuations of the matches that agree with a node.

    The most frequent token comes first; ties go to the longest and latest match. If too
    few are known, a draft is repeated.

    Args:
        matches: The longest first, ties the latest first.
        main_chain: Tokens of the first nodes; the others go by frequency.
    """
    length, following, num_following = matches
    seqs, count = length.shape
    depth = jnp.array([tree.depths[1:]], jnp.int32)
    is_main = jnp.asarray(np.arange(tree.num_levels) < tree.main_chain.num_nodes)
    order = jnp.arange(count, dtype=jnp.int32)[None, None]

    def fill_level(
        level: Array, carry: tuple[Array, Bool[Array, "seq row match"]]
    ) -> tuple[Array, Array]:
        drafts, agrees = carry
        rows = jnp.asarray(tree.branching)[level]
        is_known = (length > 0) & (level < num_following)
        is_voting = agrees[:, rows] & is_known[:, None]  # [seq, entry, match]
        token_after = jax.lax.dynamic_index_in_dim(following, level, 2, keepdims=False)
        token_after = jnp.broadcast_to(token_after[:, None], is_voting.shape)
        main_token = jax.lax.dynamic_index_in_dim(main_chain, level, 1, keepdims=False)
        is_same, is_left, chosen = (
            token_after[..., None] == token_after[:, :, None],
            is_voting,
            [],
        )
        for rank in range(int(tree.ranks.max()) + 1):
            votes = (is_same & is_left[:, :, None]).sum(axis=3)
            best = jnp.argmax(jnp.where(is_left, votes * count - order, -count), axis=2)
            token = jnp.take_along_axis(token_after, best[:, :, None], axis=2)[:, :, 0]
            if rank == 0:
                first = jnp.where(is_main[level], main_token, token[:, 0])
                token = token.at[:, 0].set(first)
            else:
                token = jnp.where(is_left.any(axis=2), token, chosen[0])
            chosen.append(token)
            is_left &= token_after != token[:, :, None]
        ranked = jnp.stack(chosen, axis=2)
        node_tokens = ranked[:, tree.entries, tree.ranks]
        is_new = depth == level + 1
        of_level = is_voting[:, tree.entries] & (
            token_after[:, tree.entries] == node_tokens[..., None]
        )
        of_nodes = jnp.where(is_new[..., None], of_level, agrees[:, 1:])
        agrees = jnp.concatenate([agrees[:, :1], of_nodes], axis=1)
        return jnp.where(is_new, node_tokens, drafts), agrees

    drafts = jnp.zeros((seqs, tree.num_nodes), jnp.int32)
    agrees = jnp.ones((seqs, tree.num_rows, count), bool)
    return jax.lax.fori_loop(0, tree.num_levels, fill_level, (drafts, agrees))[0]


def _top_ranks(rank: Int[Array, "seq place"], count: int) -> Int[Array, "seq match"]:
    """Return the `count` largest numbers, in order; 0 for missing ones.

    Computed by repeated maxima, because `top_k` is as slow as argmax on a CPU
    (`jaxspec.models.cpu`).
    """
    largest = [rank.max(axis=1)]
    for _ in range(count - 1):
        rank = jnp.where(rank == largest[-1][:, None], 0, rank)
        largest.append(rank.max(axis=1))
    return jnp.stack(largest, axis=1)


def _match_lengths(
    tokens: Int[Array, "seq position"], active: Active, longest: int
) -> Int[Array, "seq position"]:
    """Return how many tokens up to each position equal the sequence's last ones."""
    length = jnp.zeros_like(tokens)
    is_equal = jnp.ones_like(tokens, bool)
    count = min(longest, tokens.shape[1])
    index = active.num_tokens[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)[None]
    newest = jnp.take_along_axis(tokens, jnp.maximum(index, 0), axis=1)
    for back in range(count):
        # Compares the token `back` places before each position; none before 0.
        here = (tokens == newest[:, back, None])[:, : tokens.shape[1] - back]
        is_equal &= jnp.pad(here, ((0, 0), (back, 0)))
        length += is_equal.astype(jnp.int32)
    return length
