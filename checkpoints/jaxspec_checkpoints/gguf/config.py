"""Converts GGUF metadata to the content of a HuggingFace `config.json`.

Entries that the format does not store are derived as llama.cpp derives them; see its
`gemma2.cpp` and `gemma3.cpp`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.gguf.file import GgufFile, shown

# Number of layers of the 27B models, whose attention scale llama.cpp derives from the
# hidden size.
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
}
_REQUIRED = object()


class Metadata:
    """Typed access to a file's metadata; keys of the model begin with a dot."""

    def __init__(self, file: GgufFile):
        self._file, self._values = file, file.metadata
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, (str,), "a string")

    def size(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an integer >= 0; for an array, the common value of all layers."""
        name = self._name(key)
        given = self._values.get(name)
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
            values = set(given.tolist())
            if len(values) != 1:
                raise self.wrong(name, "the same integer for all layers", given)
            value = values.pop()
        else:
            value = self._get(key, default, (int,), "an integer")
        if value is not default and value < 0:
            raise self.wrong(name, "an integer of at least 0", value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, (float, int), "a number")

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, (bool,), "a bool")

    def wrong(self, name: str, allowed: str, given: Any) -> CheckpointError:
        """Return the error for a value that cannot be used."""
        return CheckpointError(
            f"{self._file.path}: metadata key {name!r} must be {allowed}, got "
            f"{shown(given)}"
        )

    def _name(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], noun: str) -> Any:
        name = self._name(key)
        value = self._values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) not in kinds:
            raise self.wrong(name, noun, value)
        return value


def read_config(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of `config.json` and of `generation_config.json`.

    Raises:
        CheckpointError: The architecture is not supported, or a key is missing or has a
            value that cannot be used.
    """
    metadata = Metadata(file)
    read = _ARCHITECTURES.get(metadata.architecture)
    if read is None:
        allowed = " or ".join(map(repr, _ARCHITECTURES))
        raise metadata.wrong("general.architecture", allowed, metadata.architecture)
    ends = _end_tokens(file, metadata)
    tokens = {
        "bos_token_id": metadata.size("tokenizer.ggml.bos_token_id", 2),
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": metadata.size("tokenizer.ggml.padding_token_id", 0),
    }
    config = {**_sizes(file, metadata), **tokens, **read(metadata)}
    config["torch_dtype"] = _dtype(file)
    sampling = {name: metadata.number(key, None) for name, key in _SAMPLING.items()}
    chosen = {name: value for name, value in sampling.items() if value is not None}
    if chosen:
        chosen["do_sample"] = True
    return config, {**tokens, **chosen}


def _sizes(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    """Return the config entries that Gemma 2 and Gemma 3 have in common."""
    num_heads = metadata.size(".attention.head_count")
    width = metadata.size(".embedding_length")
    if num_heads < 1:
        name = f"{metadata.architecture}.attention.head_count"
        raise metadata.wrong(name, "at least 1", num_heads)
    head_dim = metadata.size(".attention.key_length", width // num_heads)
    value_dim = metadata.size(".attention.value_length", width // num_heads)
    if value_dim != head_dim:
        name = f"{metadata.architecture}.attention.value_length"
        raise metadata.wrong(name, f"{head_dim}, as key_length", value_dim)
    num_layers = metadata.size(".block_count")
    return {
        "vocab_size": _vocab_size(file),
        "hidden_size": width,
        "intermediate_size": metadata.size(".feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "query_pre_attn_scalar": attention_scalar(
            metadata.architecture,
            num_layers=num_layers,
            hidden_size=width,
            num_heads=num_heads,
            head_dim=head_dim,
        ),
        "max_position_embeddings": metadata.size(".context_length"),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _rope_scaling(metadata),
    }


def attention_scalar(
    architecture: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
) -> int:
    """Return `query_pre_attn_scalar` as llama.cpp derives it; files do not store it."""
    is_27b = num_layers == _LAYERS_27B[architecture]
    return hidden_size // num_heads if is_27b else head_dim


def _vocab_size(file: GgufFile) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight'")
    return file.tensors["token_embd.weight"].shape[0]


def _dtype(file: GgufFile) -> str:
    """Return the type of the unquantized matrices; float32 if they differ."""
    matrices = (one for one in file.tensors.values() if len(one.shape) == 2)
    dtypes = {one.type.dtype.name for one in matrices if one.type.split is None}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    kind = metadata.text(".rope.scaling.type", "linear")
    factor = metadata.number(".rope.scaling.factor", 0)
    # This is the key that old files use. In llama.cpp a factor of 0 means no scaling,
    # as does 1.
    factor = factor or metadata.number(".rope.scale_linear", 0)
    if kind == "none" or factor in (0, 1):
        return None
    if kind != "linear":
        name = f"{metadata.architecture}.rope.scaling.type"
        raise metadata.wrong(name, "'linear' or 'none'", kind)
    return {"rope_type": "linear", "factor": float(factor)}


def _end_tokens(file: GgufFile, metadata: Metadata) -> list[int]:
    """Return the ids that end a text: those in the metadata, and the piece `<eos>`.

    Instruction-tuned files name <end_of_turn> only, but <eos> ends their texts as well.
    """
    named = [
        metadata.size(f"tokenizer.ggml.{name}_token_id", None)
        for name in ("eos", "eot")
    ]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and "<eos>" in tokens[:512]:
        named.append(tokens.index("<eos>"))
    return sorted({token for token in named if token is not None}) or [1]


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "sliding_window": metadata.size(".attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number(".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number(".final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
        "sliding_window": metadata.size(".attention.sliding_window"),
        "sliding_window_pattern": metadata.size(".attention.sliding_window_pattern", 6),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number(".final_logit_softcapping", None),
    }


_ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
