"""What a proposer hands to verification."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Proposal(NamedTuple):
    """Draft tokens of one round.

    `parent[s, i]` is the draft that token i continues, -1 for the last known token; a
    chain has parent i - 1. `probs` are what the tokens were drawn from, after all
    sampling controls; None where each was certain: a point mass. `is_broken` marks
    sequences of which the draft model made NaN or infinity; None where there is none.
    """

    tokens: Int[Array, "seq draft"]
    parent: Int[Array, "seq draft"]
    probs: Float[Array, "seq draft vocab"] | None
    is_broken: Bool[Array, " seq"] | None = None


def chain(
    tokens: Int[Array, "seq draft"],
    probs: Float[Array, "seq draft vocab"] | None,
    is_broken: Bool[Array, " seq"] | None = None,
) -> Proposal:
    """Every draft continues the one before it."""
    parent = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] - 1
    return Proposal(tokens, jnp.broadcast_to(parent, tokens.shape), probs, is_broken)
