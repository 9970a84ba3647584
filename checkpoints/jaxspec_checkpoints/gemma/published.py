"""Tensors of Gemma 2 and 3, and their published sizes and configs.

Folders from Kaggle have no `config.json`; their shapes determine the size.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.layout import EMBEDDING, FlaxForm, Layout, Sizes

# Gemma 2's vocabulary size. Gemma 3 has another tokenizer.
VOCAB_SIZE = 256000
GEMMA3_VOCAB_SIZE = 262144
TURN_MARKERS = ("<start_of_turn>", "<end_of_turn>")
# Rows after the vocabulary in Gemma 2's Flax checkpoints; no token has them.
PAD_ROWS = 128
# Rows of multimodal Gemma 3 after the vocabulary: `<image_soft_token>` and padding.
# Texts have no such token; without these rows all sizes share one vocabulary.
IMAGE_ROWS = 64


def _sizes(vocab_size: int, *numbers: int) -> Sizes:
    names = "hidden_size", "intermediate_size", "num_layers", "num_q_heads"
    names = *names, "num_kv_heads", "head_dim"
    return Sizes(vocab_size=vocab_size, **dict(zip(names, numbers, strict=True)))


_SIZES = {
    "2b": _sizes(VOCAB_SIZE, 2304, 9216, 26, 8, 4, 256),
    "9b": _sizes(VOCAB_SIZE, 3584, 14336, 42, 16, 8, 256),
    "27b": _sizes(VOCAB_SIZE, 4608, 36864, 46, 32, 16, 128),
}
_GEMMA3_SIZES = {
    "270m": _sizes(GEMMA3_VOCAB_SIZE, 640, 2048, 18, 4, 1, 256),
    "1b": _sizes(GEMMA3_VOCAB_SIZE, 1152, 6912, 26, 4, 1, 256),
    "4b": _sizes(GEMMA3_VOCAB_SIZE, 2560, 10240, 34, 8, 4, 256),
    "12b": _sizes(GEMMA3_VOCAB_SIZE, 3840, 15360, 48, 16, 8, 256),
    "27b": _sizes(GEMMA3_VOCAB_SIZE, 5376, 21504, 62, 32, 16, 128),
}
# Queries are divided by the square root of this: head_dim, except for 27B, where it is
# hidden_size divided by the number of heads.
_QUERY_SCALARS = {"2b": 256, "9b": 256, "27b": 144}
_GEMMA3_QUERY_SCALARS = {"270m": 256, "1b": 256, "4b": 256, "12b": 256, "27b": 168}
# Text-only sizes, which have shorter contexts and windows, and unscaled positions.
_GEMMA3_SHORT = ("270m", "1b")

# Defaults for entries that a config.json of Gemma 3 omits: those of transformers'
# `Gemma3TextConfig`. Files of multimodal sizes contain only entries that differ.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": GEMMA3_VOCAB_SIZE + IMAGE_ROWS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_bidirectional_attention": False,
}
# Multimodal models have these text entries outside of `text_config`.
_OUTER = ("bos_token_id", "dtype", "pad_token_id", "quantization_config")
_OUTER += ("tie_word_embeddings", "torch_dtype", "transformers_version")
_OUTER += ("use_bidirectional_attention",)
_OTHER_MODALITIES = ("vision_tower", "multi_modal_projector")


def layer_shapes(
    sizes: Sizes, *, has_qk_norm: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of one layer, by its name within the layer."""
    model, hidden = sizes.hidden_size, sizes.intermediate_size
    queries = sizes.num_q_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
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
    if has_qk_norm:
        shapes["self_attn.q_norm.weight"] = (sizes.head_dim,)
        shapes["self_attn.k_norm.weight"] = (sizes.head_dim,)
    return shapes


def tensor_shapes(
    sizes: Sizes, *, has_qk_norm: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model, by its canonical name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (sizes.vocab_size, sizes.hidden_size)
    }
    for layer in range(sizes.num_layers):
        for name, shape in layer_shapes(sizes, has_qk_norm=has_qk_norm).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes | {"model.norm.weight": (sizes.hidden_size,)}


def published_config(size: str) -> dict[str, Any]:
    """Return HuggingFace's `config.json` of one size of Gemma 2, without the type.

    Both end tokens are given: the instruction-tuned models end a turn with 107, which
    base models do not write. Shapes cannot distinguish the two.
    """
    return _config(_SIZES[size]) | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "query_pre_attn_scalar": _QUERY_SCALARS[size],
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    }


def gemma3_config(size: str) -> dict[str, Any]:
    """Return the text model's `config.json` of one size of Gemma 3, without the type.

    Flat, with the vocabulary that all sizes share. End tokens as in
    `published_config`; Gemma 3's end of a turn is 106.
    """
    is_short = size in _GEMMA3_SHORT
    return _config(_GEMMA3_SIZES[size]) | {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "max_position_embeddings": 32768 if is_short else 131072,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _GEMMA3_QUERY_SCALARS[size],
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None if is_short else {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "sliding_window": 512 if is_short else 1024,
        "sliding_window_pattern": 6,
    }


def _config(sizes: Sizes) -> dict[str, Any]:
    """Return the config entries that Gemma 2 and Gemma 3 have in common."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "head_dim": sizes.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_q_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
        "vocab_size": sizes.vocab_size,
    }


def gemma3_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat config of a Gemma 3's text model, with defaults filled in.

    The 64 rows of multimodal sizes after the vocabulary are left out.

    Raises:
        CheckpointError: `text_config` is not an object.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"config.json: text_config must be an object, got {text!r:.80}"
        )
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    given = {
        name: value for name, value in {**text, **outer}.items() if value is not None
    }
    flat = GEMMA3_DEFAULTS | given
    flat |= dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"])
    kind = text.get("model_type")
    if kind not in (None, *GEMMA3.model_types):
        raise CheckpointError(
            "config.json: text_config.model_type must be 'gemma3_text', got "
            f"{kind!r:.80}"
        )
    ends = [one.get("eos_token_id") for one in (text, config)]
    ends = [one if isinstance(one, list) else [one] for one in ends]
    found = [token for one in ends for token in one if token is not None]
    wrong = [token for token in found if type(token) is not int]
    if wrong:
        raise CheckpointError(
            "config.json: eos_token_id must be an integer or a list of integers, got "
            f"{wrong[0]!r:.80}"
        )
    flat["eos_token_id"] = list(dict.fromkeys(found)) or [1]
    if flat["vocab_size"] == GEMMA3_VOCAB_SIZE + IMAGE_ROWS:
        flat["vocab_size"] = GEMMA3_VOCAB_SIZE
    if isinstance(flat.get("quantization_config"), Mapping):
        flat["quantization_config"] = _of_text(flat["quantization_config"])
    return flat


def _of_text(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Drop modules of other modalities from the list of unquantized modules."""
    kept = dict(quantization)
    for name in ("ignore", "modules_to_not_convert"):
        modules = kept.get(name)
        if isinstance(modules, list):
            kept[name] = [
                str(module).removeprefix("language_model.")
                for module in modules
                if not any(part in str(module) for part in _OTHER_MODALITIES)
            ]
    return kept


def _published_size(name: str, pattern: str, sizes: Mapping[str, Sizes]) -> str | None:
    """Find the size in a name on the Hugging Face Hub or on Kaggle; None without one.

    `google/gemma-2-9b-it` and `google/gemma-2/flax/gemma2-9b` are "9b".
    """
    found = re.search(f"{pattern}-({'|'.join(sizes)})(-it|-pt)?$", name)
    return None if found is None else found[1]


def _gemma2_config_of(name: str) -> dict[str, Any] | None:
    size = _published_size(name, "gemma-?2", _SIZES)
    return None if size is None else published_config(size)


def _gemma3_config_of(name: str) -> dict[str, Any] | None:
    # The unquantized weights of models from quantization-aware training have a longer
    # name.
    name = re.sub("-qat-[a-z0-9_]+-unquantized$", "", name)
    size = _published_size(name, "gemma-?3", _GEMMA3_SIZES)
    return None if size is None else gemma3_config(size)


GEMMA2 = Layout(
    title="Gemma 2",
    model_types=("gemma2",),
    tensor_shapes=tensor_shapes,
    published=_SIZES,
    turn_markers=TURN_MARKERS,
    pad_rows=PAD_ROWS,
    config_of=_gemma2_config_of,
    flax=FlaxForm(
        name="gemma2",
        has_qk_norm=False,
        pad_rows=PAD_ROWS,
        model_first=("2b",),
        config=published_config,
    ),
)
GEMMA3 = Layout(
    title="Gemma 3",
    model_types=("gemma3_text", "gemma3"),
    tensor_shapes=functools.partial(tensor_shapes, has_qk_norm=True),
    published=_GEMMA3_SIZES,
    turn_markers=TURN_MARKERS,
    pad_rows=IMAGE_ROWS,
    config_of=_gemma3_config_of,
    text_config=gemma3_text_config,
    prefixes=("", "model.", "language_model.model.", "model.language_model."),
    skipped=tuple(
        f"{prefix}{name}." for prefix in ("", "model.") for name in _OTHER_MODALITIES
    ),
    flax=FlaxForm(
        name="gemma3",
        has_qk_norm=True,
        pad_rows=0,
        skipped=(
            "SigLiPFromPatches_0/",
            "vision_encoder/",
            "embedder/mm_input_projection/",
            "embedder/mm_soft_embedding_norm/",
        ),
        config=gemma3_config,
    ),
)
# Families that this package supports, by the `model_type` of a config.json.
LAYOUTS = {name: layout for layout in (GEMMA2, GEMMA3) for name in layout.model_types}
