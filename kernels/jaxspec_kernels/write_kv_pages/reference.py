"""Page writes as one scatter of rows, in place on a donated array on every backend.

Compiled for v5e, v6e and H200 (`tests/kernels/test_write_kv_pages_aot.py`), alone and
before the attention kernel in one program, the scatter is one fusion whose output is
the argument's memory, without temporaries: so no backend has a kernel of its own.

- GPU: the whole operation is one kernel.
- TPU: the scatter copies 16 rows at a time, all in flight together. A program needs one
  more fusion, which joins keys and values.
- TPU, head_dim 64: XLA keeps such an array with the pages in the lanes, where a row is
  not contiguous, and copies the pool three times per call. Give the program's argument
  and result the row-major layout, `Format(Layout((0, 1, 2, 3)), sharding)` of
  `jax.experimental.layout`: then it is in place there too, for twice the memory, as
  half of every tile is padding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec_kernels.bits import KvPages, check_storage, to_storage


def write_kv_pages(
    kv_pages: KvPages,
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
) -> KvPages:
    """See `jaxspec_kernels.write_kv_pages`."""
    check_storage(kv_pages)
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

    def put(pool: Array, kept: Array) -> Array:
        slots = pool.reshape(pages * page_size, *pool.shape[2:])
        return slots.at[slot_mapping].set(kept, mode="drop").reshape(pool.shape)

    return jax.tree.map(put, kv_pages, to_storage(rows, kv_pages))
