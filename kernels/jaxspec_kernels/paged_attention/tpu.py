"""Paged attention for TPU, in Pallas (Mosaic).

Grid: one step per sequence, in order. Pages stay in HBM; a step walks blocks of whole
pages, all KV heads at once, from the first page that the earliest query's window
reaches to the last live one. Two block buffers alternate: while one is used, the next
block is copied into the other, also from one sequence to the next. No other page is
copied.

SMEM: page table, lengths and bounds (scalar prefetch). If the page table is too large
for SMEM, a loop calls the kernel for some of the sequences at a time. VMEM: the two
buffers, two more for scales, the queries of a sequence as `[kv_head, token * group,
head_dim]`, and per row the float32 running maximum, sum and output.

A block is used as `[token, 2 * kv_head * head_dim]`, so that a head's keys or values
are a slice of lanes. Mosaic rejects strided loads over rows of 256 lanes; it compiles
this reshape for every head_dim.

The scales of int8 pages are copied together with the pages. Those of a page are in rows
of 128 lanes, head by head. For a block, rolls and a sum over sublanes whose other terms
are zero arrange them in one row of lanes per head; scores are multiplied by the scales
of keys, weights by those of values. So a NaN affects its own token only.

A pool of head_dim 64 works but is expensive: XLA stores it with the pages in the lanes
and copies it whole for the kernel, unless the program's argument has the row-major
layout (`jax.experimental.layout`), in which half of every tile is padding.

Only one of the two cores of a v5p chip is used: the buffers pass from one sequence to
the next, so the grid cannot be split.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.bits import FP8, LANES, KvPages, ScaledPages, check_scales
from jaxspec_kernels.paged_attention.reference import fold, unfold
from jaxspec_kernels.paged_attention.tree_bits import WORD, WORD_SHIFT, pack_tree
from jaxspec_kernels.tpu_memory import SMEM_BYTES, check_vmem

# Bytes of one block of keys and values: enough that a copy hides its latency, few
# enough that two blocks and the compiler's own memory stay far below the 16 MiB that a
# kernel gets on v5e.
BLOCK_BYTES = 2**20
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 128, 512  # lanes of a tile; unrolled code

# Bytes of a page table in SMEM. The rest is for lengths, bounds, and the compiler.
MAX_TABLE_BYTES = 3 * SMEM_BYTES // 4

_MASKED = -1e30  # finite: exp(_MASKED - _MASKED) must not be NaN in a row without keys


def copy_page(source: Any, target: Any, semaphore: Any) -> Any:
    """Return the copy of one page from HBM to VMEM, not started; tests count starts."""
    return pltpu.make_async_copy(source, target, semaphore)


def _kernel(
    *refs: Any,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    num_queries: int,
    has_tree: bool,
    is_scaled: bool,
) -> None:
    count = 1 + is_scaled
    (
        # Scalar prefetch
        page_table,  # i32[seq, table]
        kv_len,  # i32[seq]
        lowest,  # i32[seq]: first visible position
        first_page,  # i32[seq]
        end_page,  # i32[seq]; equal to first_page if nothing is visible
        next_busy,  # i32[seq + 1]: first sequence from here on with visible keys
        # In
        query,  # [1, kv_head, row, head_dim]
        places,  # i32[1, row, 1], or i32[1, 1 + word, query] for trees: see `_places`
        *rest,
    ) = refs
    # In HBM: [page, page_size, 2 * kv_head, head_dim], and scales f32[page, 1, lane]
    pools, rest = rest[:count], rest[count:]
    # Out
    out, *rest = rest  # [1, kv_head, row, head_dim]
    # Scratch: [2, block_page, page_size, 2 * kv_head, head_dim], and two of scales
    (buffers, *scale_buffers), rest = rest[:count], rest[count:]
    (
        arrived,  # 2 DMA semaphores
        next_slot,  # i32[1]: the buffer that the next block is or will be in
        maximum,  # f32[kv_head, row, 1]
        total,  # f32[kv_head, row, 1]
        mixed,  # f32[kv_head, row, head_dim]
    ) = rest
    _, block_pages, page_size, two_kv_heads, head_dim = buffers.shape
    block = block_pages * page_size
    num_seqs = pl.num_programs(0)
    seq = pl.program_id(0)
    num_rows = query.shape[2]
    columns = []
    if has_tree:
        numbers = (places[0, at : at + 1] for at in range(places.shape[1]))
        columns = [_by_row(one, num_rows) for one in numbers]

    def each_page(of_seq: Array, number: Array, slot: Array, act: str) -> None:
        start = first_page[of_seq] + number * block_pages
        live = jnp.minimum(end_page[of_seq] - start, block_pages)

        def one(at: Array, _: None) -> None:
            page = page_table[of_seq, start + at]
            for pool, buffer in zip(pools, (buffers, *scale_buffers), strict=True):
                copy = copy_page(pool.at[page], buffer.at[slot, at], arrived.at[slot])
                getattr(copy, act)()

        jax.lax.fori_loop(0, live, one, None)

    @pl.when(seq == 0)
    def _():
        next_slot[0] = 0

        @pl.when(next_busy[0] < num_seqs)
        def _():
            each_page(next_busy[0], jnp.int32(0), jnp.int32(0), "start")

    maximum[...] = jnp.full_like(maximum, _MASKED)
    total[...] = jnp.zeros_like(total)
    mixed[...] = jnp.zeros_like(mixed)
    length = kv_len[seq]
    start = length - num_queries  # position of the first query, may be negative
    # Slots past the last page were not copied.
    limit = jnp.minimum(length, end_page[seq] * page_size)
    num_blocks = pl.cdiv(end_page[seq] - first_page[seq], block_pages)

    def visible(base: Array) -> Array:
        shape = (num_rows, block)
        key = base + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        depth = columns[0] if has_tree else places[0]
        position = jnp.broadcast_to(start + depth, shape)
        seen = key <= position
        if has_tree:
            seen, node = key < start, key - start
            for number, word in enumerate(columns[1:]):
                bit = (word >> (node & (WORD - 1))) & 1
                seen |= (node >> WORD_SHIFT == number) & (bit == 1)
        if window is not None:
            near = position - key < window
            # The tree's mask includes the window, as a slot in it is not a position.
            seen &= near | (key >= start) if has_tree else near
        return seen & (key < limit)

    def visit(number: Array, slot: Array) -> Array:
        is_last = number + 1 == num_blocks
        following = jnp.where(is_last, next_busy[seq + 1], seq)

        @pl.when(following < num_seqs)
        def _():
            each_page(following, jnp.where(is_last, 0, number + 1), 1 - slot, "start")

        each_page(seq, number, slot, "wait")
        base = (first_page[seq] + number * block_pages) * page_size

        # A slot that no query sees may hold NaN, and 0 * NaN is NaN.
        if not is_scaled:

            @pl.when((base < lowest[seq]) | (base + block > limit))
            def _():
                shape = buffers.shape[1:]
                at = base + page_size * jax.lax.broadcasted_iota(jnp.int32, shape, 0)
                at += jax.lax.broadcasted_iota(jnp.int32, shape, 1)
                kept = (at >= lowest[seq]) & (at < limit)
                kv = buffers[slot]
                buffers[slot] = jnp.where(kept, kv, jnp.zeros_like(kv))

        kv = buffers[slot]
        if kv.dtype in (FP8, jnp.int8):
            # The query's type holds all int8 numbers exactly.
            kv = kv.astype(query.dtype)
        kv = kv.reshape(block, two_kv_heads * head_dim)
        seen = visible(base)
        scales: list[Array] = []
        if is_scaled:
            pages = scale_buffers[0].at[slot]
            scales = _by_head(pages, two_kv_heads, page_size, block_pages)
        for head in range(two_kv_heads // 2):
            lane = 2 * head * head_dim
            key = kv[:, lane : lane + head_dim]
            value = kv[:, lane + head_dim : lane + 2 * head_dim]
            scores = _scores(query[0, head], key) * scale
            if is_scaled:
                scores *= scales[2 * head]
            if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            scores = jnp.where(seen, scores, _MASKED)
            old_maximum = maximum[head]
            new_maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_maximum), 0.0)
            rescale = jnp.exp(old_maximum - new_maximum)
            maximum[head] = new_maximum
            total[head] = total[head] * rescale + weights.sum(axis=1, keepdims=True)
            if is_scaled:
                # Mask again: the scale of a slot that no query sees may be NaN.
                weights = jnp.where(seen, weights * scales[2 * head + 1], 0.0)
            mixed[head] = mixed[head] * rescale + _mix(weights, value)
        return 1 - slot

    next_slot[0] = jax.lax.fori_loop(0, num_blocks, visit, next_slot[0])
    divisor = jnp.where(total[...] > 0, total[...], 1.0)
    out[0] = (mixed[...] / divisor).astype(out.dtype)


def _by_head(
    pages: Any, two_kv_heads: int, page_size: int, num_pages: int
) -> list[Array]:
    """Return the scales of a block's tokens, f32[1, block] for each row of heads.

    Args:
        pages: f32[page, 1, lane], pages to fill rows of lanes. Pages that were not
            copied may hold anything: no query sees their tokens.
    """
    if page_size >= LANES:
        by_page = [pages[page : page + 1, 0, :] for page in range(num_pages)]
        starts = range(0, two_kv_heads * page_size, page_size)
        return [
            jnp.concatenate([row[:, at : at + page_size] for row in by_page], axis=1)
            for at in starts
        ]
    # Heads per row of lanes, and pages per row of the result.
    group = LANES // page_size
    shift = page_size.bit_length() - 1
    by_head = []
    for first in range(0, two_kv_heads, group):
        # With groups of 2, heads A and B of pages 0 and 1:
        #   in [A0 B0, A1 B1] -> rolled [A0 B0, B1 A1] -> A [A0 -, - A1], B [B0 -, - B1]
        row = pages[:, 0, first * page_size : first * page_size + LANES]
        page = jax.lax.broadcasted_iota(jnp.int32, row.shape, 0) & (group - 1)
        lane = jax.lax.broadcasted_iota(jnp.int32, row.shape, 1)
        # Roll page p by p places, one bit of p at a time.
        for bit in range(group.bit_length() - 1):
            is_rolled = (page >> bit) & 1 == 1
            row = jnp.where(is_rolled, pltpu.roll(row, page_size << bit, 1), row)
        for head in range(min(group, two_kv_heads - first)):
            head_scales = pltpu.roll(row, -head * page_size % LANES, 1)
            head_scales = jnp.where(lane >> shift == page, head_scales, 0.0)
            tiles = [
                head_scales[at : at + group].sum(axis=0, keepdims=True)
                for at in range(0, row.shape[0], group)
            ]
            scales = jnp.concatenate(tiles, axis=1)
            by_head.append(scales[:, : num_pages * page_size])
    return by_head


def _by_row(numbers: Array, num_rows: int) -> Array:
    """Expand one number per query to a column with one per row, i32[row, 1].

    Mosaic cannot index a vector. Instead, all entries but one are set to 0 and the
    vector is summed over lanes; in halves, as float32 holds 24 bits.
    """
    shape = num_rows, numbers.shape[1]
    group = num_rows // numbers.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    first = group * jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    is_own = (first <= row) & (row < first + group)

    def half(bits: Array) -> Array:
        own = jnp.where(is_own, bits & 0xFFFF, 0).astype(jnp.float32)
        return own.sum(axis=1, keepdims=True).astype(jnp.int32)

    return half(numbers) | (half(numbers >> 16) << 16)


def _dot(left: Array, right: Array, dimension: int) -> Array:
    """Multiply over `left`'s lanes and a dimension of `right`, in float32."""
    exact = left.dtype == jnp.bfloat16  # one pass of the MXU is exact
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (dimension,)), ((), ())),
        precision=None if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _scores(query: Array, key: Array) -> Array:
    if query.dtype != key.dtype:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    return _dot(query, key, 1)


def _mix(weights: Array, value: Array) -> Array:
    if value.dtype != jnp.bfloat16:
        return _dot(weights, value, 0)
    # Two bf16 halves keep 16 bits of a weight, and cost one more pass over few rows.
    high = weights.astype(jnp.bfloat16)
    low = (weights - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return _dot(high, value, 0) + _dot(low, value, 0)


def default_block_tokens(kv_pages: KvPages, capacity: int) -> int:
    """Return the tokens per block for calls without a tuned size.

    Args:
        capacity: Tokens that a row of the page table can hold.
    """
    token_bytes = (
        kv_pages.shape[2] * _tiles(kv_pages.shape[3]) * kv_pages.dtype.itemsize
    )
    tokens = BLOCK_BYTES // token_bytes // LANES * LANES
    tokens = min(max(tokens, MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS)
    return min(tokens, _tiles(capacity))


def _tiles(lanes: int) -> int:
    return -(-lanes // LANES) * LANES


def _walks(
    kv_len: Int[Array, " seq"],
    page_table: Int[Array, "seq table"],
    *,
    page_size: int,
    lowest: Int[Array, " seq"],
) -> tuple[Array, ...]:
    """Return the scalar-prefetched arguments: which pages to read, in which order."""
    num_seqs = kv_len.shape[0]
    end_page = jnp.minimum(-(-kv_len // page_size), page_table.shape[1])
    first_page = jnp.minimum(lowest // page_size, end_page)
    seq = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    busy = jnp.append(first_page < end_page, True)
    next_busy = jax.lax.cummin(jnp.where(busy, seq, num_seqs), reverse=True)
    return page_table, kv_len, lowest, first_page, end_page, next_busy


def _check(query: Array, kv_pages: KvPages) -> None:
    check_scales(kv_pages, in_lanes=True)
    is_scaled = isinstance(kv_pages, ScaledPages)
    if kv_pages.dtype in (jnp.uint16, jnp.uint8):
        raise NotImplementedError(
            f"{kv_pages.dtype} pages are for XLA:CPU only; on TPU, pages have the "
            "real type: create them with storage_dtype(dtype, 'tpu')"
        )
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(
            f"query of type {query.dtype}: the TPU kernel takes bfloat16 and float32"
        )
    if not is_scaled and kv_pages.dtype not in (jnp.bfloat16, jnp.float32, FP8):
        raise NotImplementedError(
            f"kv_pages of type {kv_pages.dtype}: the TPU kernel reads bfloat16, "
            "float32, float8_e4m3fn and `ScaledPages`"
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
    block_tokens: int | None = None,
    device_kind: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "seq token q_head head_dim"]:
    """See `jaxspec_kernels.paged_attention`.

    Args:
        block_tokens: Tokens copied and used at once, rounded to pages.
        interpret: Run in Pallas' interpreter.

    Raises:
        NotImplementedError: The query is neither bfloat16 nor float32, or pages are
            neither of these nor float8_e4m3fn, nor int8 with scales in lanes; or the
            kernel does not fit the memories of a TPU.
    """
    _check(query, kv_pages)
    settings: dict[str, Any] = dict(
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        block_tokens=block_tokens,
        device_kind=device_kind,
        interpret=interpret,
    )
    arrays = query, page_table, kv_len, ancestor_mask
    num_seqs, max_seqs = query.shape[0], _max_seqs(page_table.shape)
    if num_seqs <= max_seqs:
        return _attend(kv_pages, *arrays, **settings)
    # In groups of equal size; sequences that fill up the last group have no tokens.
    num_groups = -(-num_seqs // max_seqs)
    size = -(-num_seqs // num_groups)

    def grouped(array: Array) -> Array:
        padding = [(0, num_groups * size - num_seqs)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(num_groups, size, *array.shape[1:])

    groups = jax.tree.map(grouped, arrays)
    attend = functools.partial(_attend, kv_pages, **settings)
    out = jax.lax.map(lambda group: attend(*group), groups)
    return out.reshape(-1, *query.shape[1:])[:num_seqs]


def _max_seqs(page_table: tuple[int, ...]) -> int:
    """Return the sequences of one call, whose page table must fit SMEM.

    Raises:
        NotImplementedError: The pages of one sequence do not fit.
    """
    row_bytes = 4 * _tiles(page_table[1])
    if row_bytes > MAX_TABLE_BYTES:
        raise NotImplementedError(
            f"page_table has shape {page_table}: a row of {row_bytes:,} bytes exceeds "
            f"the {MAX_TABLE_BYTES:,} bytes of a TPU's SMEM that it may take; use "
            "shorter sequences or larger pages"
        )
    count = MAX_TABLE_BYTES // row_bytes
    # Rows are padded to whole tiles of 8, or of 1, 2 or 4.
    return count // 8 * 8 if count >= 8 else 1 << (count.bit_length() - 1)


def _attend(
    kv_pages: KvPages,
    query: Float[Array, "seq token q_head head_dim"],
    page_table: Int[Array, "seq table"],
    kv_len: Int[Array, " seq"],
    ancestor_mask: Bool[Array, "seq token token"] | None,
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    block_tokens: int | None,
    device_kind: str | None,
    interpret: bool | pltpu.InterpretParams,
) -> Float[Array, "seq token q_head head_dim"]:
    """Call the kernel for sequences whose page table fits SMEM."""
    queries, page_size = query.shape[1], kv_pages.shape[1]
    if block_tokens is None:
        block_tokens = default_block_tokens(kv_pages, page_table.shape[1] * page_size)
    page_table, kv_len = page_table.astype(jnp.int32), kv_len.astype(jnp.int32)
    lowest = jnp.zeros_like(kv_len)
    if window is not None:
        lowest = jnp.maximum(jnp.maximum(kv_len - queries, 0) - window + 1, 0)
    walks = _walks(kv_len, page_table, page_size=page_size, lowest=lowest)
    rows = fold(query, kv_pages.shape[2] // 2)
    group = rows.shape[2] // queries
    places = _places(ancestor_mask, queries=queries, group=group, window=window)
    kernel = functools.partial(
        _kernel,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        num_queries=queries,
        has_tree=ancestor_mask is not None,
        is_scaled=isinstance(kv_pages, ScaledPages),
    )
    scratch = _scratch(rows, kv_pages, max(1, block_tokens // page_size))
    _check_vmem(rows, places, scratch, device_kind)
    pools = jax.tree.leaves(kv_pages)
    if not interpret:
        # Keep pools in HBM: XLA would copy a pool that fits in VMEM to VMEM and back.
        pools = [pltpu.with_memory_space_constraint(pool, pltpu.HBM) for pool in pools]
    mixed = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(rows.shape, query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walks),
            grid=(rows.shape[0],),
            in_specs=[_per_seq(array) for array in (rows, places)]
            + [pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            out_specs=_per_seq(rows),
            scratch_shapes=scratch,
        ),
        # Buffers pass from one sequence to the next, so the order matters.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(*walks, rows, places, *pools)
    return unfold(mixed, query.shape)


def _places(
    mask: Bool[Array, "seq token token"] | None,
    *,
    queries: int,
    group: int,
    window: int | None,
) -> Array:
    """Return the depth of each row's query; for trees, depth and visible nodes as bits.

    Queries are the lanes: with queries as rows, each would be padded to 128 lanes.
    """
    if mask is None:
        depth = jnp.arange(queries, dtype=jnp.int32)[None]
        return jnp.repeat(depth, group, axis=1)[:, :, None]  # [1, row, 1]
    depth, words = pack_tree(mask, window)
    packed = [depth[:, None], words.swapaxes(1, 2)]
    return jnp.concatenate(packed, axis=1)  # [seq, 1 + word, query]


def _scratch(rows: Array, kv_pages: KvPages, block_pages: int) -> list[Any]:
    """Return the kernel's scratch buffers, in the order of its arguments."""
    _, kv_heads, num_rows, head_dim = rows.shape
    buffers = [pltpu.VMEM((2, block_pages, *kv_pages.shape[1:]), kv_pages.dtype)]
    if isinstance(kv_pages, ScaledPages):
        group = max(LANES // kv_pages.shape[1], 1)
        pages = -(-block_pages // group) * group
        lanes = kv_pages.scales.shape[2]
        buffers.append(pltpu.VMEM((2, pages, 1, lanes), jnp.float32))
    return [
        *buffers,
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((kv_heads, num_rows, 1), jnp.float32),
        pltpu.VMEM((kv_heads, num_rows, 1), jnp.float32),
        pltpu.VMEM((kv_heads, num_rows, head_dim), jnp.float32),
    ]


def _check_vmem(
    rows: Array, places: Array, scratch: list[Any], device_kind: str | None
) -> None:
    """Check the kernel's arrays in VMEM; Pallas has two copies of each block."""
    blocks = {"queries": rows, "results": rows, "positions": places}
    buffers = {
        f"the block of {name}": (array.shape[1:], array.dtype, 2)
        for name, array in blocks.items()
    }
    kept = [one for one in scratch if one.memory_space is pltpu.VMEM]
    *pages, maximum, total, mixed = kept
    names = ["the blocks of pages", "the blocks of scales"][: len(pages)]
    names += ["the maximum of scores", "the sum of weights", "the sum of values"]
    for name, one in zip(names, [*pages, maximum, total, mixed], strict=True):
        buffers[name] = one.shape, one.dtype, 1
    check_vmem("paged_attention", buffers, device_kind)


def _per_seq(array: Array) -> pl.BlockSpec:
    """Return the block of an array per grid step: one sequence's part, or all of it."""
    index = (0,) * (array.ndim - 1)
    if array.shape[0] == 1:
        return pl.BlockSpec((1, *array.shape[1:]), lambda seq, *_: (0, *index))
    return pl.BlockSpec((1, *array.shape[1:]), lambda seq, *_: (seq, *index))
