"""Passes over the vocabulary, one tile at a time; verification makes no array of it.

A pass reads every logit once and keeps a few numbers per row.
A row is one target row of one sequence: row `seq * (draft + 1) + i`. Under `shard_map`
each device walks its own slice of the vocabulary, and what it keeps is combined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.sums import row_sums

# Columns walked at once, on CPU: a turn of the loop costs as much as a few thousand.
TILE = 4096
# A sum over the vocabulary keeps this many partial sums per row and adds them up at the
# end: XLA:CPU does not vectorise sums along a row.
LANES = 512

# Up to so many sequences, the draft's rows are cut out one by one: for a gather,
# XLA:TPU may copy all of its probabilities to another layout.
MAX_SLICES = 64

LARGEST = float(jnp.finfo(jnp.float32).max)
NO_ID = jnp.iinfo(jnp.int32).max  # of a column that holds no token, or one seen before


class Distribution(NamedTuple):
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
    def whole(self) -> int:
        """Ids held by all devices, pads included."""
        if self.axis_name is None:
            return self.columns
        return self.columns * jax.lax.axis_size(self.axis_name)

    @property
    def lanes(self) -> int:
        """Partial sums that a row keeps."""
        return self.tile if self.tile % LANES else LANES

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

    def ids(
        self, number: Int[Array, " n"], within: Array | int = 0, size: int = 0
    ) -> Int[Array, "n size"]:
        """Ids of each tile's columns; `NO_ID` for pads and for repeated columns.

        Args:
            within: The first column wanted, counted from the tile's first.
            size: How many are wanted; 0 is the whole tile.
        """
        column = jnp.arange(size or self.tile, dtype=jnp.int32)[None]
        column = (self.start(number) + within)[:, None] + column
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

    def rows(
        self, array: Array, row: Array, number: Array, within: Array | int, size: int
    ) -> Float[Array, "n size"]:
        """`size` columns of one row each of an array, from inside a tile on."""

        def read(row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(array, (row, start), (1, size))[0]

        return jax.vmap(read)(row, self.start(number) + within)

    def walk(self, visit: Callable, kept: Any, like: Array) -> Any:
        """Fold `visit(kept, number)` over the tiles.

        Args:
            like: A sharded array. What is kept must be typed, under `shard_map`, as
                varying where it varies; the select does no more than that.
        """
        if self.num_tiles == 1:
            return visit(kept, jnp.int32(0))
        pivot = like.reshape(-1)[0] == 0
        kept = jax.tree.map(lambda leaf: jnp.where(pivot, leaf, leaf), kept)
        body = lambda number, kept: visit(kept, number)  # noqa: E731
        return jax.lax.fori_loop(0, self.num_tiles, body, kept)

    def total(self, visit: Callable, rows: tuple[int, ...], like: Array) -> Array:
        """Sum `visit(number)`, a tile of each of `rows`, over this device's tiles."""
        if self.num_tiles == 1:
            return row_sums(visit(jnp.int32(0)))[..., 0]

        def add(amount: Array, number: Array) -> Array:
            return amount + self.fold(visit(number))

        amount = self.walk(add, jnp.zeros((*rows, self.lanes), jnp.float32), like)
        return row_sums(amount)[..., 0]

    def fold(self, tile: Float[Array, "*batch tile"]) -> Float[Array, "*batch lane"]:
        """Partial sums of a tile."""
        if self.tile == self.lanes:
            return tile
        return tile.reshape(*tile.shape[:-1], -1, self.lanes).sum(axis=-2)

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

    def rows(
        self, part: Slice, index: Array, number: Array, within: Array | int, size: int
    ) -> Float[Array, "seq size"]:
        """`size` columns of one row per sequence, from inside a tile of its own on."""
        if self.probs is None:
            token = jnp.take_along_axis(self.tokens, index[:, None], axis=1)
            return (token == part.ids(number, within, size)).astype(jnp.float32)

        def read(probs: Array, index: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(probs, (index, start), (1, size))[0]

        start = part.start(number) + within
        if index.shape[0] > MAX_SLICES:
            return jax.vmap(read)(self.probs, index, start).astype(jnp.float32)
        columns = [
            jax.lax.dynamic_slice(self.probs, (i, index[i], start[i]), (1, 1, size))
            for i in range(index.shape[0])
        ]
        return jnp.concatenate(columns)[:, 0].astype(jnp.float32)

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


def weigh(
    logits: Float[Array, "row tile"], distribution: Distribution
) -> Float[Array, "row tile"]:
    """Probabilities of a tile, times `distribution.total` (which is not used)."""
    # Differences first: they are exact near the maximum, whose weight is 1 however the
    # expression is fused; quotients of low temperatures are large and rounded.
    return jnp.where(
        logits >= distribution.threshold[:, None],
        jnp.exp(
            (logits - peak(distribution.maximum)[:, None])
            / distribution.temperature[:, None]
        ),
        0.0,
    )


def peak(maximum: Array) -> Array:
    """The maximum, finite where a row has no finite logit: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def normalise(weights: Array, total: Array) -> Array:
    """Probabilities; those of a row without weight are 0."""
    return weights / jnp.where(total > 0, total, 1.0)


def probabilities(
    part: Slice, logits: Float[Array, "row vocab"], distribution: Distribution
) -> Float[Array, "row vocab"]:
    """All probabilities of this device's slice: the one array of its kind."""
    column = jnp.arange(part.columns, dtype=jnp.int32)[None]
    ids = part.offset + column
    ids = jnp.where(ids < part.vocab_size, ids, NO_ID)
    return normalise(
        weigh(clean(logits, ids), distribution), distribution.total[:, None]
    )


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
    is_sampled: Bool[Array, " row"] | None,
) -> Statistics:
    """Maximum, its id, the sum of exp, and one logit, of this device's slice.

    Args:
        is_sampled: Rows whose sum is wanted; without any, sums are 0. None for none,
            which the program need not find out.
    """
    rows = logits.shape[0]
    column, is_held = part.local(tokens)
    drafted = jnp.take_along_axis(logits, column[:, None], axis=1)
    drafted = clean(drafted, jnp.where(is_held, tokens, NO_ID)[:, None])[:, 0]

    def visit(kept: tuple[Array, ...], number: Array, has_sum: bool):
        maximum, at, total = kept
        tile, _ = part.read(logits, number)
        top = tile.max(axis=1)
        at = jnp.where(top > maximum, number, at)
        top = jnp.maximum(top, maximum)
        if has_sum:
            distribution = Distribution(
                temperature, top, jnp.full_like(top, -jnp.inf), top
            )
            total = total * weigh(maximum[:, None], distribution) + part.fold(
                weigh(tile, distribution)
            )
        return top, at, total

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, part.lanes), jnp.float32),
    )

    def walked(has_sum: bool) -> tuple[Array, ...]:
        return part.walk(partial(visit, has_sum=has_sum), start, logits)

    if is_sampled is None:
        maximum, at, total = walked(False)
    else:
        maximum, at, total = jax.lax.cond(
            is_sampled.any(), lambda: walked(True), lambda: walked(False)
        )
    # The first tile with the maximum is read again, for the lowest id that has it.
    every = jnp.arange(rows, dtype=jnp.int32)
    top = part.rows(logits, every, at, 0, part.tile)
    _, best = lowest(clean(top, part.ids(at)), part.ids(at))
    best = jnp.where(best == NO_ID, part.offset, best)
    return Statistics(maximum, best, row_sums(total)[:, 0], drafted)


def combine(part: Slice, own: Statistics, temperature: Array) -> Statistics:
    """Statistics of the whole vocabulary from those of every device."""
    maximum = part.max(own.maximum)
    best = part.min(jnp.where(own.maximum == maximum, own.best, NO_ID))
    distribution = Distribution(
        temperature, maximum, jnp.full_like(maximum, -jnp.inf), own.total
    )
    total = part.sum(own.total * weigh(own.maximum[:, None], distribution)[:, 0])
    return Statistics(maximum, best, total, part.max(own.drafted))


def amounts(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    limits: Float[Array, "row tries"],
    *,
    counts: bool,
) -> Float[Array, "row tries"]:
    """How much of this device's slice is at or above each limit.

    Args:
        counts: Tokens, instead of the weights that the threshold leaves.
    """

    def visit(number: Array) -> Array:
        tile = part.read(logits, number)[0]
        weights = jnp.ones_like(tile) if counts else weigh(tile, distribution)
        is_in = tile[:, None] >= limits[:, :, None]
        return jnp.where(is_in, weights[:, None], 0.0)

    return part.total(visit, limits.shape, logits)


def excess(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    joint: Float[Array, "seq inner"],
) -> Float[Array, "seq inner"]:
    """Sum of max(joint * target - draft, 0) in the rows between the first and last.

    Of this device's slice; `joint` has a column at least.
    """
    seqs, inner = joint.shape

    def visit(number: Array) -> Array:
        weights = weigh(part.read(logits, number)[0], distribution)
        target = normalise(weights, distribution.total[:, None])
        target = target.reshape(seqs, inner + 2, part.tile)[:, 1:-1]
        above = joint[:, :, None] * target - draft.tile(part, number)[:, 1:]
        return jnp.maximum(above, 0.0)

    return part.total(visit, (seqs, inner), logits)


def race(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    words: UInt32[Array, "row 2"],
) -> tuple[Float[Array, " row"], Int[Array, " row"]]:
    """The largest weight / noise of this device's slice, and the lowest id that has it.

    The noise of an id depends on the two words only. Weights are not normalised, so
    that the choice does not depend on how a sum of the vocabulary is ordered, nor on
    the number of devices.
    """

    def visit(kept: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        score, best = kept
        tile, ids = part.read(logits, number)
        noise = exponential(words[:, :1], words[:, 1:], ids)
        top, at = lowest(weigh(tile, distribution) / noise, ids)
        return jnp.maximum(top, score), jnp.where(top > score, at, best)

    rows = logits.shape[0]
    start = jnp.zeros(rows, jnp.float32), jnp.full(rows, part.offset, jnp.int32)
    return part.walk(visit, start, logits)
