"""Paged attention in C++: each row is computed independently, over its visible keys.

The reference handles float16 pages.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels import native
from jaxspec_kernels.bits import KvPages, ScaledPages, check_scales, check_storage
from jaxspec_kernels.paged_attention import reference

_PAGES = (jnp.float32, jnp.bfloat16, jnp.uint16, jnp.uint8, jnp.int8)


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
) -> Float[Array, "seq token q_head head_dim"]:
    """See `jaxspec_kernels.paged_attention`."""
    check_storage(kv_pages)
    if kv_pages.dtype not in _PAGES:
        return reference.paged_attention(
            query,
            kv_pages,
            page_table,
            kv_len,
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            ancestor_mask=ancestor_mask,
        )
    native.require("paged_attention")
    if ancestor_mask is None:
        ancestor_mask = jnp.zeros((0, 0, 0), bool)
    made = jax.ShapeDtypeStruct(query.shape, query.dtype)
    return jax.ffi.ffi_call("jaxspec_attend", made)(
        query,
        *operands(kv_pages),
        page_table,
        kv_len,
        ancestor_mask,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(window or 0),
    )


def operands(kv_pages: KvPages) -> tuple[Array, Array]:
    """Return pages and scales (empty if none) as operands of the C++ operations."""
    check_scales(kv_pages, in_lanes=False)
    if isinstance(kv_pages, ScaledPages):
        return kv_pages.values, kv_pages.scales
    return kv_pages, jnp.zeros((0,), jnp.float32)
