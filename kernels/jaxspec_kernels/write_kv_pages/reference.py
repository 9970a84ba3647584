"""Page writes as one scatter of rows, which XLA does in place on a donated array."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxspec_kernels.bits import to_storage


def write_kv_pages(
    kv_pages: Num[Array, "page page_size two_kv_head head_dim"],
    key: Float[Array, "token kv_head head_dim"],
    value: Float[Array, "token kv_head head_dim"],
    slot_mapping: Int[Array, " token"],
) -> Num[Array, "page page_size two_kv_head head_dim"]:
    """See `jaxspec_kernels.write_kv_pages`."""
    pages, page_size, double_heads, head_dim = kv_pages.shape
    rows = jnp.stack([key, value], axis=2)  # keys even, values odd
    rows = to_storage(rows.reshape(-1, double_heads, head_dim), kv_pages.dtype)
    if rows.shape[0] == 1:
        # XLA would turn a scatter of one row into a dynamic-update-slice whose select
        # reads the old row, and copy the pool for it: a pad row keeps it a scatter.
        rows = jnp.concatenate([rows, rows])
        pad = jnp.full_like(slot_mapping, pages * page_size)
        slot_mapping = jnp.concatenate([slot_mapping, pad])
    slots = kv_pages.reshape(pages * page_size, double_heads, head_dim)
    return slots.at[slot_mapping].set(rows, mode="drop").reshape(kv_pages.shape)
