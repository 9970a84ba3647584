"""A decoder's layer in plain jnp: the specification."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import GELU, Norm, Queries
from jaxspec_kernels.paged_attention.reference import paged_attention
from jaxspec_kernels.panel_matmul import Panels
from jaxspec_kernels.panel_matmul.reference import panel_matmul
from jaxspec_kernels.write_kv_pages.reference import write_kv_pages


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
    head_dim, num_heads = kv_pages.shape[3], kv_pages.shape[2] // 2
    rows, model = stream.shape
    normed = _norm(before, stream)

    def multiply(inputs: Array, panels: Panels, outputs: int) -> Array:
        return panel_matmul(inputs, panels, num_outputs=outputs, is_rounded=is_rounded)

    query = multiply(normed, q_proj, num_q_heads * head_dim)
    query = _rotate(query.reshape(rows, -1, head_dim), cosine, sine)
    query = query.astype(jnp.bfloat16 if is_rounded else jnp.float32)
    both = multiply(normed, kv_proj, 2 * num_heads * head_dim)
    both = both.reshape(rows, num_heads, 2, head_dim)
    key, value = _rotate(both[:, :, 0], cosine, sine), both[:, :, 1]
    kv_pages = write_kv_pages(kv_pages, key, value, slot_mapping)
    mixed, start = [], 0
    for one in regions:
        count = one.kv_len.shape[0] * one.num_queries
        here = query[start : start + count]
        start += count
        found = paged_attention(
            here.reshape(-1, one.num_queries, *here.shape[1:]),
            kv_pages,
            one.page_table,
            one.kv_len,
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            ancestor_mask=one.ancestor_mask,
        )
        mixed.append(found.reshape(count, -1).astype(jnp.float32))
    mixed.append(jnp.zeros((rows - start, num_q_heads * head_dim)))
    outputs = multiply(jnp.concatenate(mixed), o_proj, model)
    return stream + _norm(after, outputs), kv_pages


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
    rows, model = stream.shape
    normed = _norm(before, stream)
    both = panel_matmul(
        normed, gate_up_proj, num_outputs=2 * hidden_size, is_rounded=is_rounded
    )
    both = both.reshape(rows, -1, 2, block)
    activate = jax.nn.gelu if activation == GELU else jax.nn.silu
    inner = (activate(both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    outer = panel_matmul(inner, down_proj, num_outputs=model, is_rounded=is_rounded)
    return stream + _norm(after, outer)


def _norm(
    norm: Norm | None, rows: Float[Array, "row model"]
) -> Float[Array, "row model"]:
    if norm is None:
        return rows
    scale = norm.offset + norm.weight.astype(jnp.float32)[None]
    mean = jnp.square(rows).mean(axis=1, keepdims=True)
    return rows * jax.lax.rsqrt(mean + norm.epsilon) * scale


def _rotate(
    heads: Float[Array, "row head head_dim"],
    cosine: Float[Array, "row half"],
    sine: Float[Array, "row half"],
) -> Float[Array, "row head head_dim"]:
    cosine, sine = cosine[:, None], sine[:, None]
    first, second = jnp.split(heads, 2, axis=2)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return jnp.concatenate(turned, axis=2)
