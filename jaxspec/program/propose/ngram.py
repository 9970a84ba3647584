"""Drafts copied from the sequence itself: what followed the same tokens before.

No network: matching is a few comparisons of integers over the known tokens.

References: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.program import history
from jaxspec.program.propose.proposal import Proposal, chain
from jaxspec.program.rows import Active


class Lookup(NamedTuple):
    """How many tokens at a sequence's end must have come before, most and fewest."""

    longest: int
    shortest: int


class Found(NamedTuple):
    """Drafts that were looked up; the first `num_found` of each sequence count."""

    tokens: Int[Array, "seq draft"]
    num_found: Int[Array, " seq"]

    @property
    def proposal(self) -> Proposal:
        """A chain of certain tokens."""
        return chain(self.tokens, None)

    def before(
        self,
        index: Int[Array, ""] | int,
        token: Int[Array, " seq"],
        probs: Float[Array, "seq vocab"] | None,
    ) -> tuple[Int[Array, " seq"], Float[Array, "seq vocab"] | None]:
        """Draft `index` of each sequence: what was looked up, else what was drawn.

        Returns:
            The token and what it was drawn from: all of the mass on it where it was
            looked up.
        """
        is_found = index < self.num_found
        token = jnp.where(is_found, self.tokens[:, index], token)
        if probs is None:
            return token, None
        every = jnp.arange(probs.shape[1], dtype=jnp.int32)[None]
        certain = (every == token[:, None]).astype(probs.dtype)
        return token, jnp.where(is_found[:, None], certain, probs)


def look_up(
    active: Active,
    token_pages: Int[Array, "page page_size"],
    lookup: Lookup,
    *,
    num_draft_tokens: int,
) -> Found:
    """Find what followed the newest tokens when they last came.

    The longest match wins, of equal ones the most recent. A match must end before the
    last token and may overlap with what it matches. Where what followed runs into the
    end of the known tokens, it begins again: a text that repeats itself goes on so.
    """
    tokens = history.whole(token_pages, active.page_table)
    length = _match_lengths(tokens, active, lookup.longest)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_match = (length >= lookup.shortest) & (position < active.num_tokens[:, None] - 1)
    # in lengths [0,2,3,1,3] -> the last 3
    # A maximum and a remainder: XLA:CPU's argmax is many times slower.
    rank = jnp.where(is_match, length * tokens.shape[1] + position, 0)
    best = rank.max(axis=1) % tokens.shape[1]
    has_match = is_match.any(axis=1) & active.is_active
    num_known = jnp.maximum(active.num_tokens - 1 - best, 1)
    offset = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
    following = best[:, None] + 1 + offset % num_known[:, None]
    drafts = jnp.take_along_axis(tokens, following, axis=1, mode="clip")
    return Found(drafts, jnp.where(has_match, num_draft_tokens, 0))


def _match_lengths(
    tokens: Int[Array, "seq position"], active: Active, longest: int
) -> Int[Array, "seq position"]:
    """How many tokens up to each position equal those at the sequence's end."""
    length = jnp.zeros_like(tokens)
    is_equal = jnp.ones_like(tokens, bool)
    for back in range(min(longest, tokens.shape[1])):
        index = jnp.maximum(active.num_tokens - 1 - back, 0)
        newest = jnp.take_along_axis(tokens, index[:, None], axis=1)
        # Position p against the token `back` places before it; there is none before 0.
        here = (tokens == newest)[:, : tokens.shape[1] - back]
        is_equal &= jnp.pad(here, ((0, 0), (back, 0)))
        length += is_equal.astype(jnp.int32)
    return length
