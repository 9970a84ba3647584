"""Layers that decoders share: norms, rotary embedding, attention, feed-forward."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models import cpu
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.params import Params
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import GELU, Norm
from jaxspec_kernels.sums import row_sums

Tables = tuple[Float[Array, "token 1 half"], Float[Array, "token 1 half"]]


def mean_square(inputs: Float[Array, "... model"]) -> Float[Array, "... 1"]:
    """Return the variance of each row, used by its norm."""
    return row_sums(jnp.square(inputs)) / inputs.shape[-1]


def normalise(
    norm: Norm | None, inputs: Float[Array, "... model"]
) -> Float[Array, "... model"]:
    """Divide rows by their root mean square in float32, and scale them by the weights.

    None returns the rows unchanged.
    """
    if norm is None:
        return inputs
    scale = norm.offset + norm.weight.astype(jnp.float32)
    scale = jnp.expand_dims(scale, range(inputs.ndim - 1))
    return inputs * jax.lax.rsqrt(mean_square(inputs) + norm.epsilon) * scale


def rope_tables(
    positions: Int[Array, " token"], head_dim: int, theta: float, factor: float = 1.0
) -> Tables:
    """Return cosine and sine of every position's angles, in float32.

    Args:
        factor: Positions are divided by this (linear scaling).

    bf16 would round position 257 to 256, and sin(257) is not sin(256).
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    if factor != 1.0:
        frequency /= factor
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]


def rotate(
    inputs: Float[Array, "token head head_dim"],
    tables: Tables,
) -> Float[Array, "token head head_dim"]:
    """Apply rotary embedding, pairing element i with i + head_dim / 2.

    References: Su et al. 2021, arXiv:2104.09864.
    """
    cos, sin = tables
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def gate_block(intermediate_size: int) -> int:
    """Return the number of rows of a block in the fused matrix.

    Blocks of gate rows and of up rows alternate in it.
    """
    return math.gcd(intermediate_size, 128)


def gated_feed_forward(
    params: Params,
    inputs: Float[Array, "row model"],
    *,
    activation: str,
) -> Float[Array, "row model"]:
    """Return `down(activation(gate(inputs)) * up(inputs))`.

    Args:
        params: `gate_up_proj`, whose rows alternate in blocks of `gate_block`, and
            `down_proj`.
        activation: A name of `jaxspec_kernels.decoder_blocks`.
    """
    gate_up = params["gate_up_proj"].multiply(inputs)
    block = gate_block(params["down_proj"].shape[1])
    gate_up = gate_up.reshape(inputs.shape[0], -1, 2, block)
    gate, up = gate_up[:, :, 0], gate_up[:, :, 1]
    activate = jax.nn.gelu if activation == GELU else jax.nn.silu
    inner = activate(gate) * up
    return params["down_proj"].multiply(inner.reshape(inputs.shape[0], -1))


def attend(
    params: Params,
    inputs: Float[Array, "row features"],
    kv_pages: KvPages,
    *,
    batch: TokenBatch,
    tables: Tables,
    num_q_heads: int,
    scale: float,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    backend: Backend,
) -> tuple[Float[Array, "row model"], KvPages]:
    """Write the new keys and values, then attend; return (output, kv_pages).

    Grouped-query attention. Rows in no region are pads.

    Args:
        params: `q_proj`, `kv_proj` (a head's key rows, then its value rows: the order
            of the pages) and `o_proj`.
        num_q_heads: Query heads; the KV heads may be repeated for the devices.
        scale: Multiplies the scores.
        soft_cap: With cap c, scaled scores become `c * tanh(score / c)`; None for none.
        q_norm, k_norm: Applied to each head of the queries and of the keys, before the
            rotation; one weight of head_dim for all heads. None for none.
        window: Tokens that a query sees, its own included; None for all.
    """
    tokens, head_dim = inputs.shape[0], params["q_proj"].shape[0] // num_q_heads
    query = params["q_proj"].multiply(inputs).reshape(tokens, -1, head_dim)
    # Queries are rounded to the type of the pages: tensor cores cannot multiply float32
    # queries with bfloat16 keys, and HuggingFace rounds queries too.
    query = rotate(normalise(q_norm, query), tables).astype(params["q_proj"].dtype)
    kv_pages = write_keys_and_values(
        params,
        inputs,
        kv_pages,
        slot_mapping=batch.slot_mapping,
        tables=tables,
        num_q_heads=num_q_heads,
        k_norm=k_norm,
        backend=backend,
    )
    mixed, start = [], 0
    for region in batch.regions:
        region_query = query[start : start + region.num_rows]
        start += region.num_rows
        attended = backend.attend(
            region_query.reshape(-1, region.num_queries, *region_query.shape[1:]),
            kv_pages,
            region,
            scale=scale,
            soft_cap=soft_cap,
            window=window,
        )
        mixed.append(attended.reshape(region.num_rows, -1))
    rows = jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]
    rows = jnp.pad(rows, ((0, tokens - start), (0, 0)))
    return params["o_proj"].multiply(rows), kv_pages


def write_keys_and_values(
    params: Params,
    inputs: Float[Array, "row features"],
    kv_pages: KvPages,
    *,
    slot_mapping: Int[Array, " row"],
    tables: Tables,
    num_q_heads: int,
    k_norm: Norm | None,
    backend: Backend,
) -> KvPages:
    """Write the keys and values of rows to their slots; return the pages.

    Args:
        params: `kv_proj`, as for `attend`.
    """
    head_dim = kv_pages.shape[3]
    key_value = params["kv_proj"].multiply(inputs)
    key_value = key_value.reshape(inputs.shape[0], -1, 2, head_dim)
    key = rotate(normalise(k_norm, key_value[:, :, 0]), tables)
    return backend.write(kv_pages, key, key_value[:, :, 1], slot_mapping, num_q_heads)


def attention_block(
    params: Params,
    stream: Float[Array, "row model"],
    kv_pages: KvPages,
    *,
    before: Norm,
    after: Norm,
    backend: Backend,
    **settings: Any,
) -> tuple[Float[Array, "row model"], KvPages]:
    """Return `stream + after(attend(before(stream)))`, and the pages.

    Args:
        settings: The other arguments of `attend`.
    """
    if backend.has_blocks and cpu.are_native(params):
        return cpu.attention_block(
            params, stream, kv_pages, before=before, after=after, **settings
        )
    normed = normalise(before, stream)
    mixed, kv_pages = attend(params, normed, kv_pages, backend=backend, **settings)
    return stream + normalise(after, mixed), kv_pages


def feed_forward_block(
    params: Params,
    stream: Float[Array, "row model"],
    *,
    before: Norm,
    after: Norm | None,
    activation: str,
    backend: Backend,
    is_used: Bool[Array, " row"] | None = None,
) -> Float[Array, "row model"]:
    """Return `stream + after(gated_feed_forward(before(stream)))`.

    Args:
        is_used: Rows whose results are read; None for all. On CPU, others cost nothing.
    """
    if backend.has_blocks and cpu.are_native(params):
        block = gate_block(params["down_proj"].shape[1])
        return cpu.feed_forward_block(
            params,
            stream,
            before=before,
            after=after,
            block=block,
            activation=activation,
            is_used=is_used,
        )
    normed = normalise(before, stream)
    outer = gated_feed_forward(params, normed, activation=activation)
    return stream + normalise(after, outer)
