"""Gemma 2 over paged KV memory.

Owns the network and its parameters; knows nothing of sampling, scheduling or files.
Constants and order of operations follow Gemma Team 2024, arXiv:2408.00118, and where
the report is silent, HuggingFace's `Gemma2ForCausalLM` with eager attention.

Parameters have one type (float32 or bfloat16) and are matmul operands in it; the
residual stream, norms, attention statistics and logits are float32.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.panels import Matrix, multiply
from jaxspec_kernels.sums import row_sums

# XLA:CPU's products have from four rows on one order of sums for a row, however many
# there are. With `row_sums`, and pads that are rows from the start, a row's bits do not
# depend on those beside it: plain decoding equals verification bit for bit.
MIN_ROWS = 4

Axes = tuple[str | None, ...]


def _parameter(
    shape: tuple[int, ...],
    axes: Axes,
    dtype: jnp.dtype,
    *,
    unit: int = 1,
) -> nnx.Param:
    """Declare a parameter once: shape and logical axes.

    `unit` elements of the split axis stay on one device (a head's). Matrices are stored
    (out, in), HuggingFace's order.
    """
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, unit=unit)


def project(
    inputs: Float[Array, "token features"], weight: Matrix
) -> Float[Array, "token out"]:
    """Multiply rows by an (out, in) weight in the weight's type; float32 result.

    Contracting both second axes is the form for which XLA:CPU has a bf16 kernel whose
    cost does not grow between 2 and 16 rows, which is what verification needs. Its
    float32 kernel wants `panels` for that.
    """
    return multiply(
        inputs.astype(weight.dtype),
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def rms_norm(
    inputs: Float[Array, "... model"], weight: Float[Array, " model"], epsilon: float
) -> Float[Array, "... model"]:
    """Normalise in float32 and scale by 1 + weight, Gemma's form."""
    scale = jnp.expand_dims(1.0 + weight.astype(jnp.float32), range(inputs.ndim - 1))
    return inputs * jax.lax.rsqrt(mean_square(inputs) + epsilon) * scale


def mean_square(inputs: Float[Array, "... model"]) -> Float[Array, "... 1"]:
    """Of every row, the variance that its norm divides by."""
    return row_sums(jnp.square(inputs)) / inputs.shape[-1]


def rope_tables(
    positions: Int[Array, " token"], head_dim: int, theta: float
) -> tuple[Float[Array, "token 1 half"], Float[Array, "token 1 half"]]:
    """Cosine and sine of every position's angles, in float32.

    bf16 would round position 257 to 256, and sin(257) is not sin(256).
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]


def rotate(
    inputs: Float[Array, "token head head_dim"],
    tables: tuple[Float[Array, "token 1 half"], Float[Array, "token 1 half"]],
) -> Float[Array, "token head head_dim"]:
    """Apply rotary embedding, pairing element i with i + head_dim / 2.

    References: Su et al. 2021, arXiv:2104.09864.
    """
    cos, sin = tables
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class Attention(nnx.Module):
    """Grouped-query attention with soft-capped scores over paged keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        backend: Backend,
    ):
        self.config, self.window = config, config.window(layer)
        self.backend = backend
        model = config.hidden_size
        queries = config.num_q_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        unit = config.head_dim
        self.q_proj = _parameter(
            (queries, model), ("q_head", "model"), dtype, unit=unit
        )
        # A head's key rows, then its value rows: the order of the pages.
        self.kv_proj = _parameter(
            (2 * keys, model), ("kv_head", "model"), dtype, unit=2 * unit
        )
        self.o_proj = _parameter(
            (model, queries), ("model", "q_head"), dtype, unit=unit
        )

    def __call__(
        self,
        inputs: Float[Array, "row model"],
        batch: TokenBatch,
        tables: tuple[Array, Array],
        kv_pages: Num[Array, "page page_size two_kv_head head_dim"],
    ) -> tuple[Float[Array, "row model"], Array]:
        """Write the new keys and values, then attend; returns (output, kv_pages)."""
        config, tokens = self.config, batch.tokens.shape[0]
        heads = (tokens, -1, config.head_dim)
        query = project(inputs, self.q_proj[...])[:tokens].reshape(heads)
        key_value = project(inputs, self.kv_proj[...])[:tokens]
        key_value = key_value.reshape(tokens, -1, 2, config.head_dim)
        # In the type of the pages: float32 queries on bfloat16 keys would take products
        # that no tensor core has, and HuggingFace rounds them too.
        query = rotate(query, tables).astype(self.q_proj[...].dtype)
        key, value = rotate(key_value[:, :, 0], tables), key_value[:, :, 1]
        kv_pages = self.backend.write(
            kv_pages, key, value, batch.slot_mapping, config.num_q_heads
        )

        mixed, start = [], 0
        for region in batch.regions:
            here = query[start : start + region.num_rows]
            start += region.num_rows
            attended = self.backend.attend(
                here.reshape(-1, region.num_queries, *here.shape[1:]),
                kv_pages,
                region,
                scale=config.query_pre_attn_scalar**-0.5,
                soft_cap=config.attn_logit_softcapping,
                window=self.window,
            )
            mixed.append(attended.reshape(region.num_rows, -1))
        rows = jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]
        rows = jnp.pad(rows, ((0, inputs.shape[0] - tokens), (0, 0)))
        return project(rows, self.o_proj[...]), kv_pages


def gate_block(hidden: int) -> int:
    """Rows of gate (and of up) that lie together in the fused projection."""
    return math.gcd(hidden, 128)


class FeedForward(nnx.Module):
    """Gated GELU (tanh form)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        model, hidden = config.hidden_size, config.intermediate_size
        # Gate and up rows alternate in blocks, so that both split alike on a mesh and
        # one matmul serves both.
        self.block = gate_block(hidden)
        self.gate_up_proj = _parameter(
            (2 * hidden, model), ("hidden", "model"), dtype, unit=2 * self.block
        )
        self.down_proj = _parameter((model, hidden), ("model", "hidden"), dtype)

    def __call__(self, inputs: Float[Array, "row model"]) -> Float[Array, "row model"]:
        gate_up = project(inputs, self.gate_up_proj[...])
        gate_up = gate_up.reshape(inputs.shape[0], -1, 2, self.block)
        inner = jax.nn.gelu(gate_up[:, :, 0], approximate=True) * gate_up[:, :, 1]
        return project(inner.reshape(inputs.shape[0], -1), self.down_proj[...])


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised before and after."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        backend: Backend,
    ):
        self.epsilon = config.rms_norm_eps
        self.attention = Attention(config, layer, dtype, backend)
        self.feed_forward = FeedForward(config, dtype)

        def norm() -> nnx.Param:
            return _parameter((config.hidden_size,), ("model",), dtype)

        self.input_norm, self.post_attention_norm = norm(), norm()
        self.pre_feed_forward_norm, self.post_feed_forward_norm = norm(), norm()

    def __call__(
        self,
        stream: Float[Array, "row model"],
        batch: TokenBatch,
        tables: tuple[Array, Array],
        kv_pages: Num[Array, "page page_size two_kv_head head_dim"],
    ) -> tuple[Float[Array, "row model"], Array]:
        normed = rms_norm(stream, self.input_norm[...], self.epsilon)
        mixed, kv_pages = self.attention(normed, batch, tables, kv_pages)
        stream += rms_norm(mixed, self.post_attention_norm[...], self.epsilon)
        normed = rms_norm(stream, self.pre_feed_forward_norm[...], self.epsilon)
        outer = self.feed_forward(normed)
        stream += rms_norm(outer, self.post_feed_forward_norm[...], self.epsilon)
        return stream, kv_pages


class Hidden(NamedTuple):
    """What the layers make of tokens.

    Attributes:
        rows: Normalised.
        is_finite: Rows that came of numbers, without NaN or infinity.
    """

    rows: Float[Array, "token model"]
    is_finite: Bool[Array, " token"]


def _rows_of(
    table: Matrix, tokens: Int[Array, " token"]
) -> Float[Array, "token model"]:
    """Embeddings of tokens, before they are scaled.

    XLA:CPU has no bf16 gather: it converts the whole table first, unless it can fuse
    the two. In a loop it would rather move the conversion out, as the table is always
    the same; that is what the barrier hides.
    """
    if table.dtype == jnp.bfloat16:
        table, tokens = jax.lax.optimization_barrier((table, tokens))
    return table.at[tokens].get(mode="clip").astype(jnp.float32)


class Gemma2(nnx.Module):
    """The whole network, its parameters declared; `models.weights` binds them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        backend: Backend = Backend(),  # noqa: B008 frozen
    ):
        self.config = config
        self.embedding = _parameter(
            (config.vocab_size, config.hidden_size), ("vocab", "model"), dtype
        )
        self.layers = nnx.List(
            Layer(config, layer, dtype, backend) for layer in range(config.num_layers)
        )
        self.final_norm = _parameter((config.hidden_size,), ("model",), dtype)

    def hidden(
        self, batch: TokenBatch, kv_pages: tuple[Array, ...]
    ) -> tuple[Hidden, tuple[Array, ...]]:
        """Run all layers; returns the rows and the updated pages per layer."""
        config = self.config
        table = self.embedding[...]
        # As rows of their own, not as zeros after the scale: XLA joins operations over
        # pads in another way, and other bits come out.
        missing = (0, max(0, MIN_ROWS - batch.tokens.shape[0]))
        rows = _rows_of(table, jnp.pad(batch.tokens, missing))
        # HuggingFace rounds the scale to the weights' type: 59.75 in bf16 for the 9B.
        scale = jnp.sqrt(jnp.float32(config.hidden_size)).astype(table.dtype)
        stream = rows * scale.astype(jnp.float32)
        tables = rope_tables(batch.positions, config.head_dim, config.rope_theta)
        updated = []
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            stream, pages = layer(stream, batch, tables, pages)
            updated.append(pages)
        normed = rms_norm(stream, self.final_norm[...], config.rms_norm_eps)
        # The norm's own statistic: any NaN or infinity of a row makes it one.
        is_finite = jnp.isfinite(mean_square(stream)[:, 0])
        tokens = batch.tokens.shape[0]
        return Hidden(normed[:tokens], is_finite[:tokens]), tuple(updated)

    def logits(self, hidden: Float[Array, "row model"]) -> Float[Array, "row vocab"]:
        """Soft-capped float32 logits of normalised rows, through the tied embedding."""
        rows = hidden.shape[0]
        padded = jnp.pad(hidden, ((0, max(0, MIN_ROWS - rows)), (0, 0)))
        logits = project(padded, self.embedding[...])[:rows]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap


def init_kv_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype
) -> tuple[Num[Array, "page page_size two_kv_head head_dim"], ...]:
    """Zeroed pages, one array per layer."""
    shape = (num_pages, page_size, 2 * config.num_kv_heads, config.head_dim)
    return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
