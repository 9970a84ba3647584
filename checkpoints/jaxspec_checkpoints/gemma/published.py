"""Owns what tensors Gemma 2 has, and what was published: sizes and `config.json`.

Folders from Kaggle have no `config.json`; their shapes tell which size it is.
"""

import re
from typing import Any

from jaxspec_checkpoints.layout import EMBEDDING, Layout, Sizes

VOCAB_SIZE = 256000
TURN_MARKERS = ("<start_of_turn>", "<end_of_turn>")
# Rows that the Flax trees have after the vocabulary; no token has them.
PAD_ROWS = 128

_SIZES = {
    "2b": Sizes(
        vocab_size=VOCAB_SIZE,
        hidden_size=2304,
        intermediate_size=9216,
        num_layers=26,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=256,
    ),
    "9b": Sizes(
        vocab_size=VOCAB_SIZE,
        hidden_size=3584,
        intermediate_size=14336,
        num_layers=42,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=256,
    ),
    "27b": Sizes(
        vocab_size=VOCAB_SIZE,
        hidden_size=4608,
        intermediate_size=36864,
        num_layers=46,
        num_q_heads=32,
        num_kv_heads=16,
        head_dim=128,
    ),
}
# Queries are divided by the root of this: the size of a head, but in 27B the width of
# the model over the number of heads.
_QUERY_SCALARS = {"2b": 256, "9b": 256, "27b": 144}


def layer_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of one layer, by its name within the layer."""
    model, hidden = sizes.hidden_size, sizes.intermediate_size
    queries = sizes.num_q_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    return {
        "input_layernorm.weight": (model,),
        "post_attention_layernorm.weight": (model,),
        "pre_feedforward_layernorm.weight": (model,),
        "post_feedforward_layernorm.weight": (model,),
        "self_attn.q_proj.weight": (queries, model),
        "self_attn.k_proj.weight": (keys, model),
        "self_attn.v_proj.weight": (keys, model),
        "self_attn.o_proj.weight": (model, queries),
        "mlp.gate_proj.weight": (hidden, model),
        "mlp.up_proj.weight": (hidden, model),
        "mlp.down_proj.weight": (model, hidden),
    }


def tensor_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model, by its canonical name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (sizes.vocab_size, sizes.hidden_size)
    }
    for layer in range(sizes.num_layers):
        for name, shape in layer_shapes(sizes).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes | {"model.norm.weight": (sizes.hidden_size,)}


def published_config(size: str) -> dict[str, Any]:
    """Return the content of HuggingFace's `config.json` of one size, but for the type.

    The instruction-tuned models stop at 107 as well; in a base model it is no end that
    hurts. The shapes cannot tell the two apart, so both ids are given.
    """
    sizes = _SIZES[size]
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": sizes.head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": sizes.num_q_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "pad_token_id": 0,
        "query_pre_attn_scalar": _QUERY_SCALARS[size],
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "use_cache": True,
        "vocab_size": sizes.vocab_size,
    }


def published_size(name: str) -> str | None:
    """The size that a name on the Hugging Face Hub or on Kaggle tells, if it is one.

    `google/gemma-2-9b-it` and `google/gemma-2/flax/gemma2-9b` are "9b".
    """
    found = re.search(rf"gemma-?2-({'|'.join(_SIZES)})(-it)?$", name)
    return None if found is None else found[1]


def _config_of(name: str) -> dict[str, Any] | None:
    size = published_size(name)
    return None if size is None else published_config(size)


GEMMA2 = Layout(
    title="Gemma 2",
    tensor_shapes=tensor_shapes,
    published=_SIZES,
    turn_markers=TURN_MARKERS,
    pad_rows=PAD_ROWS,
    config_of=_config_of,
)


def is_gating_model_first(sizes: Sizes) -> bool:
    """Whether the Flax tree of this size has `gating_einsum` as (2, model, hidden).

    That is so in the 2B only; the others have (2, hidden, model).
    """
    return GEMMA2.published_name(sizes) == "2b"
