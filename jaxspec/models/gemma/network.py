"""Gemma 2 and 3 over paged KV memory, as functions over a tree of parameters.

Owns the network and its parameter declarations, without sampling, scheduling or files.
Constants and order of operations follow Gemma Team 2024, arXiv:2408.00118, and 2025,
arXiv:2503.19786; where the reports are silent, HuggingFace's `Gemma2ForCausalLM` and
`Gemma3ForCausalLM` with eager attention.

Differences between the generations are in the config: norms of heads (`has_qk_norm`),
soft caps, which layers are local (`window`), and the rotary embedding of each (`rope`).

Parameters have one type (float32 or bfloat16) and are matmul operands in it; the
residual stream, norms, attention statistics and logits are float32.
"""

import functools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.models.backend import Backend
from jaxspec.models.batch import TokenBatch
from jaxspec.models.gemma.config import GemmaConfig
from jaxspec.models.layers import (
    attention_block,
    feed_forward_block,
    gate_block,
    mean_square,
    normalise,
    rope_tables,
)
from jaxspec.models.network import ForwardOutput, Pages
from jaxspec.models.params import Params, ParamSpec, Specs
from jaxspec.models.stack import run_layers
from jaxspec_checkpoints.layout import HEAD
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import GELU, Norm

# A layer's parameters, and the canonical tensors that make up each.
_LAYER_TENSORS = {
    "attention/kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention/o_proj": ("self_attn.o_proj",),
    "attention/q_proj": ("self_attn.q_proj",),
    "feed_forward/down_proj": ("mlp.down_proj",),
    "feed_forward/gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "input_norm": ("input_layernorm",),
    "post_attention_norm": ("post_attention_layernorm",),
    "post_feed_forward_norm": ("post_feedforward_layernorm",),
    "pre_feed_forward_norm": ("pre_feedforward_layernorm",),
}
# One weight of head_dim, for all heads of a layer.
_QK_NORM_TENSORS = {
    "k_norm": ("self_attn.k_norm",),
    "q_norm": ("self_attn.q_norm",),
}


def param_specs(config: GemmaConfig) -> Specs:
    """Declare every parameter: shape, logical axes, split unit, tensors."""
    model, hidden, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_q_heads * head, config.num_kv_heads * head
    blocks = 2 * gate_block(hidden)
    norm = (model,), ("model",), 1
    tensors_of_layer = _LAYER_TENSORS | (_QK_NORM_TENSORS if config.has_qk_norm else {})
    forms: dict[str, Any] = dict.fromkeys(_QK_NORM_TENSORS, ((head,), (None,), 1))
    forms |= {
        # A head's key rows, then its value rows: the order of the pages.
        "attention/kv_proj": ((2 * keys, model), ("kv_head", "model"), 2 * head),
        "attention/o_proj": ((model, queries), ("model", "q_head"), head),
        "attention/q_proj": ((queries, model), ("q_head", "model"), head),
        "feed_forward/down_proj": ((model, hidden), ("model", "hidden"), 1),
        # Gate and up rows alternate in blocks, so that both split alike on a mesh and
        # one matmul serves both.
        "feed_forward/gate_up_proj": ((2 * hidden, model), ("hidden", "model"), blocks),
    }

    def spec(form: Any, *names: str) -> ParamSpec:
        tensors = tuple(f"model.{name}.weight" for name in names)
        return ParamSpec(shape=form[0], axes=form[1], unit=form[2], tensors=tensors)

    vocab = (config.vocab_size, model), ("vocab", "model"), 1
    specs: Specs = {
        ("embedding",): spec(vocab, "embed_tokens"),
        ("final_norm",): spec(norm, "norm"),
    }
    for layer in range(config.num_layers):
        for path, names in tensors_of_layer.items():
            named = (f"layers.{layer}.{name}" for name in names)
            whole = "layers", str(layer), *path.split("/")
            specs[whole] = spec(forms.get(path, norm), *named)
    if not config.tie_word_embeddings:
        specs["head",] = replace(specs["embedding",], tensors=(HEAD,))
    return specs


def forward(
    config: GemmaConfig,
    params: Params,
    batch: TokenBatch,
    kv_pages: Pages,
    backend: Backend,
) -> tuple[ForwardOutput, Pages]:
    """Run all layers; return their output and the updated pages per layer."""
    embedding = params["embedding"]
    # HuggingFace rounds the scale to the weights' type: 59.75 in bf16 for the 9B.
    scale = jnp.sqrt(jnp.float32(config.hidden_size)).astype(embedding.dtype)
    stream = embedding.rows(batch.tokens) * scale.astype(jnp.float32)
    tables = {
        rope: rope_tables(batch.positions, config.head_dim, rope.theta, rope.factor)
        for rope in dict.fromkeys((config.local_rope, config.global_rope))
    }
    # Gemma's norms scale by 1 + weight.
    norm = functools.partial(Norm, epsilon=config.rms_norm_eps, offset=1.0)

    def run(
        layer: int,
        layer_params: Params,
        stream: Array,
        batch: TokenBatch,
        pages: KvPages,
    ) -> tuple[Array, KvPages]:
        stream, pages = attention_block(
            layer_params["attention"],
            stream,
            pages,
            before=norm(layer_params["input_norm"]),
            after=norm(layer_params["post_attention_norm"]),
            batch=batch,
            tables=tables[config.rope(layer)],
            num_q_heads=config.num_q_heads,
            q_norm=norm(layer_params["q_norm"]) if config.has_qk_norm else None,
            k_norm=norm(layer_params["k_norm"]) if config.has_qk_norm else None,
            scale=config.query_pre_attn_scalar**-0.5,
            soft_cap=config.attn_logit_softcapping,
            window=config.window(layer),
            backend=backend,
        )
        stream = feed_forward_block(
            layer_params["feed_forward"],
            stream,
            before=norm(layer_params["pre_feed_forward_norm"]),
            after=norm(layer_params["post_feed_forward_norm"]),
            activation=GELU,
            backend=backend,
            is_used=batch.is_used,
        )
        return stream, pages

    streams, kv_pages = run_layers(config, params, stream, batch, kv_pages, run)
    stream = streams[-1]
    normed = normalise(norm(params["final_norm"]), stream)
    # Tested on the variance that the final norm computes anyway: a NaN or infinity in a
    # row makes it NaN or infinite.
    is_finite = jnp.isfinite(mean_square(stream)[:, 0])
    return ForwardOutput(normed, is_finite, streams), kv_pages


def logits(
    config: GemmaConfig, params: Params, rows: Float[Array, "row model"]
) -> Float[Array, "row _"]:
    """Return float32 logits of normalised rows, soft-capped if the config has a cap.

    The rows are multiplied by the tied embedding, an untied head, or a trimmed one
    (`jaxspec.models.trimmed`).
    """
    found = params.get("head", params["embedding"]).multiply(rows)
    cap = config.final_logit_softcapping
    return found if cap is None else jnp.tanh(found / cap) * cap
