"""Page writes as one scatter of rows, in place on a donated array on every backend.

Compiled for v5e, v6e and H200 (`tests/kernels/test_kernels_aot.py`), alone and
before the attention kernel in one program, the scatter is one fusion whose output is
the argument's memory, without temporaries: no backend needs a kernel of its own, except
TPU for the scales of int8.

- GPU: the whole operation is one kernel.
- TPU: the scatter copies 16 rows at a time, all in flight together. A program needs one
  more fusion, which joins keys and values.
- TPU, head_dim 64: XLA stores such an array with the pages in the lanes, where a row is
  not contiguous, and copies the pool three times per call. Give the program's argument
  and result the row-major layout, `Format(Layout((0, 1, 2, 3)), sharding)` of
  `jax.experimental.layout`: then the write is in place there too, at twice the memory,
  as half of every tile is padding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec_kernels.bits import (
    KvPages,
    ScaledPages,
    check_storage,
    lanes_of,
    read_scales,
    to_storage,
)


def write_kv_pages(
    kv_pages: KvPages,
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
) -> KvPages:
    """See `jaxspec_kernels.write_kv_pages`."""
    check_storage(kv_pages)
    return _put(kv_pages, *kept_rows(kv_pages, key, value, slot_mapping))


def kept_rows(
    kv_pages: KvPages,
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
) -> tuple[Any, Int[Array, " row"]]:
    """Return keys and values as rows of the pages, and their slots."""
    pages, page_size, double_heads, head_dim = kv_pages.shape
    # Keys even, values odd. Joined along the lanes: a new axis between heads and
    # head_dim is a tile of its own on TPU, for 5 fusions instead of 2.
    rows = jnp.concatenate([key, value], axis=2)  # [token, kv_head, 2 * head_dim]
    rows = rows.reshape(-1, double_heads, head_dim)
    if rows.shape[0] == 1:
        # XLA would turn a scatter of one row into a dynamic-update-slice whose select
        # reads the old row, and copy the pool for it: a pad row keeps it a scatter.
        rows = jnp.concatenate([rows, rows])
        pad = jnp.full_like(slot_mapping, pages * page_size)
        slot_mapping = jnp.concatenate([slot_mapping, pad])

    return to_storage(rows, kv_pages), slot_mapping


def copy_kv_rows(
    kv_pages: KvPages, source: Int[Array, " slot"], target: Int[Array, " slot"]
) -> KvPages:
    """See `jaxspec_kernels.write_kv_pages`."""
    check_storage(kv_pages)
    if isinstance(kv_pages, ScaledPages) and kv_pages.is_in_lanes:
        page, offset = jnp.divmod(source, kv_pages.shape[1])
        scales = take_slots(read_scales(kv_pages, page), offset)
        rows = ScaledPages(read_rows(kv_pages.values, source), scales)
    else:
        rows = jax.tree.map(lambda pool: read_rows(pool, source), kv_pages)
    # With the barrier, all rows are read first. Without it, XLA:GPU reads rows while it
    # writes others, and copies the pool to do so.
    return _put(kv_pages, jax.lax.optimization_barrier(rows), target)


def read_rows(pool: Array, source: Int[Array, " slot"]) -> Array:
    """Return the content of these slots of an array of pages."""
    return pool.reshape(-1, *pool.shape[2:]).at[source].get(mode="clip")


def put_rows(pool: Array, rows: Array, slot_mapping: Int[Array, " token"]) -> Array:
    """Return the pages with rows in these slots; slots past the end are skipped."""
    slots = pool.reshape(-1, *pool.shape[2:])
    return slots.at[slot_mapping].set(rows, mode="drop").reshape(pool.shape)


def take_slots(
    scales: Float[Array, "slot page_size two_kv_head"], offset: Int[Array, " slot"]
) -> Float[Array, "slot two_kv_head"]:
    """Select the scales of one slot each from the scales of whole pages."""
    return jnp.take_along_axis(scales, offset[:, None, None], axis=1)[:, 0]


def _put(kv_pages: KvPages, rows: Any, slot_mapping: Int[Array, " token"]) -> KvPages:
    if isinstance(kv_pages, ScaledPages) and kv_pages.is_in_lanes:
        _, page_size, two_kv_heads, _ = kv_pages.shape
        page, offset = jnp.divmod(slot_mapping, page_size)
        lane = lanes_of(offset, page_size, two_kv_heads)
        at = kv_pages.scales.at[page[:, None], 0, lane]
        return ScaledPages(
            put_rows(kv_pages.values, rows.values, slot_mapping),
            at.set(rows.scales, mode="drop"),
            is_in_lanes=True,
        )
    return jax.tree.map(
        lambda pool, own: put_rows(pool, own, slot_mapping), kv_pages, rows
    )
