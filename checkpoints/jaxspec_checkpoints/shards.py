"""Writes HuggingFace's safetensors files, a block of rows at a time.

The library's own writer needs whole files in memory. The format is a length, a JSON
header, and the bytes in the order of the header.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxspec_checkpoints.casting import cast_blocks
from jaxspec_checkpoints.layout import Sizes
from jaxspec_checkpoints.packing import PACKED_TYPES
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES |= {np.dtype(kind).name: name for name, kind in PACKED_TYPES.items()}


def write_huggingface(
    folder: Path,
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    *,
    dtype: np.dtype | None,
    on_bytes: Callable[[int], object],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `model.safetensors`, or shards and their index if there are several.

    Args:
        dtype: Type to cast values to; None keeps each tensor's own.
        on_bytes: Called with the number of bytes after each write.
        max_shard_bytes: Limit of a shard, except for a single larger tensor.

    Raises:
        CheckpointError: A tensor is damaged or cannot be cast.
    """
    del sizes  # an argument of every writer
    kinds = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
    num_bytes = {
        name: tensor.num_bytes // tensor.dtype.itemsize * kinds[name].itemsize
        for name, tensor in tensors.items()
    }
    shards: list[list[str]] = [[]]
    for name in tensors:
        held = sum(num_bytes[other] for other in shards[-1])
        if shards[-1] and held + num_bytes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        weight_map |= dict.fromkeys(names, file)
        held_tensors = {name: tensors[name] for name in names}
        _write_file(folder / file, held_tensors, kinds, on_bytes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(num_bytes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, np.dtype],
    on_bytes: Callable[[int], object],
) -> None:
    # Readers expect the widest types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: -kinds[name].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, kind = tensors[name], kinds[name]
        start = end
        end += tensor.num_bytes // tensor.dtype.itemsize * kind.itemsize
        header[name] = {
            "dtype": _DTYPES[kind.name],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name in names:
            tensor = tensors[name]
            rows = max(1, BLOCK_BYTES * tensor.shape[0] // tensor.num_bytes)
            for _, values in cast_blocks(name, tensor, dtype=kinds[name], rows=rows):
                file.write(values.view(np.uint8).data)
                on_bytes(values.nbytes)
