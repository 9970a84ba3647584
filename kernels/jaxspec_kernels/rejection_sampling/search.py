"""Find the cutoffs of top-k and top-p without sorting: a few passes of sums."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxspec_kernels.rejection_sampling.passes import (
    Distribution,
    VocabShard,
    safe_max,
    to_weights,
)

# The exp of a number below this is 0 in float32, even with denormals.
UNDERFLOW = -104.0


class _Bracket(NamedTuple):
    """Range that holds a row's cutoff, as keys of logits, and the keys to try next."""

    low: UInt32[Array, " row"]  # the mass at or above it is enough
    high: UInt32[Array, " row"]  # the cutoff is not above it
    mass: Float[Array, " row"]  # at or above low
    above: Float[Array, " row"]  # mass above high
    tries: UInt32[Array, "row tries"]


def search(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    wanted: Float[Array, " row"],
    *,
    is_searched: Bool[Array, " row"],
    counts: bool,
    mass_above: Callable[..., Float[Array, "row tries"]],
    fan: int,
) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
    """Return the largest logit with enough mass at or above it, and that mass.

    Each pass tries `fan` - 1 logits: first evenly between the maximum and where weights
    underflow, then by bisection over the bits of floats, which are ordered as integers
    once the negative ones are flipped. The search ends when the range holds at most one
    token: with 16 parts after four or five passes, nine (bfloat16: five) at most.
    Logits are only compared, so the cutoff is exact however XLA fuses a pass. Rows that
    are not searched return -inf.

    Args:
        wanted: Number of tokens, or mass in units of `to_weights`.
        counts: Count tokens instead of adding up weights.
        mass_above: Makes one pass, as `passes.mass_above` does.
        fan: Parts into which a pass divides the range.
    """
    unused = 16 if logits.dtype == jnp.bfloat16 else 0
    room = jnp.full_like(distribution.total, UNDERFLOW)
    if not counts:
        # All tokens below this weigh less, together, than the mass that may be dropped.
        # Halving that mass leaves room for rounding.
        spare = (distribution.total - wanted) / (2 * shard.whole)
        room = jnp.maximum(room, jnp.log(jnp.maximum(spare, 0.0)))
    bracket = _widest(distribution, room, is_searched, unused, fan)
    if counts:  # the number of tokens with any weight is not known
        bracket = bracket._replace(mass=jnp.full_like(distribution.total, jnp.inf))

    def is_open(bracket: _Bracket) -> Bool[Array, " row"]:
        token_mass = jnp.ones_like(distribution.total)
        if not counts:
            lowest = _from_key(bracket.low << unused)[:, None]
            token_mass = to_weights(lowest, distribution)[:, 0]
        has_two = bracket.mass - bracket.above >= 2 * token_mass
        return (bracket.low < bracket.high) & has_two

    def narrow(bracket: _Bracket) -> _Bracket:
        limits = _from_key(bracket.tries << unused)
        local_masses = mass_above(shard, logits, distribution, limits, counts=counts)
        narrowed = _narrowed(bracket, shard.psum(local_masses), wanted)
        # A finished row must not change while other rows continue.
        is_active = is_open(bracket)
        return jax.tree.map(
            lambda new, old: jnp.where(
                is_active.reshape(-1, *[1] * (new.ndim - 1)), new, old
            ),
            narrowed,
            bracket,
        )

    bracket = jax.lax.while_loop(lambda one: is_open(one).any(), narrow, bracket)
    threshold = _from_key(bracket.low << unused)
    return jnp.where(is_searched, threshold, -jnp.inf), bracket.mass


def _widest(
    distribution: Distribution,
    room: Float[Array, " row"],
    is_searched: Bool[Array, " row"],
    unused: int,
    fan: int,
) -> _Bracket:
    """Start with `room` temperatures below the maximum; empty for rows not searched.

    The lowest logit is tried too, so that the mass at or above it becomes known.
    """
    lowest = safe_max(distribution.maximum) + room * distribution.temperature
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
    bracket: _Bracket, masses: Float[Array, "row tries"], wanted: Float[Array, " row"]
) -> _Bracket:
    """Return the range between the last key with enough mass and the next one."""
    fan = masses.shape[1] + 1
    num_enough = (masses >= wanted[:, None]).sum(axis=1, dtype=jnp.int32)

    def pick(first: Array, middle: Array, last: Array, at: Array) -> Array:
        every = jnp.concatenate([first[:, None], middle, last[:, None]], axis=1)
        return jnp.take_along_axis(every, at[:, None], axis=1)[:, 0]

    keys = bracket.low, bracket.tries, bracket.high + 1
    low = pick(*keys, num_enough)
    high = pick(*keys, num_enough + 1) - 1
    step = (high - jnp.minimum(low, high)) // fan + 1
    tries = low[:, None] + step[:, None] * jnp.arange(1, fan, dtype=jnp.uint32)[None]
    every = bracket.mass, masses, bracket.above
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
