"""A decoder's layer in C++: one call for each half of it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec_kernels import native
from jaxspec_kernels.bits import KvPages, ScaledPages
from jaxspec_kernels.decoder_blocks import GELU, Norm, Queries
from jaxspec_kernels.paged_attention.cpu import operands as of_pages
from jaxspec_kernels.panel_matmul import Panels
from jaxspec_kernels.panel_matmul.cpu import operands as of_panels


def attention_block(
    stream: Float[Array, "row model"],
    kv_pages: KvPages,
    *,
    before: Norm,
    after: Norm | None,
    q_proj: Panels,
    kv_proj: Panels,
    o_proj: Panels,
    cosine: Float[Array, "row half"],
    sine: Float[Array, "row half"],
    slot_mapping: Int[Array, " row"],
    regions: Sequence[Queries],
    num_q_heads: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    is_rounded: bool,
) -> tuple[Array, KvPages]:
    """See `jaxspec_kernels.decoder_blocks`."""
    native.require("attention_block")
    given: list[Array] = []
    for one in regions:
        mask = one.ancestor_mask
        none = jnp.zeros((0, 0, 0), bool)
        given += [one.page_table, one.kv_len, none if mask is None else mask]
    operands = stream, before.weight, _weight(after)
    for panels in (q_proj, kv_proj, o_proj):
        operands = *operands, *of_panels(panels)
    pages = of_pages(kv_pages)
    operands = *operands, cosine, sine, slot_mapping, *pages
    # Both are written where they are.
    last = len(operands) - 1
    call = jax.ffi.ffi_call(
        "jaxspec_attention_block",
        tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (stream, *pages)),
        input_output_aliases={last - 1: 1, last: 2},
    )
    made, pages, scales = call(
        *operands,
        *given,
        num_queries=np.array([one.num_queries for one in regions], np.int64),
        num_q_heads=np.int64(num_q_heads),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(window or 0),
        is_rounded=is_rounded,
        **_numbers(before, after),
    )
    is_scaled = isinstance(kv_pages, ScaledPages)
    return made, ScaledPages(pages, scales) if is_scaled else pages


def feed_forward_block(
    stream: Float[Array, "row model"],
    *,
    before: Norm,
    after: Norm | None,
    gate_up_proj: Panels,
    down_proj: Panels,
    hidden_size: int,
    block: int,
    activation: str,
    is_rounded: bool,
) -> Float[Array, "row model"]:
    """See `jaxspec_kernels.decoder_blocks`."""
    native.require("feed_forward_block")
    made = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    return jax.ffi.ffi_call("jaxspec_feed_forward_block", made)(
        stream,
        before.weight,
        _weight(after),
        *of_panels(gate_up_proj),
        *of_panels(down_proj),
        hidden=np.int64(hidden_size),
        block=np.int64(block),
        is_gelu=activation == GELU,
        is_rounded=is_rounded,
        **_numbers(before, after),
    )


def _weight(norm: Norm | None) -> Array:
    return jnp.zeros((0,), jnp.float32) if norm is None else norm.weight


def _numbers(before: Norm, after: Norm | None) -> dict[str, np.float32]:
    """Of both norms of a block, which are of one kind."""
    assert after is None or after[1:] == before[1:], (before[1:], after[1:])
    return dict(epsilon=np.float32(before.epsilon), offset=np.float32(before.offset))
