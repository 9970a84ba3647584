"""An oracle for sampling in tiles: sampling on whole arrays of probabilities.

It computes differently: it searches thresholds among ranked candidates, then by
bisection, and has each row of probabilities and of noise as one array.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.program import randomness
from jaxspec_kernels.rejection_sampling import SamplingValues, noise

# Number of largest weights among which thresholds of top-p and top-k are searched
# first.
NUM_CANDIDATES = 128


def argmax(values: Float[Array, "row vocab"]) -> Int[Array, " row"]:
    """Index of the largest value, the lowest index on ties; NaN never wins.

    In two stages (block maxima, then one block): XLA:CPU's plain argmax over a
    vocabulary costs twenty times as much.
    """
    rows, vocab = values.shape
    block = max(size for size in (256, 128, 64, 32, 1) if vocab % size == 0)
    values = jnp.where(jnp.isnan(values), -jnp.inf, values)
    blocks = values.reshape(rows, vocab // block, block)
    best = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, best[:, None, None], axis=1)[:, 0]
    index = best * block + jnp.argmax(inside, axis=-1)
    return index.astype(jnp.int32)


def distribution(
    logits: Float[Array, "row vocab"], sampling_values: SamplingValues
) -> Float[Array, "row vocab"]:
    """Probabilities after temperature, top-k, top-p and min-p, in that order.

    A filter keeps the logits at or above a threshold, including all that equal it.
    Rows of greedy requests return the plain softmax. NaN excludes its token.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    temperature = sampling_values.temperature[:, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(scaled)
    vocab = logits.shape[1]
    top_k = jnp.where(sampling_values.top_k > 0, sampling_values.top_k, vocab)
    filtered = (
        (top_k < vocab) | (sampling_values.top_p < 1) | (sampling_values.min_p > 0)
    )
    weights = jax.lax.cond(
        filtered.any(),
        lambda: _filter(weights, top_k, sampling_values.top_p, sampling_values.min_p),
        lambda: weights,
    )
    return weights / weights.sum(axis=-1, keepdims=True)


def _filter(
    weights: Float[Array, "row vocab"],
    top_k: Int[Array, " row"],
    top_p: Float[Array, " row"],
    min_p: Float[Array, " row"],
) -> Float[Array, "row vocab"]:
    """Set the weights of dropped tokens to 0; `weights` are exp(logit - max)."""
    count = min(NUM_CANDIDATES, weights.shape[1])
    ranked = jax.lax.top_k(weights, count)[0]
    is_k_row, is_p_row = top_k < weights.shape[1], top_p < 1
    kth = jnp.take_along_axis(
        ranked, jnp.clip(top_k - 1, 0, count - 1)[:, None], axis=-1
    )[:, 0]

    def threshold_k() -> Array:
        searched = _search(
            weights, lambda kept, _: kept >= top_k.astype(jnp.float32), counts=True
        )
        return jnp.where(top_k <= count, kth, searched)

    above_k = jax.lax.cond((is_k_row & (top_k > count)).any(), threshold_k, lambda: kth)
    above_k = jnp.where(is_k_row, above_k, 0.0)
    kept = jnp.where(weights >= above_k[:, None], weights, 0.0)
    wanted = top_p * kept.sum(axis=-1)

    # The smallest set of most probable tokens that reaches top_p.
    mass = jnp.cumsum(jnp.where(ranked >= above_k[:, None], ranked, 0.0), axis=-1)
    reached = mass >= wanted[:, None]
    is_covered = reached[:, -1]
    first = jnp.argmax(reached, axis=-1)
    among = jnp.take_along_axis(ranked, first[:, None], axis=-1)[:, 0]

    def threshold_p() -> Array:
        searched = _search(kept, lambda mass, _: mass >= wanted, counts=False)
        return jnp.where(is_covered, among, searched)

    above_p = jax.lax.cond((is_p_row & ~is_covered).any(), threshold_p, lambda: among)
    above = jnp.maximum(above_k, jnp.where(is_p_row, above_p, 0.0))
    kept = jnp.where(kept >= above[:, None], kept, 0.0)
    # Not `kept >= min_p`: rounding (a fused multiply-add) may make the largest weight
    # less than 1, and min_p = 1 would then keep no token.
    top = kept.max(axis=-1, keepdims=True)
    return jnp.where(kept >= min_p[:, None] * top, kept, 0.0)


def _search(weights: Float[Array, "row vocab"], enough, *, counts: bool) -> Array:
    """Return the largest threshold with enough mass at or above it.

    Bisection over the bits of non-negative floats, which are ordered as integers: 31
    halvings find the exact value, without sorting the vocabulary.
    """
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    rows = weights.shape[0]

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        inside = bits >= middle[:, None]
        mass = jnp.where(inside, 1.0 if counts else weights, 0.0).sum(axis=-1)
        is_enough = enough(mass, middle)
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle - 1)

    start = jnp.zeros(rows, jnp.int32), bits.max(axis=-1)
    low, _ = jax.lax.fori_loop(0, 31, halve, start)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def draw(
    weights: Float[Array, "row vocab"], uniform: Float[Array, " row"]
) -> Int[Array, " row"]:
    """Sample by inverting the cumulative sum at `uniform`; weights need not sum to 1.

    Two levels (block sums, then one block) instead of one long cumulative sum. A token
    of weight zero is never drawn.
    """
    rows, vocab = weights.shape
    block = max(size for size in (256, 128, 64, 32, 1) if vocab % size == 0)
    blocks = weights.reshape(rows, vocab // block, block)
    masses = blocks.sum(axis=-1)
    sums = jnp.cumsum(masses, axis=-1)
    target = uniform[:, None] * sums[:, -1:]
    chosen = _first_past(target, sums, masses)
    before = jnp.where(
        chosen > 0, jnp.take_along_axis(sums, chosen[:, None] - 1, axis=-1)[:, 0], 0.0
    )
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)[:, 0]
    inner = jnp.cumsum(inside, axis=-1)
    index = _first_past(target - before[:, None], inner, inside)
    return (chosen * block + index).astype(jnp.int32)


def _first_past(
    target: Float[Array, "row 1"],
    sums: Float[Array, "row n"],
    weights: Float[Array, "row n"],
) -> Int[Array, " row"]:
    """Index of the first weight whose cumulative sum exceeds the target, else the last.

    Weights of 0 are skipped explicitly: XLA sums in a tree, so that rounding can make a
    cumulative sum grow, or shrink, where 0 was added.
    """
    count = weights.shape[1]
    index = jnp.arange(count, dtype=jnp.int32)[None]
    has_weight = weights > 0
    last = jnp.where(has_weight, index, 0).max(axis=-1)
    first = jnp.where(has_weight & (sums > target), index, count).min(axis=-1)
    return jnp.minimum(first, last)


def gumbel_argmax(
    weights: Float[Array, "row vocab"], noise: Float[Array, "row vocab"]
) -> Int[Array, " row"]:
    """Sample as the argmax of weight / exponential noise (the Gumbel-max trick).

    Models that use the same noise often agree, and always if their weights are equal.
    """
    return argmax(weights / noise)


def exponential(
    seed: UInt32[Array, "*batch 2"],
    position: Int[Array, "*batch"],
    role: int,
    size: int,
) -> Float[Array, "*batch vocab"]:
    """Return the noise of the coupled rule: a positive number per vocabulary entry."""
    keys = randomness.words(seed, position, jnp.full_like(position, role))
    counter = jnp.arange(size, dtype=jnp.uint32)
    counter = counter.reshape((1,) * position.ndim + (size,))
    return noise.exponential(keys[..., :1], keys[..., 1:], counter)
