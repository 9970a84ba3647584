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
from jaxtyping import Array, Float

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma2.config import Gemma2Config
from jaxspec.models.layers import attend, mean_square, rope_tables
from jaxspec.models.network import Hidden, Pages
from jaxspec.models.params import Params, ParamSpec, Specs


def param_specs(config: Gemma2Config) -> Specs:
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


def gate_block(config: Gemma2Config) -> int:
    """Rows of gate (and of up) that lie together in the fused projection."""
    return math.gcd(config.intermediate_size, 128)


def forward(
    config: Gemma2Config,
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
            num_q_heads=config.num_q_heads,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            window=config.window(layer),
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
    config: Gemma2Config, params: Params, rows: Float[Array, "row model"]
) -> Float[Array, "row vocab"]:
    """Soft-capped float32 logits of normalised rows, through the tied embedding."""
    found = params["embedding"].multiply(rows)
    cap = config.final_logit_softcapping
    return found if cap is None else jnp.tanh(found / cap) * cap


def feed_forward(
    config: Gemma2Config, params: Params, inputs: Float[Array, "row model"]
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
