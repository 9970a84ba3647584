"""Writes a whole model into a new folder, atomically (`write_checkpoint`)."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from jaxspec_checkpoints.casting import find_dtype
from jaxspec_checkpoints.checkpoint import Checkpoint
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand, read_json
from jaxspec_checkpoints.kaggle import write_kaggle
from jaxspec_checkpoints.layout import common_dtype
from jaxspec_checkpoints.orbax import write_own
from jaxspec_checkpoints.packing import packed, scheme_of
from jaxspec_checkpoints.quantization import (
    VALUE_TYPES,
    MixedScheme,
    QuantizedTensor,
    named_scheme,
)
from jaxspec_checkpoints.reading import INCOMPLETE
from jaxspec_checkpoints.shards import MAX_SHARD_BYTES, write_huggingface

# Required free space / bytes of the weights. Headers, indexes and metadata are far less
# than 1 % of a model.
_ROOM = 1.01

Writer = Callable[..., None]
_WRITERS: dict[str, Writer] = {
    "hf": write_huggingface,
    "kaggle": write_kaggle,
    "orbax": write_own,
}
FORMATS = tuple(_WRITERS)


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    to: str,
    dtype: str | None = None,
    quantization: str | None = None,
    progress: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model with its tokenizer and settings in one of the formats.

    Everything is written into a hidden folder next to `destination`, which is then
    renamed. Until then `open_checkpoint` rejects it because of a marker file next to
    it. The host holds a few blocks of rows at a time, never a whole tensor or model.

    Args:
        destination: A folder that does not exist yet, in a folder that does.
        to: "hf", "kaggle" or "orbax".
        dtype: Type to cast weights to; None keeps them bit for bit. A quantized model
            is dequantized, to float32 by default.
        quantization: Quantize matrices of layers to "int8", "int4" or "fp8"; names and
            packing are those of compressed-tensors.
        progress: Show a bar with bytes per second.
        max_shard_bytes: Limit of one file of format "hf".

    Raises:
        CheckpointError: `destination` exists, the disk is too small, a tensor is
            damaged or cannot be cast, or a file cannot be written. Nothing is left
            behind.
    """
    destination = expand(destination).absolute()
    if to not in _WRITERS:
        raise CheckpointError(f"to must be one of {', '.join(_WRITERS)}, got {to!r}")
    kind = None if dtype is None else find_dtype(dtype)
    checkpoint = checkpoint.resolved()
    if quantization is not None:
        checkpoint = _quantized(checkpoint, quantization, to=to, dtype=dtype)
    num_bytes = sum(
        tensor.num_bytes // tensor.dtype.itemsize * (kind or tensor.dtype).itemsize
        for tensor in checkpoint.tensors.values()
    )
    _check_destination(checkpoint, destination, num_bytes)
    write = _WRITERS[to]
    if to == "hf":
        write = functools.partial(write, max_shard_bytes=max_shard_bytes)
    if to == "kaggle":
        write = functools.partial(write, layout=checkpoint.layout)
    bar = tqdm(
        total=num_bytes,
        desc=f"Writing {destination.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    write = functools.partial(write, dtype=kind, on_bytes=bar.update)
    try:
        with bar:
            _write(checkpoint, destination, write, kind)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        # TensorStore reports a full disk as a ValueError.
        raise CheckpointError(f"{destination} was not written: {error}") from error


def _quantized(
    checkpoint: Checkpoint, kind: str, *, to: str, dtype: str | None
) -> Checkpoint:
    """Return the same model with quantized, packed matrices.

    Raises:
        CheckpointError: The quantization is unknown, or conflicts with other arguments.
    """
    if kind not in VALUE_TYPES:
        allowed = ", ".join(VALUE_TYPES)
        raise CheckpointError(f"quantization must be one of {allowed}, got {kind!r}")
    if to == "kaggle":
        raise CheckpointError(
            "to must be hf or orbax for a quantized model: Kaggle's format has no "
            "place for scales"
        )
    if dtype is not None:
        raise CheckpointError(
            f"dtype={dtype!r} and quantization={kind!r} exclude each other, as both "
            "set the type of the matrices: give one of them"
        )
    config, tensors = packed(checkpoint.config, checkpoint.tensors, named_scheme(kind))
    return replace(checkpoint, config=config, tensors=tensors)


def _write(
    checkpoint: Checkpoint, destination: Path, write: Writer, kind: np.dtype | None
) -> None:
    """Write into a temporary folder, which is removed in any case, and rename."""
    parent, name = destination.parent, destination.name
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.") as temporary:
        # The marker remains until the folder has been renamed, in one step.
        mark = Path(temporary) / INCOMPLETE
        mark.write_text(
            "This folder is left from an unfinished conversion: delete it.\n"
        )
        folder = Path(temporary) / name
        folder.mkdir()
        write(folder, checkpoint.sizes, checkpoint.tensors)
        _write_side_files(checkpoint, folder, kind)
        _sync(folder)
        folder.rename(destination)
        _sync_one(parent)


def _check_destination(
    checkpoint: Checkpoint, destination: Path, num_bytes: int
) -> None:
    # `lexists`, because a dangling symlink does not `exist`, but its name cannot be
    # used.
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination} exists already: name a folder that does not, or delete it"
        )
    parent = destination.parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent} is not a folder: create it first")
    if parent.resolve().is_relative_to(checkpoint.folder.resolve()):
        raise CheckpointError(
            f"{destination} is inside the source checkpoint {checkpoint.folder}: "
            "name a folder outside it"
        )
    needed = int(num_bytes * _ROOM)
    needed += sum(path.stat().st_size for path in checkpoint.side_files.values())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{destination} needs {needed / 1e9:.3f} GB, and {parent} has "
            f"{free / 1e9:.3f} GB free: free space, or choose another disk"
        )


def _write_side_files(
    checkpoint: Checkpoint, folder: Path, kind: np.dtype | None
) -> None:
    for name, path in checkpoint.side_files.items():
        shutil.copyfile(path, folder / name)
    for name, make in checkpoint.made_files.items():
        (folder / name).write_bytes(make())
    config = dict(checkpoint.config)
    is_mixed = isinstance(scheme_of(config), MixedScheme)
    if is_mixed or any(
        isinstance(one, QuantizedTensor) for one in checkpoint.tensors.values()
    ):
        config.pop("quantization_config", None)  # weights are written dequantized
    config["torch_dtype"] = (kind or common_dtype(checkpoint.tensors)).name
    if "dtype" in config:
        config["dtype"] = config["torch_dtype"]
    copied = checkpoint.side_files.get("config.json")
    if copied is None or config != read_json(copied):
        text = json.dumps(config, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    """Flush a folder's files to disk, so that a renamed folder is always complete."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
