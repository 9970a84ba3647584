"""Writes a Gemma 2 or Gemma 3 model as a GGUF file, as llama.cpp reads it.

Norms are float32 and include the 1 of Gemma's `1 + weight`. Matrices are bfloat16, but
a matrix of 8-bit integers in groups of 32 is written as Q8_0 without a change.
Source: docs/gguf.md of ggml; `gemma.py` of llama.cpp's converter.
"""

import math
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand
from jaxspec_checkpoints.gguf.config import attention_scalar
from jaxspec_checkpoints.gguf.file import SUFFIX, read_gguf
from jaxspec_checkpoints.gguf.reading import find_gguf, stored_name
from jaxspec_checkpoints.gguf.tokenizer import tokenizer_metadata as metadata_of
from jaxspec_checkpoints.quantization import QuantizedTensor
from jaxspec_checkpoints.reading import model_files
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

_ALIGNMENT, _VERSION = 32, 3
# Numbers of the types of values and of tensors.
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32, _Q8_0, _BF16 = 0, 8, 30
_Q8_0_GROUP = 32
_FILE_TYPE_BF16 = 32
# `model_type` of a config.json -> `general.architecture`.
_ARCHITECTURES = {"gemma2": "gemma2", "gemma3_text": "gemma3", "gemma3": "gemma3"}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_FLOATS = ("epsilon", "softcapping")
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Period of global layers that llama.cpp assumes if the file names none.
_PERIODS = {"gemma2": 2, "gemma3": 6}


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that describe a model, except its tokenizer.

    Args:
        config: Content of a flat HuggingFace `config.json`.

    Raises:
        CheckpointError: llama.cpp would compute another network: the architecture, the
            attention scale, the pattern of layers or the rotary embedding has no key.
    """
    architecture = _ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None:
        raise _cannot("model_type", " or ".join(map(repr, _ARCHITECTURES)), config)
    found: dict[str, Any] = {
        "general.architecture": architecture,
        "general.alignment": _ALIGNMENT,
        "general.file_type": _FILE_TYPE_BF16,
    }
    for key, name in _KEYS.items():
        value = config.get(name)
        if value is not None:
            is_float = key.endswith(_FLOATS)
            found[f"{architecture}.{key}"] = float(value) if is_float else int(value)
    scalar = attention_scalar(
        architecture,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
    )
    if config.get("query_pre_attn_scalar", scalar) != scalar:
        raise _cannot("query_pre_attn_scalar", f"{scalar}", config)
    period = _period(config, _PERIODS[architecture])
    if period != _PERIODS[architecture]:
        found[f"{architecture}.attention.sliding_window_pattern"] = period
    if architecture == "gemma2" and period != _PERIODS[architecture]:
        raise _cannot("layer_types", "alternating, local layers first", config)
    found |= _rope(architecture, config)
    return found


def _cannot(name: str, allowed: str, config: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"a GGUF file cannot describe {name}={config.get(name)!r}: llama.cpp computes "
        f"{allowed} only. Write safetensors instead"
    )


def _period(config: Mapping[str, Any], default: int) -> int:
    """Return the period of global layers; each one is the last of its period."""
    kinds = config.get("layer_types")
    if kinds is None:
        return int(config.get("sliding_window_pattern") or default)
    are_local = [kind == _LOCAL for kind in kinds]
    for period in (default, *range(1, len(are_local) + 2)):
        if are_local == [bool((n + 1) % period) for n in range(len(are_local))]:
            return period
    raise _cannot("layer_types", "layers of which every Nth is global", config)


def _rope(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary embeddings, from either spelling in a `config.json`."""
    whole, local = config, {"rope_theta": config.get("rope_local_base_freq")}
    scaling = config.get("rope_scaling") or {}
    parameters = config.get("rope_parameters")
    if parameters:
        whole = scaling = parameters.get(_GLOBAL, parameters)
        local = parameters.get(_LOCAL, {})
    found = {}
    for key, part in (("freq_base", whole), ("freq_base_swa", local)):
        theta = part.get("rope_theta")
        if theta is not None:
            found[f"{architecture}.rope.{key}"] = float(theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear") or local.get("factor", 1) != 1:
        raise _cannot(
            "rope_parameters" if parameters else "rope_scaling",
            "linear scaling, of global layers",
            config,
        )
    if kind == "linear":
        found[f"{architecture}.rope.scaling.type"] = "linear"
        found[f"{architecture}.rope.scaling.factor"] = float(scaling["factor"])
    return found


def tokenizer_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata that describe the tokenizer of a model.

    Args:
        path: A GGUF file, whose metadata are copied, or a folder with one or with a
            `tokenizer.model`.

    Raises:
        CheckpointError: There is neither.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        metadata = read_gguf(gguf).metadata
        found = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
        if "tokenizer.ggml.tokens" in found:
            return found
    files = {} if path.is_file() else model_files(path)
    if "tokenizer.model" not in files:
        raise CheckpointError(
            f"{path} has no tokenizer.model, which a GGUF file needs: copy the "
            "published one there, or write safetensors instead"
        )
    return metadata_of(files["tokenizer.model"].read_bytes())


def write_gguf(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    tokenizer: Mapping[str, Any],
    made_files: Mapping[str, Callable[[], bytes]] | None = None,
) -> Path:
    """Write a model into a new folder, atomically; return the file.

    Args:
        config: Content of a flat HuggingFace `config.json`.
        tensors: By canonical name.
        tokenizer: See `tokenizer_metadata`.
        made_files: Functions that return the contents of files for the same folder.

    Raises:
        CheckpointError: The folder exists, the model has no form in this format, or the
            files cannot be written. Nothing is left behind then.
    """
    folder = expand(folder).absolute()
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists already: name a folder that does not, or delete it"
        )
    metadata = {**model_metadata(config), **tokenizer}
    name = f"{folder.name}{SUFFIX}"
    try:
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}."
        ) as temporary:
            inside = Path(temporary) / folder.name
            inside.mkdir()
            with (inside / name).open("wb") as stream:
                _write(stream, metadata, tensors)
            for other, make in (made_files or {}).items():
                (inside / other).write_bytes(make())
            inside.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} was not written: {error}") from error
    return folder / name


def _write(
    stream: BinaryIO, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    header = bytearray(b"GGUF")
    header += struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    kinds, offset = {name: _kind(one) for name, one in tensors.items()}, 0
    for name, tensor in tensors.items():
        sizes = tuple(reversed(tensor.shape))
        header += _string(stored_name(name))
        header += struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        header += struct.pack("<IQ", kinds[name], offset)
        offset += _padded(_num_bytes(tensor, kinds[name]))
    stream.write(header + bytes(_padded(len(header)) - len(header)))
    for name, tensor in tensors.items():
        written = 0
        for data in _data(tensor, kinds[name]):
            written += stream.write(data)
        assert written == _num_bytes(tensor, kinds[name]), name
        stream.write(bytes(_padded(written) - written))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _kind(tensor: Tensor) -> int:
    if len(tensor.shape) == 1:
        return _F32
    if isinstance(tensor, QuantizedTensor):
        num_groups = tensor.scales.shape[1]
        is_int8 = tensor.values.dtype == np.int8
        if is_int8 and tensor.shape[1] == num_groups * _Q8_0_GROUP:
            return _Q8_0
    return _BF16


def _num_bytes(tensor: Tensor, kind: int) -> int:
    count = math.prod(tensor.shape)
    if kind == _Q8_0:
        return count // _Q8_0_GROUP * (_Q8_0_GROUP + 2)
    return count * (4 if kind == _F32 else 2)


def _data(tensor: Tensor, kind: int) -> Iterator[bytes]:
    if kind == _F32:
        assert tensor.shape, "a vector"
        # All vectors of Gemma models are norms, which scale by 1 + weight.
        values = tensor.whole().astype(np.float32) + np.float32(1)
        yield values.astype("<f4").tobytes()
    elif kind == _BF16:
        for _, rows in tensor.blocks():
            yield rows.astype(ml_dtypes.bfloat16).tobytes()
    else:
        assert isinstance(tensor, QuantizedTensor)
        step = max(1, BLOCK_BYTES // tensor.shape[1])
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            scales = tensor.scales.read(start, stop).astype("<f2")
            values = tensor.values.read(start, stop)
            blocks = np.concatenate(
                [
                    scales[..., None].view(np.uint8),
                    values.reshape(*scales.shape, _Q8_0_GROUP).view(np.uint8),
                ],
                axis=-1,
            )
            yield blocks.tobytes()


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, list):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(map(_string, value))
    assert isinstance(value, np.ndarray), type(value)
    kind, dtype = (_FLOAT32, "<f4") if value.dtype.kind == "f" else (_INT32, "<i4")
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return head + value.astype(dtype).tobytes()
