"""Paged attention in Triton, through Pallas: flash decoding.

Grid: (row tile and sequence, KV head, split). One program folds the queries of a
sequence with the query heads of one KV head into the rows of a matrix product, walks an
equal share of the keys that these rows see, and keeps the softmax statistics and the
mixed values in registers (float32). It looks up each page itself and loads visible
slots only: pages before the window or past the end cost nothing and may hold NaN. A
second kernel adds up the splits of a row, weighted by their log-sum-exp.

The grid, the tiles and the number of splits depend on shapes and the kind of device.
The shares of keys depend on lengths, so that all programs of a sequence are busy for
any context.

Passing Triton's `CompilerParams` selects Triton, whatever jax prefers on GPU. From jax
0.11 on it is deprecated: lowering emits a DeprecationWarning, which Python hides by
default; where warnings are errors, filter it. Its successor, Mosaic GPU, cannot be
interpreted on CPU, so its numbers could not be tested without a GPU.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.bits import FP8, KvPages, ScaledPages, check_scales
from jaxspec_kernels.paged_attention.gpu_tiles import (
    MIN_ROWS,
    Tiles,
    choose_tiles,
    gpu_of,
    power_of_two,
    product_dtype,
)
from jaxspec_kernels.paged_attention.tree_bits import WORD, pack_tree

_MASKED = -1e30  # finite: exp2(_MASKED - _MASKED) must not be NaN in a row without keys
_LOG2_E = math.log2(math.e)  # statistics use base 2, which the hardware computes


def _attend(
    *refs: Any,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    tiles: Tiles,
):
    (
        # In
        query_ref,  # [seq, token, q_head, head_dim]
        pages_ref,  # [page, page_size, 2 * kv_head, head_dim]
        scales_ref,  # f32[page, page_size, 2 * kv_head], int8 pages only
        table_ref,  # i32[seq, table]
        kv_len_ref,  # i32[seq]
        depth_ref,  # i32[seq, token], trees only
        words_ref,  # i32[seq, token, word], trees only: see `pack_tree`
        # Out
        mixed_ref,  # [split, seq, token, q_head, head_dim]
        lse_ref,  # f32[split, seq, token, q_head]
    ) = refs
    _, queries, q_heads, head_dim = query_ref.shape
    page_size, kv_heads = pages_ref.shape[1], pages_ref.shape[2] // 2
    group = q_heads // kv_heads
    row_tiles = pl.cdiv(queries * group, tiles.rows)
    seq, tile = pl.program_id(0) // row_tiles, pl.program_id(0) % row_tiles
    kv_head, split = pl.program_id(1), pl.program_id(2)
    dtype = product_dtype(query_ref.dtype, pages_ref.dtype)
    # IEEE float32 products: TF32 keeps only the mantissa bits of float16.
    dot = functools.partial(
        plgpu.dot,
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    )

    row = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    token, head = row // group, kv_head * group + row % group
    lane = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)
    row_at = (seq, token[:, None], head[:, None], lane[None, :])
    row_live = (token < queries)[:, None] & (lane < head_dim)[None, :]
    query = plgpu.load(query_ref.at[row_at], mask=row_live, other=0.0).astype(dtype)

    # Keys [begin, end) are seen by some row of the tile.
    start = plgpu.load(kv_len_ref.at[seq]) - queries
    end = jnp.minimum(start + queries, table_ref.shape[1] * page_size)
    if words_ref is None:
        words, position = [], start + token
        lowest = start + tile * tiles.rows // group
        end = jnp.minimum(end, start + ((tile + 1) * tiles.rows - 1) // group + 1)
    else:
        words = [
            plgpu.load(words_ref.at[seq, token, number], mask=token < queries, other=0)
            for number in range(words_ref.shape[2])
        ]
        depth = plgpu.load(depth_ref.at[seq, token], mask=token < queries, other=0)
        position, lowest = start + depth, start
    begin = jnp.zeros_like(start)
    if window is not None:
        begin = jnp.maximum(lowest - window + 1, 0)
    num_blocks = jnp.maximum(pl.cdiv(end - begin, tiles.keys), 0)
    first = split * num_blocks // tiles.splits
    last = (split + 1) * num_blocks // tiles.splits

    nothing = jnp.zeros((), pages_ref.dtype)

    def scale_of(page: Array, at: Array, head: Array, live: Array) -> Array:
        place = scales_ref.at[page, at % page_size, head]
        return plgpu.load(place, mask=live, other=0.0)

    def visit(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        maximum, total, mixed = carry
        at = begin + block * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        live = at < end
        page = plgpu.load(table_ref.at[seq, at // page_size], mask=live, other=0)
        where = (page[:, None], (at % page_size)[:, None])
        mask = live[:, None] & (lane < head_dim)[None, :]
        rows = (*where, 2 * kv_head, lane[None, :])
        key = plgpu.load(pages_ref.at[rows], mask=mask, other=nothing)
        rows = (*where, 2 * kv_head + 1, lane[None, :])
        value = plgpu.load(pages_ref.at[rows], mask=mask, other=nothing)

        scores = dot(query, key.astype(dtype), trans_b=True)
        if scales_ref is not None:
            scores = scores * scale_of(page, at, 2 * kv_head, live)[None, :]
        if soft_cap is None:
            scores = scores * (scale * _LOG2_E)
        else:
            scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2_E)
        distance = position[:, None] - at[None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if words_ref is not None:
            # In a tree, the ancestor bits already exclude tokens outside the window.
            node = at - start
            visible &= (node < 0)[None, :]
            for number, word in enumerate(words):
                bit = (word[:, None] >> (node % WORD)[None, :]) & 1
                visible |= (node // WORD == number)[None, :] & (bit == 1)
        visible &= live[None, :]
        scores = jnp.where(visible, scores, _MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        weights = jnp.exp2(scores - new_maximum[:, None])
        weights = jnp.where(visible, weights, 0.0)
        rescale = jnp.exp2(maximum - new_maximum)
        total = total * rescale + weights.sum(axis=1)
        value = value.astype(dtype)
        if scales_ref is not None:
            weights *= scale_of(page, at, 2 * kv_head + 1, live)[None, :]
        mixed = mixed * rescale[:, None] + dot(weights.astype(dtype), value)
        return new_maximum, total, mixed

    carry = (
        jnp.full((tiles.rows,), _MASKED, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
        jnp.zeros((tiles.rows, lane.size), jnp.float32),
    )
    maximum, total, mixed = jax.lax.fori_loop(first, last, visit, carry)
    empty = total == 0.0
    lse = jnp.where(empty, _MASKED, maximum + jnp.log2(jnp.where(empty, 1.0, total)))
    mixed = mixed / jnp.where(empty, 1.0, total)[:, None]
    plgpu.store(lse_ref.at[split, seq, token, head], lse, mask=token < queries)

    # An empty split is marked in `lse`; its values are neither written nor read.
    @pl.when((last > first) | (tiles.splits == 1))
    def _write():
        plgpu.store(
            mixed_ref.at[split, *row_at], mixed.astype(mixed_ref.dtype), mask=row_live
        )


def _combine(
    # In
    mixed_ref: Any,  # f32[split, seq, token, q_head, head_dim]
    lse_ref: Any,  # f32[split, seq, token, q_head]
    # Out
    result_ref: Any,  # [seq, token, q_head, head_dim]
    *,
    lanes: int,
):
    splits, _, queries, _, head_dim = mixed_ref.shape
    seq, token = pl.program_id(0) // queries, pl.program_id(0) % queries
    head = pl.program_id(1)
    split = jnp.arange(power_of_two(splits, least=1), dtype=jnp.int32)
    lane = pl.program_id(2) * lanes + jnp.arange(lanes, dtype=jnp.int32)
    lse = plgpu.load(
        lse_ref.at[split, seq, token, head], mask=split < splits, other=_MASKED
    )
    weights = jnp.exp2(lse - lse.max())
    filled = (lse > _MASKED)[:, None] & (lane < head_dim)[None, :]
    rows = (split[:, None], seq, token, head, lane[None, :])
    mixed = plgpu.load(mixed_ref.at[rows], mask=filled, other=0.0)
    mixed = (mixed * weights[:, None]).sum(axis=0) / weights.sum()
    plgpu.store(
        result_ref.at[seq, token, head, lane],
        mixed.astype(result_ref.dtype),
        mask=lane < head_dim,
    )


def paged_attention(
    query: Float[Array, "seq token q_head head_dim"],
    kv_pages: KvPages,
    page_table: Int[Array, "seq table"],
    kv_len: Int[Array, " seq"],
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    ancestor_mask: Bool[Array, "seq token token"] | None,
    tiles: Tiles | None = None,
    device_kind: str | None = None,
    interpret: bool = False,
) -> Float[Array, "seq token q_head head_dim"]:
    """See `jaxspec_kernels.paged_attention`; `tiles` overrides `choose_tiles`.

    Two queries at the same position return the same result only up to rounding: the
    shares of the splits depend on the context.

    Raises:
        NotImplementedError: Pages of a type that is not among `floats` below, nor int8
            with scales.
    """
    check_scales(kv_pages, in_lanes=False)
    is_scaled = isinstance(kv_pages, ScaledPages)
    floats = (jnp.bfloat16, jnp.float16, jnp.float32, FP8)
    if not is_scaled and kv_pages.dtype not in floats:
        raise NotImplementedError(
            "paged attention on GPU reads pages of bfloat16, float16, float32 or "
            f"float8_e4m3fn, or `ScaledPages`, not {kv_pages.dtype}; uint16 and "
            "uint8 pages are for XLA:CPU only, see "
            "`jaxspec_kernels.bits.storage_dtype`"
        )
    seqs, queries, q_heads, head_dim = query.shape
    if tiles is None:
        tiles = choose_tiles(
            query.shape,
            kv_pages.shape,
            table=page_table.shape[1],
            itemsize=product_dtype(query.dtype, kv_pages.dtype).itemsize,
            window=window,
            is_tree=ancestor_mask is not None,
            gpu=gpu_of(device_kind),
        )
    kv_heads = kv_pages.shape[2] // 2
    row_tiles = pl.cdiv(queries * q_heads // kv_heads, tiles.rows)
    tree = (None, None)
    if ancestor_mask is not None:
        tree = pack_tree(ancestor_mask, window)
    partial_dtype = query.dtype if tiles.splits == 1 else jnp.dtype(jnp.float32)
    mixed, lse = pl.pallas_call(
        functools.partial(
            _attend, scale=scale, soft_cap=soft_cap, window=window, tiles=tiles
        ),
        grid=(row_tiles * seqs, kv_heads, tiles.splits),
        out_shape=(
            jax.ShapeDtypeStruct((tiles.splits, *query.shape), partial_dtype),
            jax.ShapeDtypeStruct((tiles.splits, *query.shape[:3]), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiles.num_warps, num_stages=tiles.num_stages
        ),
        interpret=interpret,
        name="paged_attention",
    )(
        query,
        *((kv_pages.values, kv_pages.scales) if is_scaled else (kv_pages, None)),
        page_table.astype(jnp.int32),
        kv_len.astype(jnp.int32),
        *tree,
    )
    if tiles.splits == 1:
        return mixed[0]
    # All splits at once, 64 values per thread; a loop would wait for each split.
    lanes = max(MIN_ROWS, 8192 // power_of_two(tiles.splits))
    lanes = min(lanes, power_of_two(head_dim))
    return pl.pallas_call(
        functools.partial(_combine, lanes=lanes),
        grid=(seqs * queries, q_heads, pl.cdiv(head_dim, lanes)),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(mixed, lse)
