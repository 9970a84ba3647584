"""A decoder's layer in C++: one call for each half of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec_kernels import native
from jaxspec_kernels.bits import KvPages, ScaledPages
from jaxspec_kernels.decoder_blocks import GELU, Attention, FeedForward, Norm
from jaxspec_kernels.paged_attention.cpu import operands as of_pages
from jaxspec_kernels.panel_matmul.cpu import operands as of_panels


def attention_block(
    stream: Float[Array, "row model"], kv_pages: KvPages, attention: Attention
) -> tuple[Array, KvPages]:
    """See `jaxspec_kernels.decoder_blocks`."""
    native.require("attention_block")
    region_operands: list[Array] = []
    for region in attention.regions:
        mask = region.ancestor_mask
        none = jnp.zeros((0, 0, 0), bool)
        region_operands += [
            region.page_table,
            region.kv_len,
            none if mask is None else mask,
        ]
    norms = attention.before, attention.after, attention.q_norm, attention.k_norm
    operands = stream, *map(_weight, norms)
    for panels in (attention.q_proj, attention.kv_proj, attention.o_proj):
        operands = *operands, *of_panels(panels)
    pages = of_pages(kv_pages)
    rows = attention.cosine, attention.sine, attention.slot_mapping
    operands = *operands, *rows, _mask(attention.is_used), *pages
    # Pages and scales are written in place. XLA would copy empty scales once per layer;
    # with that many operations ready at once, it moves the program to another thread,
    # which takes longer than a small model's layer.
    is_scaled = isinstance(kv_pages, ScaledPages)
    last = len(operands) - 1
    call = jax.ffi.ffi_call(
        "jaxspec_attention_block",
        tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (stream, *pages)),
        input_output_aliases={last - 1: 1} | ({last: 2} if is_scaled else {}),
    )
    output, pages, scales = call(
        *operands,
        *region_operands,
        num_queries=np.array([one.num_queries for one in attention.regions], np.int64),
        num_q_heads=np.int64(attention.num_q_heads),
        scale=np.float32(attention.scale),
        soft_cap=np.float32(attention.soft_cap or 0.0),
        window=np.int64(attention.window or 0),
        is_rounded=attention.is_rounded,
        **_numbers(*norms),
    )
    return output, ScaledPages(pages, scales) if is_scaled else pages


def feed_forward_block(
    stream: Float[Array, "row model"], network: FeedForward
) -> Float[Array, "row model"]:
    """See `jaxspec_kernels.decoder_blocks`."""
    native.require("feed_forward_block")
    made = jax.ShapeDtypeStruct(stream.shape, stream.dtype)
    return jax.ffi.ffi_call("jaxspec_feed_forward_block", made)(
        stream,
        _weight(network.before),
        _weight(network.after),
        *of_panels(network.gate_up_proj),
        *of_panels(network.down_proj),
        _mask(network.is_used),
        hidden=np.int64(network.hidden_size),
        block=np.int64(network.block),
        is_gelu=network.activation == GELU,
        is_rounded=network.is_rounded,
        **_numbers(network.before, network.after),
    )


def _weight(norm: Norm | None) -> Array:
    return jnp.zeros((0,), jnp.float32) if norm is None else norm.weight


def _mask(is_used: Array | None) -> Array:
    return jnp.zeros((0,), bool) if is_used is None else is_used


def _numbers(*norms: Norm | None) -> dict[str, np.float32]:
    """Return the epsilon and the offset that all norms of a block share."""
    found = {norm[1:] for norm in norms if norm is not None}
    assert len(found) == 1, found
    ((epsilon, offset),) = found
    return dict(epsilon=np.float32(epsilon), offset=np.float32(offset))
