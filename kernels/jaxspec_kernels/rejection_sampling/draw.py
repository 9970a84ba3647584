"""Draw one token per sequence from a row of its logits, which is read a second time.

The cumulative sum is inverted at one uniform, in three levels: devices, pieces of
tiles, then the columns of the piece that holds the token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.rejection_sampling.passes import (
    Distribution,
    Draft,
    VocabShard,
    clean,
    normalise,
    to_weights,
)


def draw(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    *,
    row: Int[Array, " seq"],
    index: Int[Array, " seq"],
    is_rejected: Bool[Array, " seq"],
    joint: Float[Array, " seq"],
    uniform: Float[Array, " seq"],
) -> Int[Array, " seq"]:
    """Sample from row `row` of `logits`, or from its residual after a rejection.

    Args:
        index: Draft row that `row` verified.
        is_rejected: Draw from max(joint * target - draft, 0), or from the target if
            that is 0 everywhere.
    """
    distribution = Distribution(*(values[row] for values in distribution))

    def read(number: Array, within: Array | int, size: int) -> tuple[Array, Array]:
        """Return target probabilities and residual in `size` columns of each row."""
        ids = shard.ids(number, within, size)
        columns = shard.rows(logits, row, number, within, size)
        target = normalise(
            to_weights(clean(columns, ids), distribution), distribution.total[:, None]
        )
        if not draft.tokens.shape[1]:
            return target, target
        draft_probs = draft.rows(shard, index, number, within, size)
        return target, jnp.maximum(joint[:, None] * target - draft_probs, 0.0)

    def sums(carry: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        columns = read(jnp.full_like(row, number), 0, shard.tile)
        updated = [
            masses.at[:, number].set(values.reshape(*masses[:, 0].shape, -1).sum(-1))
            for masses, values in zip(carry, columns, strict=True)
        ]
        return updated[0], updated[1]

    seqs, pieces = row.shape[0], shard.tile // shard.lanes
    empty = jnp.zeros((seqs, shard.num_tiles, pieces), jnp.float32)
    target, residual = shard.walk(sums, (empty, empty), logits)
    is_residual = is_rejected & (shard.psum(residual.sum(axis=(1, 2))) > 0)
    masses = jnp.where(is_residual[:, None, None], residual, target)
    masses = masses.reshape(seqs, -1)

    goal, is_here = _choose_device(shard, masses, uniform)
    piece, goal = _descend(masses, goal)
    number, within = piece // pieces, piece % pieces * shard.lanes
    target, residual = read(number, within, shard.lanes)
    column, _ = _descend(jnp.where(is_residual[:, None], residual, target), goal)
    token = shard.offset + shard.start(number) + within + column
    return shard.psum(jnp.where(is_here, token, 0)).astype(jnp.int32)


def _choose_device(
    shard: VocabShard, masses: Float[Array, "seq piece"], uniform: Float[Array, " seq"]
) -> tuple[Array, Array]:
    """Return the goal within this device's slice, and whether the token lies there."""
    local_mass = jnp.cumsum(masses, axis=1)[:, -1]
    if shard.axis_name is None:
        return uniform * local_mass, jnp.ones_like(uniform, bool)
    devices = jnp.arange(jax.lax.axis_size(shard.axis_name), dtype=jnp.int32)[None]
    device_masses = shard.psum(
        jnp.where(devices == shard.index, local_mass[:, None], 0.0)
    )
    goal = uniform * jnp.cumsum(device_masses, axis=1)[:, -1]
    device, goal = _descend(device_masses, goal)
    return goal, device == shard.index


def _descend(
    weights: Float[Array, "seq n"], goal: Float[Array, " seq"]
) -> tuple[Int[Array, " seq"], Float[Array, " seq"]]:
    """Find the first weight whose cumulative sum exceeds the goal; the goal inside it.

    If rounding leaves no such weight, it is the last nonzero one. Weights of 0 are
    skipped explicitly: XLA sums in a tree, so a cumulative sum may grow where 0 was
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
