"""HuggingFace folders: `model.safetensors`, whole or in shards with an index."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open


class CheckpointError(ValueError):
    """A checkpoint cannot be read: what was found, where, and what was expected."""


def read_tensors(folder: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a folder, one at a time.

    Raises:
        CheckpointError: There is no `model.safetensors` or index, a shard is missing
            or truncated, or the index points outside the folder.
    """
    for path in _files(Path(folder)):
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            message = f"{path} is no readable safetensors file: {error}"
            raise CheckpointError(message) from error


def _files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = (
            sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        )
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor {index.name}; "
            f"found: {', '.join(found) or 'nothing'}"
        )
    shards = _shards(index)
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} points outside its folder: {shard!r}")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names {shard}, which is not in the folder")
    return [folder / shard for shard in shards]


def _shards(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(shard) for shard in weight_map.values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{index} is no index: it needs a `weight_map` of tensors to files"
        raise CheckpointError(message) from error
