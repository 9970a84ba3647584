"""Paged attention in plain jnp: the specification.

A `while_loop` walks blocks of pages from the first one that a window reaches to the
last live one, with running softmax statistics, so the cost depends on the live context
and not on the page table. A block in which nothing is visible does not change a bit of
the statistics; a row's result does not depend on the lengths of other rows.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels.bits import (
    KvPages,
    ScaledPages,
    check_storage,
    from_storage,
    read_scales,
)
from jaxspec_kernels.sums import row_sums

# Tokens per block. Below 128 the loop's overhead shows on CPU, above it short contexts
# pay for empty slots.
BLOCK_TOKENS = 128

# At least two rows, so that plain decoding and verification give a query the same
# bits: XLA sums the product of one row with the keys in another order.
MIN_ROWS = 2

_MASKED = -1e30  # finite: exp(_MASKED - _MASKED) must not be NaN in a row without keys


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
    block_tokens: int = BLOCK_TOKENS,
) -> Float[Array, "seq token q_head head_dim"]:
    """See `jaxspec_kernels.paged_attention`; `block_tokens` is rounded to pages."""
    check_storage(kv_pages)
    seqs, queries, q_heads, head_dim = query.shape
    page_size, kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
    group = q_heads // kv_heads
    block_pages = max(1, min(block_tokens // page_size, page_table.shape[1]))
    block = block_pages * page_size
    capacity = page_table.shape[1] * page_size
    missing = -page_table.shape[1] % block_pages
    page_table = jnp.pad(page_table, ((0, 0), (0, missing)))

    heads = jnp.arange(2 * kv_heads, dtype=jnp.int32)[None, :, None]
    rows = fold(query.astype(jnp.float32) * scale, kv_heads)
    num_rows = rows.shape[2]
    pads = (0, 0), (0, 0), (0, max(0, MIN_ROWS - num_rows)), (0, 0)
    rows = jnp.pad(rows, pads)
    see = functools.partial(
        _visible,
        queries=queries,
        kv_len=kv_len,
        window=window,
        ancestor_mask=ancestor_mask,
    )

    def visit(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        number, *statistics = carry
        pages = jax.lax.dynamic_slice_in_dim(
            page_table, number * block_pages, block_pages, axis=1
        )

        # Pages by head, as the products below need them, so that they are moved once.
        def read(pool: Array) -> Array:
            return pool.at[pages[:, None], :, heads].get(mode="clip")

        if isinstance(kv_pages, ScaledPages) and kv_pages.is_in_lanes:
            scales = read_scales(kv_pages, pages.reshape(-1))
            scales = scales.reshape(*pages.shape, *scales.shape[1:])
            kv = ScaledPages(read(kv_pages.values), scales.transpose(0, 3, 1, 2))
        else:
            kv = jax.tree.map(read, kv_pages)
        kv = from_storage(kv).reshape(seqs, kv_heads, 2, block, head_dim)
        at = number * block + jnp.arange(block, dtype=jnp.int32)
        visible = see(at) & (at < capacity)[None, None]
        # A slot that no query sees may hold NaN, and 0 * NaN is NaN.
        live = visible.any(axis=1)[:, None, :, None]
        key = jnp.where(live, kv[:, :, 0], 0.0)
        value = jnp.where(live, kv[:, :, 1], 0.0)
        visible = jnp.repeat(visible, group, axis=1)[:, None]  # [seq, 1, row, key]
        visible = jnp.pad(visible, pads)
        added = _add(statistics, rows, key, value, visible, soft_cap=soft_cap)
        return number + 1, *added

    first, last = _blocks(kv_len, queries=queries, window=window, block=block)
    last = jnp.minimum(last, page_table.shape[1] // block_pages)
    column = (*rows.shape[:3], 1)
    start = (
        first,
        jnp.full(column, _MASKED, jnp.float32),
        jnp.zeros(column, jnp.float32),
        jnp.zeros(rows.shape, jnp.float32),
    )
    _, _, total, mixed = jax.lax.while_loop(lambda carry: carry[0] < last, visit, start)
    mixed = mixed / jnp.where(total > 0, total, 1.0)
    return unfold(mixed[:, :, :num_rows], query.shape).astype(query.dtype)


def fold(
    query: Float[Array, "seq token q_head head_dim"], kv_heads: int
) -> Float[Array, "seq kv_head row head_dim"]:
    """Fold the `group` query heads of a KV head and the tokens into rows."""
    seqs, queries, q_heads, head_dim = query.shape
    rows = query.reshape(seqs, queries, kv_heads, q_heads // kv_heads, head_dim)
    return rows.transpose(0, 2, 1, 3, 4).reshape(seqs, kv_heads, -1, head_dim)


def unfold(
    rows: Float[Array, "seq kv_head row head_dim"], shape: tuple[int, ...]
) -> Float[Array, "seq token q_head head_dim"]:
    """Undo `fold`, for a query of this shape."""
    seqs, queries, _, head_dim = shape
    rows = rows.reshape(seqs, rows.shape[1], queries, -1, head_dim)
    return rows.transpose(0, 2, 1, 3, 4).reshape(shape)


def _add(
    statistics: list[Array],
    rows: Float[Array, "seq kv_head row head_dim"],
    key: Float[Array, "seq kv_head key head_dim"],
    value: Float[Array, "seq kv_head key head_dim"],
    visible: Bool[Array, "seq 1 row key"],
    *,
    soft_cap: float | None,
) -> tuple[Array, Array, Array]:
    """Update the running maximum, sum of weights and mixed values with one block."""
    maximum, total, mixed = statistics
    # s seq  h kv head  r row  t key  d head_dim
    scores = _einsum("shrd,shtd->shrt", rows, key)
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(visible, scores, _MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_maximum), 0.0)
    rescale = jnp.exp(maximum - new_maximum)
    total = total * rescale + row_sums(weights)
    mixed = mixed * rescale + _einsum("shrt,shtd->shrd", weights, value)
    return new_maximum, total, mixed


def _einsum(form: str, left: Array, right: Array) -> Array:
    return jnp.einsum(form, left, right, precision=jax.lax.Precision.HIGHEST)


def _visible(
    key: Int[Array, " key"],
    *,
    queries: int,
    kv_len: Int[Array, " seq"],
    window: int | None,
    ancestor_mask: Bool[Array, "seq token token"] | None,
) -> Bool[Array, "seq token key"]:
    """Return which key positions each query sees."""
    start = (kv_len - queries)[:, None, None]  # of the first query, may be negative
    key = jnp.broadcast_to(key[None, None, :], (kv_len.shape[0], 1, key.shape[0]))
    if ancestor_mask is None:
        position = start + jnp.arange(queries, dtype=jnp.int32)[None, :, None]
        seen = (key <= position) & (position >= 0)
        distance = position - key
    else:
        depth = ancestor_mask.sum(axis=-1, dtype=jnp.int32) - 1
        position = start + depth[:, :, None]
        # Descendants see a tree's keys; depth takes the place of the slot.
        node = key - start
        inside = (node >= 0) & (node < queries)
        node = jnp.clip(node, 0, queries - 1)
        seen = jnp.take_along_axis(
            ancestor_mask,
            jnp.broadcast_to(node, (*ancestor_mask.shape[:2], key.shape[2])),
            axis=2,
        )
        seen = jnp.where(inside, seen, node == 0)
        seen &= key < kv_len[:, None, None]
        key_depth = jnp.take_along_axis(depth, node[:, 0], axis=1)[:, None]
        distance = position - jnp.where(inside, start + key_depth, key)
    if window is not None:
        seen &= distance < window
    return seen


def _blocks(
    kv_len: Int[Array, " seq"], *, queries: int, window: int | None, block: int
) -> tuple[Array, Array]:
    """Return the first, and one past the last, block that any query sees."""
    last = (kv_len.max() + block - 1) // block
    if window is None:
        return jnp.zeros_like(last), last
    # An empty row (kv_len 0) must not move the start to the first block.
    lowest = jnp.where(
        kv_len > 0, kv_len - queries - window + 1, jnp.iinfo(jnp.int32).max
    )
    return jnp.maximum(lowest.min(), 0) // block, last
