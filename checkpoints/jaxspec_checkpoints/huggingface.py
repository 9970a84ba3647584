"""HuggingFace folders: `model.safetensors`, whole or in shards with an index."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, listing, read_json, side_files
from jaxspec_checkpoints.layout import (
    Layout,
    Sizes,
    check_tensors,
    layout_of,
    must_be_tied,
)
from jaxspec_checkpoints.packing import PACKED_TYPES, scheme_of, unpack
from jaxspec_checkpoints.tensor import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Safetensors' names of the types that numpy has. Any other type is an error that names
# it.
_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
# Types of token ids and masks, which are not weights.
INTEGERS = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}


def is_huggingface(folder: Path) -> bool:
    """Return whether the folder has weights in this format."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def open_huggingface(folder: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    """Check a folder and describe it; no weight is read.

    Raises:
        CheckpointError: A file is missing, truncated or outside the folder, or the
            tensors do not match config.json.
    """
    found = side_files(folder)
    if "config.json" not in found:
        raise CheckpointError(
            f"{folder} has no config.json; found: {listing(folder)}. Copy the whole "
            "folder again"
        )
    config = read_json(found["config.json"])
    layout = layout_of(config, layouts)
    config = layout.text_config(config)
    sizes = Sizes.from_config(config)
    generation = found.get("generation_config.json")
    is_quantized = scheme_of(config) is not None
    tensors = read_tensors(folder, more_types=PACKED_TYPES if is_quantized else {})
    tensors = layout.canonical_tensors(tensors, sizes.vocab_size)
    tensors = unpack(config, tensors)
    check_tensors(layout, sizes, tensors, is_tied=must_be_tied(config))
    return Checkpoint(
        format="hf",
        layout=layout,
        folder=folder,
        config=config,
        generation_config=read_json(generation) if generation else {},
        tensors=tensors,
        side_files=found,
    )


def huggingface_names(folder: Path) -> list[str]:
    """Return the names of a folder's tensors, as its files spell them.

    Raises:
        CheckpointError: The file or index that lists them cannot be read.
    """
    if not (folder / SINGLE).is_file():
        return list(_weight_map(folder / INDEX))
    try:
        return list(safe_open(folder / SINGLE, framework="numpy").keys())
    except (SafetensorError, OSError) as error:
        message = f"{folder / SINGLE} is not a readable safetensors file: {error}"
        raise CheckpointError(message) from error


def read_tensors(
    folder: str | Path,
    *,
    file: str = SINGLE,
    more_types: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return every tensor of a folder by name; bytes are read on demand.

    Args:
        file: Name of the single file, if there is no index.
        more_types: Allowed in addition to those of weights, such as `INTEGERS`.

    Raises:
        CheckpointError: There is no `model.safetensors` or index, a shard is missing
            or truncated, or something points outside the folder.
    """
    folder = Path(folder)
    types = {**_DTYPES, **more_types}
    if (folder / file).is_file():
        return _open_file(check_inside(folder, folder / file), types)
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}; found: {listing(folder)}. "
            "Copy the whole folder again"
        )
    return _open_shards(folder, _weight_map(folder / INDEX), types)


def _open_shards(
    folder: Path, weight_map: dict[str, str], types: Mapping[str, Any]
) -> dict[str, Tensor]:
    index = folder / INDEX
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(
                f"{index} points outside its folder: {shard!r}. Shards must be "
                "files in the same folder"
            )
        if not (folder / shard).is_file():
            raise CheckpointError(
                f"{index} names {shard}, which is not in the folder: fetch it again"
            )
        file = _open_file(check_inside(folder, folder / shard), types)
        for name, tensor in file.items():
            if name not in weight_map:
                raise CheckpointError(
                    f"{shard} holds tensor {name!r}, which {INDEX} does not list: "
                    "fetch both files again"
                )
            if weight_map[name] == shard:
                tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"{index} says that {shard} holds tensor {name!r}, but it does not: "
                "fetch both files again"
            )
    return tensors


def _open_file(path: Path, types: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        file = safe_open(path, framework="numpy")
        return {name: _describe(path, file, name, types) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        message = f"{path} is not a readable safetensors file: {error}"
        raise CheckpointError(message) from error


def _describe(path: Path, file: Any, name: str, types: Mapping[str, Any]) -> Tensor:
    rows = file.get_slice(name)
    kind, shape = rows.get_dtype(), tuple(rows.get_shape())
    if kind not in types:
        raise CheckpointError(
            f"tensor {name!r} has type {kind}, expected one of "
            f"{', '.join(types)} ({path})"
        )

    def read_rows(start: int, stop: int) -> np.ndarray:
        # A tensor without axes has no rows.
        return rows[start:stop] if shape else file.get_tensor(name)

    dtype = np.dtype(types[kind])
    read: Callable[[int, int], np.ndarray] = read_rows
    if kind == "F8_E4M3":
        read = _byte_reader(path, name, shape, dtype)
    return Tensor(shape=shape, dtype=dtype, source=f"{path}:{name}", read=read)


def _byte_reader(
    path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> Callable[[int, int], np.ndarray]:
    """Return a reader of rows of a one-byte type that the library cannot load."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64))

    def read(start: int, stop: int) -> np.ndarray:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            begin, _ = json.loads(file.read(size))[name]["data_offsets"]
            file.seek(8 + size + begin + start * row_bytes)
            found = file.read((stop - start) * row_bytes)
        return np.frombuffer(found, dtype).reshape(-1, *shape[1:])

    return read


def _weight_map(index: Path) -> dict[str, str]:
    check_inside(index.parent, index)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        message = (
            f"{index} is not an index: it needs a `weight_map` of tensors to files"
        )
        raise CheckpointError(message)
    return weight_map
