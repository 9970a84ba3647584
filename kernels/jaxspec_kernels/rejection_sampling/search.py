"""Finds the borders of top-k and top-p without sorting: a few passes of sums."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxspec_kernels.rejection_sampling.passes import Distribution, Slice, peak, weigh

# exp of less than this is 0 in float32, denormals included.
UNDERFLOW = -104.0


class _Bracket(NamedTuple):
    """Where the border of a row lies, in keys of logits, and the next ones to try."""

    low: UInt32[Array, " row"]  # enough is at or above it
    high: UInt32[Array, " row"]  # the border is not above it
    amount: Float[Array, " row"]  # at or above low
    above: Float[Array, " row"]  # above high
    tries: UInt32[Array, "row tries"]


def search(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    wanted: Float[Array, " row"],
    *,
    is_searched: Bool[Array, " row"],
    counts: bool,
    amounts: Callable[..., Float[Array, "row tries"]],
    fan: int,
) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
    """A logit such that what is at or above it is just enough, and how much that is.

    Each pass tries `fan` - 1 logits: first evenly between the maximum and where weights
    underflow, then by bisection over the bits of floats, which are ordered as integers
    once the negative ones are flipped. It ends when there is room for one token only:
    with 16 parts after four or five passes, nine (bfloat16: five) at most. Comparisons
    are between given logits, so the border is exact however a pass is fused. Rows that
    are not searched get -inf.

    Args:
        wanted: Tokens, or weight as `weigh` has it.
        amounts: Makes a pass: `passes.amounts`, or what does the same.
    """
    unused = 16 if logits.dtype == jnp.bfloat16 else 0
    room = jnp.full_like(distribution.total, UNDERFLOW)
    if not counts:
        # All below this together weigh less than what is not wanted. Half of that
        # leaves room for rounding.
        spare = (distribution.total - wanted) / (2 * part.whole)
        room = jnp.maximum(room, jnp.log(jnp.maximum(spare, 0.0)))
    bracket = _widest(distribution, room, is_searched, unused, fan)
    if counts:  # how many have any weight is not known
        bracket = bracket._replace(amount=jnp.full_like(distribution.total, jnp.inf))

    def is_open(bracket: _Bracket) -> Bool[Array, " row"]:
        one = jnp.ones_like(distribution.total)
        if not counts:
            one = weigh(_from_key(bracket.low << unused)[:, None], distribution)[:, 0]
        has_two = bracket.amount - bracket.above >= 2 * one
        return (bracket.low < bracket.high) & has_two

    def narrow(bracket: _Bracket) -> _Bracket:
        limits = _from_key(bracket.tries << unused)
        own = amounts(part, logits, distribution, limits, counts=counts)
        found = _narrowed(bracket, part.sum(own), wanted)
        # A row that is done stays as it is, whatever its neighbours go on with.
        goes_on = is_open(bracket)
        return jax.tree.map(
            lambda new, old: jnp.where(
                goes_on.reshape(-1, *[1] * (new.ndim - 1)), new, old
            ),
            found,
            bracket,
        )

    bracket = jax.lax.while_loop(lambda one: is_open(one).any(), narrow, bracket)
    threshold = _from_key(bracket.low << unused)
    return jnp.where(is_searched, threshold, -jnp.inf), bracket.amount


def _widest(
    distribution: Distribution,
    room: Float[Array, " row"],
    is_searched: Bool[Array, " row"],
    unused: int,
    fan: int,
) -> _Bracket:
    """From the maximum `room` temperatures down; rows that are not searched have none.

    The lowest logit is tried too, so that the amount at it becomes known.
    """
    lowest = peak(distribution.maximum) + room * distribution.temperature
    lowest = jnp.minimum(
        jnp.maximum(lowest, distribution.threshold), distribution.maximum
    )
    lowest = jnp.where(is_searched, lowest, distribution.maximum)
    low, high = (_to_key(logit) >> unused for logit in (lowest, distribution.maximum))
    share = jnp.arange(fan - 1, dtype=jnp.float32)[None] / (fan - 1)
    tries = lowest[:, None] + (distribution.maximum - lowest)[:, None] * share
    tries = jnp.clip(_to_key(tries) >> unused, low[:, None], high[:, None])
    return _Bracket(
        low, high, distribution.total, jnp.zeros_like(distribution.total), tries
    )


def _narrowed(
    bracket: _Bracket, amounts: Float[Array, "row tries"], wanted: Float[Array, " row"]
) -> _Bracket:
    """The bracket between the last try that has enough and the next one."""
    fan = amounts.shape[1] + 1
    num_enough = (amounts >= wanted[:, None]).sum(axis=1, dtype=jnp.int32)

    def pick(first: Array, middle: Array, last: Array, at: Array) -> Array:
        every = jnp.concatenate([first[:, None], middle, last[:, None]], axis=1)
        return jnp.take_along_axis(every, at[:, None], axis=1)[:, 0]

    keys = bracket.low, bracket.tries, bracket.high + 1
    low = pick(*keys, num_enough)
    high = pick(*keys, num_enough + 1) - 1
    step = (high - jnp.minimum(low, high)) // fan + 1
    tries = low[:, None] + step[:, None] * jnp.arange(1, fan, dtype=jnp.uint32)[None]
    every = bracket.amount, amounts, bracket.above
    return _Bracket(
        low,
        high,
        pick(*every, num_enough),
        pick(*every, num_enough + 1),
        jnp.minimum(tries, high[:, None]),
    )


def _to_key(values: Float[Array, "..."]) -> UInt32[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    is_negative = (bits >> 31) == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(0x80000000))


def _from_key(keys: UInt32[Array, "..."]) -> Float[Array, "..."]:
    is_negative = (keys >> 31) == 0
    bits = jnp.where(is_negative, ~keys, keys & jnp.uint32(0x7FFFFFFF))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
