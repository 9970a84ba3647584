"""Draws one token per sequence from one of its rows: the second and last reading.

By inverting the cumulative sum at one uniform, in three levels: devices, tiles, then
the columns of the one tile that holds the token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.rejection_sampling.passes import (
    Draft,
    Law,
    Slice,
    clean,
    normalise,
    weigh,
)


def draw(
    part: Slice,
    logits: Float[Array, "row vocab"],
    law: Law,
    draft: Draft,
    *,
    row: Int[Array, " seq"],
    index: Int[Array, " seq"],
    is_rejected: Bool[Array, " seq"],
    joint: Float[Array, " seq"],
    uniform: Float[Array, " seq"],
) -> Int[Array, " seq"]:
    """Sample row `row` of `logits`, or what is left of it after a rejection.

    Args:
        index: Draft row that `row` judged.
        is_rejected: Draw from max(joint * target - draft, 0), or from the target where
            that is nowhere positive.
    """
    law = Law(*(values[row] for values in law))

    def read(number: Array) -> tuple[Array, Array]:
        """A tile of each sequence's row: the target's chances, and the residual."""

        def one(row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(logits, (row, start), (1, part.tile))[0]

        tile = clean(jax.vmap(one)(row, part.start(number)), part.ids(number))
        target = normalise(weigh(tile, law), law.total[:, None])
        if not draft.tokens.shape[1]:
            return target, target
        own = draft.tile_of(part, index, number)
        return target, jnp.maximum(joint[:, None] * target - own, 0.0)

    def sums(kept: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        tiles = read(jnp.full_like(row, number))
        added = [
            amount.at[:, number].set(tile.sum(axis=1))
            for amount, tile in zip(kept, tiles, strict=True)
        ]
        return added[0], added[1]

    empty = jnp.zeros((row.shape[0], part.num_tiles), jnp.float32)
    target, residual = part.walk(sums, (empty, empty), logits)
    is_residual = is_rejected & (part.sum(residual.sum(axis=1)) > 0)
    amounts = jnp.where(is_residual[:, None], residual, target)

    goal, is_here = _choose_device(part, amounts, uniform)
    number, goal = _descend(amounts, goal)
    target, residual = read(number)
    column, _ = _descend(jnp.where(is_residual[:, None], residual, target), goal)
    token = part.offset + part.start(number) + column
    return part.sum(jnp.where(is_here, token, 0)).astype(jnp.int32)


def _choose_device(
    part: Slice, amounts: Float[Array, "seq tile"], uniform: Float[Array, " seq"]
) -> tuple[Array, Array]:
    """How far into this device's slice the token lies, and whether it does."""
    own = jnp.cumsum(amounts, axis=1)[:, -1]
    if part.axis_name is None:
        return uniform * own, jnp.ones_like(uniform, bool)
    devices = jnp.arange(jax.lax.axis_size(part.axis_name), dtype=jnp.int32)[None]
    every = part.sum(jnp.where(devices == part.index, own[:, None], 0.0))
    goal = uniform * jnp.cumsum(every, axis=1)[:, -1]
    device, goal = _descend(every, goal)
    return goal, device == part.index


def _descend(
    weights: Float[Array, "seq n"], goal: Float[Array, " seq"]
) -> tuple[Int[Array, " seq"], Float[Array, " seq"]]:
    """The first weight whose cumulative sum exceeds the goal, and the goal inside it.

    Where rounding leaves none, the last one that is not 0. Weights of 0 are passed over
    by name: XLA sums in a tree, so that a cumulative sum may grow where nothing was
    added.
    """
    sums = jnp.cumsum(weights, axis=1)
    position = jnp.arange(weights.shape[1], dtype=jnp.int32)[None]
    has_weight = weights > 0
    last = jnp.where(has_weight, position, 0).max(axis=1)
    is_past = has_weight & (sums > goal[:, None])
    first = jnp.where(is_past, position, weights.shape[1]).min(axis=1)
    chosen = jnp.minimum(first, last)
    before = jnp.take_along_axis(sums, jnp.maximum(chosen - 1, 0)[:, None], axis=1)
    return chosen, goal - jnp.where(chosen > 0, before[:, 0], 0.0)
