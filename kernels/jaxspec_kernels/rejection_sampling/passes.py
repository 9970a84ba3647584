"""Passes over the vocabulary, one tile at a time; no array of it is ever made.

A pass reads every logit once and keeps a few numbers per row. Each function here is one
pass, but for `search`, which counts its own, and `draw`, which ends with one tile more.
A row is one target row of one sequence: row `seq * (draft + 1) + i`. Under `shard_map`
each device walks its own slice of the vocabulary, and what it keeps is combined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# Columns walked at once.
TILE = 2048
# A pass of `search` tells this many parts of its range apart: four bits of a float.
FAN = 16

LARGEST = float(jnp.finfo(jnp.float32).max)
NO_ID = jnp.iinfo(jnp.int32).max  # of a column that holds no token, or one seen before


class Law(NamedTuple):
    """What the probabilities of a row follow from, beside its logits.

    The probability of a logit is 0 below `threshold`, and above it
    exp((logit - maximum) / temperature) / total.
    """

    temperature: Float[Array, " row"]
    maximum: Float[Array, " row"]
    threshold: Float[Array, " row"]
    total: Float[Array, " row"]


class Statistics(NamedTuple):
    """What one pass tells of unfiltered rows; the lowest id of equal logits is best."""

    maximum: Float[Array, " row"]
    best: Int[Array, " row"]
    total: Float[Array, " row"]
    drafted: Float[Array, " row"]  # logit of the row's draft token


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of the vocabulary that this device holds, and how it is walked.

    Attributes:
        columns: Ids held, pads included.
        vocab_size: Ids at or past it are pads.
        axis_name: Mesh axes that split the vocabulary; None is the whole of it.
    """

    columns: int
    tile: int
    vocab_size: int
    axis_name: str | tuple[str, ...] | None

    @property
    def num_tiles(self) -> int:
        """Tiles of a walk."""
        return -(-self.columns // self.tile)

    @property
    def offset(self) -> Array | int:
        """The first id held."""
        return 0 if self.axis_name is None else self.index * self.columns

    @property
    def index(self) -> Array:
        """The number of this device among those that split the vocabulary."""
        assert self.axis_name is not None
        return jax.lax.axis_index(self.axis_name)

    def start(self, number: Int[Array, "*tiles"]) -> Int[Array, "*tiles"]:
        """Column at which a tile is read; the last one overlaps its neighbour."""
        return jnp.minimum(number * self.tile, self.columns - self.tile)

    def ids(self, number: Int[Array, " n"]) -> Int[Array, "n tile"]:
        """Ids of each tile's columns; `NO_ID` for pads and for repeated columns."""
        within = jnp.arange(self.tile, dtype=jnp.int32)[None]
        column = self.start(number)[:, None] + within
        ids = self.offset + column
        is_new = (column >= number[:, None] * self.tile) & (ids < self.vocab_size)
        return jnp.where(is_new, ids, NO_ID)

    def read(
        self, logits: Float[Array, "row vocab"], number: Int[Array, ""]
    ) -> tuple[Float[Array, "row tile"], Int[Array, "1 tile"]]:
        """A tile of every row, in float32, and its ids; what is no token is -inf."""
        tile = jax.lax.dynamic_slice_in_dim(logits, self.start(number), self.tile, 1)
        ids = self.ids(number[None])
        return clean(tile, ids), ids

    def walk(self, visit: Callable, kept: Any, like: Array) -> Any:
        """Fold `visit(kept, number)` over the tiles.

        Args:
            like: A sharded array. What is kept must be typed, under `shard_map`, as
                varying where it varies; the select does no more than that.
        """
        pivot = like.reshape(-1)[0] == 0
        kept = jax.tree.map(lambda leaf: jnp.where(pivot, leaf, leaf), kept)
        body = lambda number, kept: visit(kept, number)  # noqa: E731
        return jax.lax.fori_loop(0, self.num_tiles, body, kept)

    def local(self, tokens: Int[Array, "*batch"]) -> tuple[Array, Array]:
        """Columns of tokens, and which of them this device holds."""
        column = tokens - self.offset
        is_held = (column >= 0) & (column < self.columns) & (tokens < self.vocab_size)
        return jnp.clip(column, 0, self.columns - 1), is_held

    def sum(self, values: Array) -> Array:
        """The sum over devices."""
        return values if not self.axis_name else jax.lax.psum(values, self.axis_name)

    def max(self, values: Array) -> Array:
        """The largest over devices."""
        return values if not self.axis_name else jax.lax.pmax(values, self.axis_name)

    def min(self, values: Array) -> Array:
        """The smallest over devices."""
        return values if not self.axis_name else jax.lax.pmin(values, self.axis_name)


class Draft(NamedTuple):
    """The proposal: probabilities, or None for a point mass at each token."""

    tokens: Int[Array, "seq draft"]
    probs: Float[Array, "seq draft vocab"] | None

    def tile(self, part: Slice, number: Array) -> Float[Array, "seq draft tile"]:
        """A tile of every row."""
        if self.probs is None:
            is_token = self.tokens[:, :, None] == part.ids(number[None])[None]
            return is_token.astype(jnp.float32)
        start = part.start(number)
        tile = jax.lax.dynamic_slice_in_dim(self.probs, start, part.tile, 2)
        return tile.astype(jnp.float32)

    def tile_of(self, part: Slice, row: Array, number: Array) -> Array:
        """A tile of its own of one row per sequence: `[seq, tile]`."""
        if self.probs is None:
            token = jnp.take_along_axis(self.tokens, row[:, None], axis=1)
            return (token == part.ids(number)).astype(jnp.float32)

        def read(rows: Array, row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(rows, (row, start), (1, part.tile))[0]

        return jax.vmap(read)(self.probs, row, part.start(number)).astype(jnp.float32)

    def chance(self, part: Slice) -> Float[Array, "seq draft"]:
        """Probability of each draft token."""
        if self.probs is None:
            return jnp.ones(self.tokens.shape, jnp.float32)
        column, is_held = part.local(self.tokens)
        probs = jnp.take_along_axis(self.probs, column[:, :, None], axis=2)[:, :, 0]
        return part.sum(jnp.where(is_held, probs.astype(jnp.float32), 0.0))


def clean(logits: Array, ids: Array) -> Array:
    """Logits as float32; NaN, pads and repeated columns become -inf."""
    logits = jnp.minimum(logits.astype(jnp.float32), LARGEST)
    return jnp.where(jnp.isnan(logits) | (ids == NO_ID), -jnp.inf, logits)


def weigh(logits: Float[Array, "row tile"], law: Law) -> Float[Array, "row tile"]:
    """Probabilities of a tile, times `law.total` (which is not used)."""
    # Differences first: they are exact near the maximum, whose weight is 1 however the
    # expression is fused; quotients of low temperatures are large and rounded.
    return jnp.where(
        logits >= law.threshold[:, None],
        jnp.exp((logits - peak(law.maximum)[:, None]) / law.temperature[:, None]),
        0.0,
    )


def peak(maximum: Array) -> Array:
    """The maximum, finite where a row has no finite logit: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def normalise(weights: Array, total: Array) -> Array:
    """Probabilities; those of a row without weight are 0."""
    return weights / jnp.where(total > 0, total, 1.0)


def lowest(values: Float[Array, "row tile"], ids: Array) -> tuple[Array, Array]:
    """The largest value of each row, and the lowest id that has it."""
    best = values.max(axis=1)
    index = jnp.where(values == best[:, None], ids, NO_ID).min(axis=1)
    return best, index


def statistics(
    part: Slice,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
) -> Statistics:
    """Maximum, its id, the sum of exp, and one logit, of this device's slice."""
    rows = logits.shape[0]
    column, is_held = part.local(tokens)
    drafted = jnp.take_along_axis(logits, column[:, None], axis=1)
    drafted = clean(drafted, jnp.where(is_held, tokens, NO_ID)[:, None])[:, 0]

    def visit(kept: tuple[Array, ...], number: Array) -> tuple[Array, ...]:
        maximum, best, total = kept
        tile, ids = part.read(logits, number)
        top, at = lowest(tile, ids)
        best = jnp.where(top > maximum, at, best)
        top = jnp.maximum(top, maximum)
        law = Law(temperature, top, jnp.full_like(top, -jnp.inf), total)
        before = weigh(maximum[:, None], law)[:, 0]
        return top, best, total * before + weigh(tile, law).sum(axis=1)

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.full(rows, part.offset, jnp.int32),
        jnp.zeros(rows, jnp.float32),
    )
    maximum, best, total = part.walk(visit, start, logits)
    return Statistics(maximum, best, total, drafted)


def combine(part: Slice, own: Statistics, temperature: Array) -> Statistics:
    """Statistics of the whole vocabulary from those of every device."""
    maximum = part.max(own.maximum)
    best = part.min(jnp.where(own.maximum == maximum, own.best, NO_ID))
    law = Law(temperature, maximum, jnp.full_like(maximum, -jnp.inf), own.total)
    total = part.sum(own.total * weigh(own.maximum[:, None], law)[:, 0])
    return Statistics(maximum, best, total, part.max(own.drafted))


def total(part: Slice, logits: Array, law: Law) -> Float[Array, " row"]:
    """The sum of the weights that the threshold leaves."""

    def visit(amount: Array, number: Array) -> Array:
        return amount + weigh(part.read(logits, number)[0], law).sum(axis=1)

    start = jnp.zeros(logits.shape[0], jnp.float32)
    return part.sum(part.walk(visit, start, logits))


def search(
    part: Slice,
    logits: Float[Array, "row vocab"],
    law: Law,
    wanted: Float[Array, " row"],
    is_searched: Bool[Array, " row"],
    *,
    counts: bool,
) -> Float[Array, " row"]:
    """The largest logit such that what is at or above it is still enough.

    Bisection over the bits of floats, which are ordered as integers once the negative
    ones are flipped; each pass tries 15 logits. float32 takes eight passes, bfloat16
    four, and rows that are not searched none; those get -inf. Comparisons are between
    given logits, so the border is exact however a pass is fused.

    Args:
        wanted: Tokens, or weight as `weigh` has it.
    """
    unused = 16 if logits.dtype == jnp.bfloat16 else 0
    lowest_key = _to_key(jnp.full_like(law.maximum, -jnp.inf)) >> unused
    highest_key = jnp.where(is_searched, _to_key(law.maximum) >> unused, lowest_key)
    tries = jnp.arange(1, FAN, dtype=jnp.uint32)[None]

    def narrow(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        step = (high - low) // FAN + 1
        keys = low[:, None] + step[:, None] * tries
        limits = _from_key(keys << unused)

        def visit(amount: Array, number: Array) -> Array:
            tile, _ = part.read(logits, number)
            weights = jnp.ones_like(tile) if counts else weigh(tile, law)
            is_in = tile[:, None] >= limits[:, :, None]
            return amount + jnp.where(is_in, weights[:, None], 0.0).sum(axis=2)

        amount = jnp.zeros(keys.shape, jnp.float32)
        amount = part.sum(part.walk(visit, amount, logits))
        is_enough = (amount >= wanted[:, None]) & (keys <= high[:, None])
        num_enough = is_enough.sum(axis=1, dtype=jnp.uint32)
        low = low + num_enough * step
        return low, jnp.minimum(high, low + step - 1)

    low, _ = jax.lax.while_loop(
        lambda bounds: (bounds[0] < bounds[1]).any(), narrow, (lowest_key, highest_key)
    )
    return jnp.where(is_searched, _from_key(low << unused), -jnp.inf)


def _to_key(values: Float[Array, "..."]) -> UInt32[Array, "..."]:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    is_negative = (bits >> 31) == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(0x80000000))


def _from_key(keys: UInt32[Array, "..."]) -> Float[Array, "..."]:
    is_negative = (keys >> 31) == 0
    bits = jnp.where(is_negative, ~keys, keys & jnp.uint32(0x7FFFFFFF))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def excess(
    part: Slice,
    logits: Float[Array, "row vocab"],
    law: Law,
    draft: Draft,
    joint: Float[Array, "seq inner"],
) -> Float[Array, "seq inner"]:
    """Sum of max(joint * target - draft, 0) in the rows between the first and last."""
    seqs, inner = joint.shape
    if not inner:
        return joint

    def visit(amount: Array, number: Array) -> Array:
        weights = weigh(part.read(logits, number)[0], law)
        target = normalise(weights, law.total[:, None])
        target = target.reshape(seqs, inner + 2, part.tile)[:, 1:-1]
        above = joint[:, :, None] * target - draft.tile(part, number)[:, 1:]
        return amount + jnp.maximum(above, 0.0).sum(axis=2)

    start = jnp.zeros((seqs, inner), jnp.float32)
    return part.sum(part.walk(visit, start, logits))


def race(
    part: Slice,
    logits: Float[Array, "row vocab"],
    law: Law,
    words: UInt32[Array, "row 2"],
) -> Int[Array, " row"]:
    """The argmax of weight / noise; the noise of an id depends on the two words only.

    Weights are not normalised, so that the choice does not depend on how a sum of the
    vocabulary is ordered, nor on the number of devices.
    """

    def visit(kept: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        score, best = kept
        tile, ids = part.read(logits, number)
        top, at = lowest(weigh(tile, law) / exponential(words, ids), ids)
        return jnp.maximum(top, score), jnp.where(top > score, at, best)

    rows = logits.shape[0]
    start = jnp.zeros(rows, jnp.float32), jnp.full(rows, part.offset, jnp.int32)
    score, best = part.walk(visit, start, logits)
    return part.min(jnp.where(score == part.max(score), best, NO_ID))


def exponential(
    words: UInt32[Array, "row 2"], ids: Int[Array, "1 tile"]
) -> Float[Array, "row tile"]:
    """Exponential noise by a counter hash; strictly positive.

    References: the finaliser of MurmurHash3 (Appleby 2011).
    """
    bits = _mix(_mix(ids.astype(jnp.uint32) + words[:, :1]) ^ words[:, 1:])
    # Centred in its cell, so that neither 0 nor 1 comes out.
    unit = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(unit)


def _mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
