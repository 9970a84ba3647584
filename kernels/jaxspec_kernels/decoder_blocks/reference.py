"""A decoder's layer in plain jnp: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import GELU, Attention, FeedForward, Norm
from jaxspec_kernels.paged_attention.reference import paged_attention
from jaxspec_kernels.panel_matmul import Panels
from jaxspec_kernels.panel_matmul.reference import panel_matmul
from jaxspec_kernels.write_kv_pages.reference import write_kv_pages


def attention_block(
    stream: Float[Array, "row model"], kv_pages: KvPages, attention: Attention
) -> tuple[Array, KvPages]:
    """See `jaxspec_kernels.decoder_blocks`."""
    head_dim, num_heads = kv_pages.shape[3], kv_pages.shape[2] // 2
    rows, model = stream.shape
    normed = _norm(attention.before, stream)

    def multiply(inputs: Array, panels: Panels, outputs: int) -> Array:
        return panel_matmul(
            inputs, panels, num_outputs=outputs, is_rounded=attention.is_rounded
        )

    def position(norm: Norm | None, heads: Array) -> Array:
        return _rotate(_norm(norm, heads), attention.cosine, attention.sine)

    query = multiply(normed, attention.q_proj, attention.num_q_heads * head_dim)
    query = position(attention.q_norm, query.reshape(rows, -1, head_dim))
    query = query.astype(jnp.bfloat16 if attention.is_rounded else jnp.float32)
    both = multiply(normed, attention.kv_proj, 2 * num_heads * head_dim)
    both = both.reshape(rows, num_heads, 2, head_dim)
    key, value = position(attention.k_norm, both[:, :, 0]), both[:, :, 1]
    slots, is_used = attention.slot_mapping, attention.is_used
    if is_used is not None:
        slots = jnp.where(is_used, slots, kv_pages.shape[0] * kv_pages.shape[1])
    kv_pages = write_kv_pages(kv_pages, key, value, slots)
    mixed, start = [], 0
    for region in attention.regions:
        count = region.kv_len.shape[0] * region.num_queries
        region_query = query[start : start + count]
        start += count
        attended = paged_attention(
            region_query.reshape(-1, region.num_queries, *region_query.shape[1:]),
            kv_pages,
            region.page_table,
            region.kv_len,
            scale=attention.scale,
            soft_cap=attention.soft_cap,
            window=attention.window,
            ancestor_mask=region.ancestor_mask,
        )
        mixed.append(attended.reshape(count, -1).astype(jnp.float32))
    mixed.append(jnp.zeros((rows - start, attention.num_q_heads * head_dim)))
    outputs = multiply(jnp.concatenate(mixed), attention.o_proj, model)
    return _add(stream, _norm(attention.after, outputs), is_used), kv_pages


def feed_forward_block(
    stream: Float[Array, "row model"], network: FeedForward
) -> Float[Array, "row model"]:
    """See `jaxspec_kernels.decoder_blocks`."""
    rows, model = stream.shape
    hidden, is_rounded = network.hidden_size, network.is_rounded
    both = panel_matmul(
        _norm(network.before, stream),
        network.gate_up_proj,
        num_outputs=2 * hidden,
        is_rounded=is_rounded,
    )
    both = both.reshape(rows, -1, 2, network.block)
    activate = jax.nn.gelu if network.activation == GELU else jax.nn.silu
    inner = (activate(both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    outer = panel_matmul(
        inner, network.down_proj, num_outputs=model, is_rounded=is_rounded
    )
    return _add(stream, _norm(network.after, outer), network.is_used)


def _add(
    stream: Float[Array, "row model"],
    rows: Float[Array, "row model"],
    is_used: Bool[Array, " row"] | None,
) -> Float[Array, "row model"]:
    """Add rows to the residual stream; its unused rows are unchanged."""
    total = stream + rows
    return total if is_used is None else jnp.where(is_used[:, None], total, stream)


def _norm(
    norm: Norm | None, rows: Float[Array, "... feature"]
) -> Float[Array, "... feature"]:
    if norm is None:
        return rows
    scale = norm.offset + norm.weight.astype(jnp.float32)
    scale = jnp.expand_dims(scale, range(rows.ndim - 1))
    mean = jnp.square(rows).mean(axis=-1, keepdims=True)
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
