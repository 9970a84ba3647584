"""Passes over the vocabulary, one tile at a time, so no array of probabilities exists.

A pass reads every logit once and returns a few numbers per row.
Row `seq * (draft + 1) + i` is target row i of a sequence. Under `shard_map` each device
walks its own slice of the vocabulary, and the devices' results are combined.
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

# Columns per tile on CPU: one loop iteration costs as much as a few thousand columns.
TILE = 4096
# Partial sums per row, added up at the end: XLA:CPU does not vectorise sums along a
# row.
LANES = 512

# Up to this number of sequences the draft's rows are sliced one by one: for a gather,
# XLA:TPU may copy all draft probabilities to another layout.
MAX_SLICES = 64

LARGEST = float(jnp.finfo(jnp.float32).max)
NO_ID = jnp.iinfo(jnp.int32).max  # id of padding, and of a column read twice


class Distribution(NamedTuple):
    """Parameters that turn the logits of a row into probabilities.

    The probability of a logit is 0 below `threshold`, else
    exp((logit - maximum) / temperature) / total.
    """

    temperature: Float[Array, " row"]
    maximum: Float[Array, " row"]
    threshold: Float[Array, " row"]
    total: Float[Array, " row"]


class Statistics(NamedTuple):
    """Result of one pass over unfiltered rows; `best` is the lowest id on ties."""

    maximum: Float[Array, " row"]
    best: Int[Array, " row"]
    total: Float[Array, " row"]
    draft_logit: Float[Array, " row"]  # logit of the row's draft token


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the vocabulary that this device holds, and its tiles.

    Attributes:
        columns: Number of ids that this device holds, including padding.
        vocab_size: Ids at or past it are padding.
        axis_name: Mesh axes that split the vocabulary; None if it is not split.
    """

    columns: int
    tile: int
    vocab_size: int
    axis_name: str | tuple[str, ...] | None

    @property
    def num_tiles(self) -> int:
        """Number of tiles of this device's slice."""
        return -(-self.columns // self.tile)

    @property
    def whole(self) -> int:
        """Number of ids held by all devices, including padding."""
        if self.axis_name is None:
            return self.columns
        return self.columns * jax.lax.axis_size(self.axis_name)

    @property
    def lanes(self) -> int:
        """Number of partial sums per row."""
        return self.tile if self.tile % LANES else LANES

    @property
    def offset(self) -> Array | int:
        """The first id held."""
        return 0 if self.axis_name is None else self.index * self.columns

    @property
    def index(self) -> Array:
        """Index of this device among those that split the vocabulary."""
        assert self.axis_name is not None
        return jax.lax.axis_index(self.axis_name)

    def start(self, number: Int[Array, "*tiles"]) -> Int[Array, "*tiles"]:
        """Return the first column of a tile; the last tile overlaps its neighbour."""
        return jnp.minimum(number * self.tile, self.columns - self.tile)

    def ids(
        self, number: Int[Array, " n"], within: Array | int = 0, size: int = 0
    ) -> Int[Array, "n size"]:
        """Return the ids of tiles' columns; `NO_ID` for padding and repeated columns.

        Args:
            within: First column to return, counted from the tile's first.
            size: Number of columns to return; 0 is the whole tile.
        """
        column = jnp.arange(size or self.tile, dtype=jnp.int32)[None]
        column = (self.start(number) + within)[:, None] + column
        ids = self.offset + column
        is_new = (column >= number[:, None] * self.tile) & (ids < self.vocab_size)
        return jnp.where(is_new, ids, NO_ID)

    def read(
        self, logits: Float[Array, "row vocab"], number: Int[Array, ""]
    ) -> tuple[Float[Array, "row tile"], Int[Array, "1 tile"]]:
        """Return a tile of every row in float32, and its ids; -inf for padding."""
        tile = jax.lax.dynamic_slice_in_dim(logits, self.start(number), self.tile, 1)
        ids = self.ids(number[None])
        return clean(tile, ids), ids

    def rows(
        self, array: Array, row: Array, number: Array, within: Array | int, size: int
    ) -> Float[Array, "n size"]:
        """Return `size` columns of row n for each n, starting `within` a tile."""

        def read(row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(array, (row, start), (1, size))[0]

        return jax.vmap(read)(row, self.start(number) + within)

    def walk(self, visit: Callable, carry: Any, like: Array) -> Any:
        """Fold `visit(carry, number)` over the tiles.

        Args:
            like: A sharded array. Under `shard_map` the carry's type must say that it
                varies over devices; the select below has no other effect.
        """
        if self.num_tiles == 1:
            return visit(carry, jnp.int32(0))
        pivot = like.reshape(-1)[0] == 0
        carry = jax.tree.map(lambda leaf: jnp.where(pivot, leaf, leaf), carry)
        body = lambda number, carry: visit(carry, number)  # noqa: E731
        return jax.lax.fori_loop(0, self.num_tiles, body, carry)

    def total(self, visit: Callable, rows: tuple[int, ...], like: Array) -> Array:
        """Sum `visit(number)`, [*rows, tile], over the tiles and their columns."""
        if self.num_tiles == 1:
            return row_sums(visit(jnp.int32(0)))[..., 0]

        def add(sums: Array, number: Array) -> Array:
            return sums + self.fold(visit(number))

        sums = self.walk(add, jnp.zeros((*rows, self.lanes), jnp.float32), like)
        return row_sums(sums)[..., 0]

    def fold(self, tile: Float[Array, "*batch tile"]) -> Float[Array, "*batch lane"]:
        """Return partial sums of a tile."""
        if self.tile == self.lanes:
            return tile
        return tile.reshape(*tile.shape[:-1], -1, self.lanes).sum(axis=-2)

    def local(self, tokens: Int[Array, "*batch"]) -> tuple[Array, Array]:
        """Return the tokens' columns in this slice, and whether the slice has them."""
        column = tokens - self.offset
        is_held = (column >= 0) & (column < self.columns) & (tokens < self.vocab_size)
        return jnp.clip(column, 0, self.columns - 1), is_held

    def psum(self, values: Array) -> Array:
        """Return the sum over devices."""
        return values if not self.axis_name else jax.lax.psum(values, self.axis_name)

    def pmax(self, values: Array) -> Array:
        """Return the maximum over devices."""
        return values if not self.axis_name else jax.lax.pmax(values, self.axis_name)

    def pmin(self, values: Array) -> Array:
        """Return the minimum over devices."""
        return values if not self.axis_name else jax.lax.pmin(values, self.axis_name)


class Draft(NamedTuple):
    """Draft tokens and their probabilities; None if each is a point mass."""

    tokens: Int[Array, "seq draft"]
    probs: Float[Array, "seq draft vocab"] | None

    def tile(self, shard: VocabShard, number: Array) -> Float[Array, "seq draft tile"]:
        """Return a tile of every row."""
        if self.probs is None:
            is_token = self.tokens[:, :, None] == shard.ids(number[None])[None]
            return is_token.astype(jnp.float32)
        start = shard.start(number)
        tile = jax.lax.dynamic_slice_in_dim(self.probs, start, shard.tile, 2)
        return tile.astype(jnp.float32)

    def rows(
        self,
        shard: VocabShard,
        index: Array,
        number: Array,
        within: Array | int,
        size: int,
    ) -> Float[Array, "seq size"]:
        """Return `size` columns of one row per sequence, starting `within` a tile."""
        if self.probs is None:
            token = jnp.take_along_axis(self.tokens, index[:, None], axis=1)
            return (token == shard.ids(number, within, size)).astype(jnp.float32)

        def read(probs: Array, index: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice(probs, (index, start), (1, size))[0]

        start = shard.start(number) + within
        if index.shape[0] > MAX_SLICES:
            return jax.vmap(read)(self.probs, index, start).astype(jnp.float32)
        columns = [
            jax.lax.dynamic_slice(self.probs, (i, index[i], start[i]), (1, 1, size))
            for i in range(index.shape[0])
        ]
        return jnp.concatenate(columns)[:, 0].astype(jnp.float32)

    def token_probs(self, shard: VocabShard) -> Float[Array, "seq draft"]:
        """Return the probability of each draft token."""
        if self.probs is None:
            return jnp.ones(self.tokens.shape, jnp.float32)
        column, is_held = shard.local(self.tokens)
        probs = jnp.take_along_axis(self.probs, column[:, :, None], axis=2)[:, :, 0]
        return shard.psum(jnp.where(is_held, probs.astype(jnp.float32), 0.0))


def clean(logits: Array, ids: Array) -> Array:
    """Return logits as float32; NaN, padding and repeated columns become -inf."""
    logits = jnp.minimum(logits.astype(jnp.float32), LARGEST)
    return jnp.where(jnp.isnan(logits) | (ids == NO_ID), -jnp.inf, logits)


def to_weights(
    logits: Float[Array, "row tile"], distribution: Distribution
) -> Float[Array, "row tile"]:
    """Return the unnormalised probabilities of a tile; `total` is not read."""
    # Subtract first: differences are exact near the maximum, so its weight is 1 however
    # XLA fuses this; quotients by a low temperature are large and rounded.
    return jnp.where(
        logits >= distribution.threshold[:, None],
        jnp.exp(
            (logits - safe_max(distribution.maximum)[:, None])
            / distribution.temperature[:, None]
        ),
        0.0,
    )


def safe_max(maximum: Array) -> Array:
    """Replace a maximum of -inf by 0, as -inf - -inf would be NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def normalise(weights: Array, total: Array) -> Array:
    """Divide weights by their sum; a row without weight yields 0."""
    return weights / jnp.where(total > 0, total, 1.0)


def probabilities(
    shard: VocabShard, logits: Float[Array, "row vocab"], distribution: Distribution
) -> Float[Array, "row vocab"]:
    """Return all probabilities of this device's slice (only `sample` needs them)."""
    column = jnp.arange(shard.columns, dtype=jnp.int32)[None]
    ids = shard.offset + column
    ids = jnp.where(ids < shard.vocab_size, ids, NO_ID)
    return normalise(
        to_weights(clean(logits, ids), distribution), distribution.total[:, None]
    )


def lowest(values: Float[Array, "row tile"], ids: Array) -> tuple[Array, Array]:
    """Return the largest value of each row, and the lowest id that has it."""
    best = values.max(axis=1)
    index = jnp.where(values == best[:, None], ids, NO_ID).min(axis=1)
    return best, index


def statistics(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
    is_sampled: Bool[Array, " row"] | None,
) -> Statistics:
    """Return maximum, its id, sum of exp, and one logit, for this device's slice.

    Args:
        is_sampled: Rows that need the sum; if no row does, sums are 0. None: no row
            does, known when the program is compiled.
    """
    rows = logits.shape[0]
    column, is_held = shard.local(tokens)
    draft_logit = jnp.take_along_axis(logits, column[:, None], axis=1)
    draft_logit = clean(draft_logit, jnp.where(is_held, tokens, NO_ID)[:, None])[:, 0]

    def visit(carry: tuple[Array, ...], number: Array, has_sum: bool):
        maximum, at, total = carry
        tile, _ = shard.read(logits, number)
        top = tile.max(axis=1)
        at = jnp.where(top > maximum, number, at)
        top = jnp.maximum(top, maximum)
        if has_sum:
            distribution = Distribution(
                temperature, top, jnp.full_like(top, -jnp.inf), top
            )
            total = total * to_weights(maximum[:, None], distribution) + shard.fold(
                to_weights(tile, distribution)
            )
        return top, at, total

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, shard.lanes), jnp.float32),
    )

    def walked(has_sum: bool) -> tuple[Array, ...]:
        return shard.walk(partial(visit, has_sum=has_sum), start, logits)

    if is_sampled is None:
        maximum, at, total = walked(False)
    else:
        maximum, at, total = jax.lax.cond(
            is_sampled.any(), lambda: walked(True), lambda: walked(False)
        )
    # Read the first tile that contains the maximum again, to find the lowest id that
    # has it.
    every = jnp.arange(rows, dtype=jnp.int32)
    top = shard.rows(logits, every, at, 0, shard.tile)
    _, best = lowest(clean(top, shard.ids(at)), shard.ids(at))
    best = jnp.where(best == NO_ID, shard.offset, best)
    return Statistics(maximum, best, row_sums(total)[:, 0], draft_logit)


def combine(shard: VocabShard, local: Statistics, temperature: Array) -> Statistics:
    """Combine the devices' statistics into those of the whole vocabulary."""
    maximum = shard.pmax(local.maximum)
    best = shard.pmin(jnp.where(local.maximum == maximum, local.best, NO_ID))
    distribution = Distribution(
        temperature, maximum, jnp.full_like(maximum, -jnp.inf), local.total
    )
    total = shard.psum(
        local.total * to_weights(local.maximum[:, None], distribution)[:, 0]
    )
    return Statistics(maximum, best, total, shard.pmax(local.draft_logit))


def mass_above(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    limits: Float[Array, "row tries"],
    *,
    counts: bool,
) -> Float[Array, "row tries"]:
    """Sum the weights of the logits at or above each limit, in this device's slice.

    Args:
        counts: Count tokens (also those below the threshold) instead.
    """

    def visit(number: Array) -> Array:
        tile = shard.read(logits, number)[0]
        weights = jnp.ones_like(tile) if counts else to_weights(tile, distribution)
        is_above = tile[:, None] >= limits[:, :, None]
        return jnp.where(is_above, weights[:, None], 0.0)

    return shard.total(visit, limits.shape, logits)


def residual_mass(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    joint: Float[Array, "seq inner"],
) -> Float[Array, "seq inner"]:
    """Sum max(joint * target - draft, 0) over this device's slice, for inner rows.

    Inner rows are all target rows of a sequence but the first and last; there must be
    at least one.
    """
    seqs, inner = joint.shape

    def visit(number: Array) -> Array:
        weights = to_weights(shard.read(logits, number)[0], distribution)
        target = normalise(weights, distribution.total[:, None])
        target = target.reshape(seqs, inner + 2, shard.tile)[:, 1:-1]
        above = joint[:, :, None] * target - draft.tile(shard, number)[:, 1:]
        return jnp.maximum(above, 0.0)

    return shard.total(visit, (seqs, inner), logits)


def gumbel_argmax(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    words: UInt32[Array, "row 2"],
) -> tuple[Float[Array, " row"], Int[Array, " row"]]:
    """Sample with shared noise: the largest weight / noise, and the lowest id of it.

    Exponential noise makes this the Gumbel-max trick. The noise depends only on the two
    words and the id. Weights are not normalised, so the choice depends neither on the
    order of a sum over the vocabulary nor on the number of devices.
    """

    def visit(carry: tuple[Array, Array], number: Array) -> tuple[Array, Array]:
        score, best = carry
        tile, ids = shard.read(logits, number)
        noise = exponential(words[:, :1], words[:, 1:], ids)
        top, at = lowest(to_weights(tile, distribution) / noise, ids)
        return jnp.maximum(top, score), jnp.where(top > score, at, best)

    rows = logits.shape[0]
    start = jnp.zeros(rows, jnp.float32), jnp.full(rows, shard.offset, jnp.int32)
    return shard.walk(visit, start, logits)
