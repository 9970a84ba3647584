"""Gemma 2 over paged KV memory, as functions over a tree of parameters.

Owns the network and what parameters it has; knows nothing of sampling, scheduling or
files. Constants and order of operations follow Gemma Team 2024, arXiv:2408.00118, and
where the report is silent, HuggingFace's `Gemma2ForCausalLM` with eager attention.

Parameters have one type (float32 or bfloat16) and are matmul operands in it; the
residual stream, norms, attention statistics and logits are float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxspec.config import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.network import Hidden, Pages
from jaxspec.models.params import Params, ParamSpec, Specs
from jaxspec_kernels.sums import row_sums

Tables = tuple[Float[Array, "token 1 half"], Float[Array, "token 1 half"]]


def param_specs(config: ModelConfig) -> Specs:
    """Every parameter and the canonical tensors that it is made of."""
    model, hidden = config.hidden_size, config.intermediate_size
    queries, head = config.num_q_heads * config.head_dim, config.head_dim
    keys = config.num_kv_heads * head

    def norm(name: str) -> ParamSpec:
        return ParamSpec(shape=(model,), axes=("model",), tensors=(f"{name}.weight",))

    specs: Specs = {
        ("embedding",): ParamSpec(
            shape=(config.vocab_size, model),
            axes=("vocab", "model"),
            tensors=("model.embed_tokens.weight",),
        ),
        ("final_norm",): norm("model.norm"),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        named = {
            # A head's key rows, then its value rows: the order of the pages.
            "attention/kv_proj": ParamSpec(
                shape=(2 * keys, model),
                axes=("kv_head", "model"),
                unit=2 * head,
                tensors=(f"{attention}k_proj.weight", f"{attention}v_proj.weight"),
            ),
            "attention/o_proj": ParamSpec(
                shape=(model, queries),
                axes=("model", "q_head"),
                unit=head,
                tensors=(f"{attention}o_proj.weight",),
            ),
            "attention/q_proj": ParamSpec(
                shape=(queries, model),
                axes=("q_head", "model"),
                unit=head,
                tensors=(f"{attention}q_proj.weight",),
            ),
            "feed_forward/down_proj": ParamSpec(
                shape=(model, hidden),
                axes=("model", "hidden"),
                tensors=(f"{mlp}down_proj.weight",),
            ),
            # Gate and up rows alternate in blocks, so that both split alike on a mesh
            # and one matmul serves both.
            "feed_forward/gate_up_proj": ParamSpec(
                shape=(2 * hidden, model),
                axes=("hidden", "model"),
                unit=2 * gate_block(config),
                tensors=(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
            ),
            "input_norm": norm(f"{prefix}input_layernorm"),
            "post_attention_norm": norm(f"{prefix}post_attention_layernorm"),
            "post_feed_forward_norm": norm(f"{prefix}post_feedforward_layernorm"),
            "pre_feed_forward_norm": norm(f"{prefix}pre_feedforward_layernorm"),
        }
        for name, spec in named.items():
            specs["layers", str(layer), *name.split("/")] = spec
    return specs


def gate_block(config: ModelConfig) -> int:
    """Rows of gate (and of up) that lie together in the fused projection."""
    return math.gcd(config.intermediate_size, 128)


def forward(
    config: ModelConfig,
    params: Params,
    batch: TokenBatch,
    kv_pages: Pages,
    backend: Backend,
) -> tuple[Hidden, Pages]:
    """Run all layers; returns the rows and the updated pages per layer."""
    embedding = params["embedding"]
    # HuggingFace rounds the scale to the weights' type: 59.75 in bf16 for the 9B.
    scale = jnp.sqrt(jnp.float32(config.hidden_size)).astype(embedding.dtype)
    stream = embedding.rows(batch.tokens) * scale.astype(jnp.float32)
    tables = rope_tables(batch.positions, config.head_dim, config.rope_theta)
    updated = []
    for layer, pages in zip(range(config.num_layers), kv_pages, strict=True):
        own = params["layers"][str(layer)]
        normed = rms_norm(stream, own["input_norm"], config.rms_norm_eps)
        mixed, pages = attend(
            own["attention"],
            normed,
            pages,
            batch=batch,
            tables=tables,
            config=config,
            layer=layer,
            backend=backend,
        )
        updated.append(pages)
        stream += rms_norm(mixed, own["post_attention_norm"], config.rms_norm_eps)
        normed = rms_norm(stream, own["pre_feed_forward_norm"], config.rms_norm_eps)
        outer = feed_forward(config, own["feed_forward"], normed)
        stream += rms_norm(outer, own["post_feed_forward_norm"], config.rms_norm_eps)
    normed = rms_norm(stream, params["final_norm"], config.rms_norm_eps)
    # The norm's own statistic: any NaN or infinity of a row makes it one.
    is_finite = jnp.isfinite(mean_square(stream)[:, 0])
    return Hidden(normed, is_finite), tuple(updated)


def logits(
    config: ModelConfig, params: Params, rows: Float[Array, "row model"]
) -> Float[Array, "row vocab"]:
    """Soft-capped float32 logits of normalised rows, through the tied embedding."""
    found = params["embedding"].multiply(rows)
    cap = config.final_logit_softcapping
    return found if cap is None else jnp.tanh(found / cap) * cap


def attend(
    params: Params,
    inputs: Float[Array, "row model"],
    kv_pages: Num[Array, "page page_size two_kv_head head_dim"],
    *,
    batch: TokenBatch,
    tables: Tables,
    config: ModelConfig,
    layer: int,
    backend: Backend,
) -> tuple[Float[Array, "row model"], Array]:
    """Write the new keys and values, then attend; returns (output, kv_pages).

    Grouped-query attention with soft-capped scores. Rows in no region are pads.
    """
    tokens = inputs.shape[0]
    query = params["q_proj"].multiply(inputs).reshape(tokens, -1, config.head_dim)
    key_value = params["kv_proj"].multiply(inputs)
    key_value = key_value.reshape(tokens, -1, 2, config.head_dim)
    # In the type of the pages: float32 queries on bfloat16 keys would take products
    # that no tensor core has, and HuggingFace rounds them too.
    query = rotate(query, tables).astype(params["q_proj"].dtype)
    key, value = rotate(key_value[:, :, 0], tables), key_value[:, :, 1]
    kv_pages = backend.write(
        kv_pages, key, value, batch.slot_mapping, config.num_q_heads
    )
    mixed, start = [], 0
    for region in batch.regions:
        here = query[start : start + region.num_rows]
        start += region.num_rows
        attended = backend.attend(
            here.reshape(-1, region.num_queries, *here.shape[1:]),
            kv_pages,
            region,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            window=config.window(layer),
        )
        mixed.append(attended.reshape(region.num_rows, -1))
    rows = jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0]
    rows = jnp.pad(rows, ((0, tokens - start), (0, 0)))
    return params["o_proj"].multiply(rows), kv_pages


def feed_forward(
    config: ModelConfig, params: Params, inputs: Float[Array, "row model"]
) -> Float[Array, "row model"]:
    """Gated GELU (tanh form)."""
    gate_up = params["gate_up_proj"].multiply(inputs)
    gate_up = gate_up.reshape(inputs.shape[0], -1, 2, gate_block(config))
    inner = jax.nn.gelu(gate_up[:, :, 0], approximate=True) * gate_up[:, :, 1]
    return params["down_proj"].multiply(inner.reshape(inputs.shape[0], -1))


def rms_norm(
    inputs: Float[Array, "... model"], weight: Float[Array, " model"], epsilon: float
) -> Float[Array, "... model"]:
    """Normalise in float32 and scale by 1 + weight, Gemma's form."""
    scale = jnp.expand_dims(1.0 + weight.astype(jnp.float32), range(inputs.ndim - 1))
    return inputs * jax.lax.rsqrt(mean_square(inputs) + epsilon) * scale


def mean_square(inputs: Float[Array, "... model"]) -> Float[Array, "... 1"]:
    """Of every row, the variance that its norm divides by."""
    return row_sums(jnp.square(inputs)) / inputs.shape[-1]


def rope_tables(positions: Int[Array, " token"], head_dim: int, theta: float) -> Tables:
    """Cosine and sine of every position's angles, in float32.

    bf16 would round position 257 to 256, and sin(257) is not sin(256).
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
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
