"""Our own folders: an Orbax tree of canonical names, with the hash of every tensor.

jaxspec_checkpoint.json    version; shape, type and sha256 of every tensor
weights/                   what `orbax.checkpoint` restores as a flat dict
config.json, tokenizer.model, ...
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec_checkpoints.casting import cast_blocks
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
from jaxspec_checkpoints.packing import unpack
from jaxspec_checkpoints.storage import (
    ArrayWriter,
    Slabs,
    StoredArray,
    is_orbax,
    open_arrays,
)
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

MANIFEST = "jaxspec_checkpoint.json"
WEIGHTS = "weights"
FORMAT = "jaxspec"
VERSION = 1


def is_own(folder: Path) -> bool:
    """Return whether this package wrote the folder."""
    return (folder / MANIFEST).is_file()


def open_own(folder: Path, layouts: Mapping[str, Layout]) -> Checkpoint:
    """Check a folder and describe it; no weight is read.

    Raises:
        CheckpointError: The folder has another version, a file is missing, damaged or
            outside the folder, or the manifest, the arrays and config.json disagree.
    """
    found = side_files(folder)
    if "config.json" not in found:
        raise CheckpointError(
            f"{folder} has no config.json; found: {listing(folder)}. Copy the whole "
            "folder again"
        )
    recorded = _read_manifest(check_inside(folder, folder / MANIFEST))
    weights = check_inside(folder, folder / WEIGHTS)
    if not is_orbax(weights):
        raise CheckpointError(
            f"{weights} holds no arrays; found: {listing(weights)}. Copy the whole "
            "folder again"
        )
    arrays = open_arrays(weights)
    for name in arrays:
        if name not in recorded:
            raise CheckpointError(
                f"{weights} holds tensor {name!r}, which {MANIFEST} does not list"
            )
    config = read_json(found["config.json"])
    layout = layout_of(config, layouts)
    config = layout.text_config(config)
    tensors = {
        name: _tensor(folder, name, record, arrays.get(name))
        for name, record in recorded.items()
    }
    tensors = unpack(config, tensors)
    sizes = Sizes.from_config(config)
    check_tensors(layout, sizes, tensors, is_tied=must_be_tied(config))
    generation = found.get("generation_config.json")
    return Checkpoint(
        format="orbax",
        layout=layout,
        folder=folder,
        config=config,
        generation_config=read_json(generation) if generation else {},
        tensors=tensors,
        side_files=found,
    )


def own_names(folder: Path) -> list[str]:
    """Return the names of a folder's tensors.

    Raises:
        CheckpointError: The manifest cannot be read.
    """
    return list(_read_manifest(check_inside(folder, folder / MANIFEST)))


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} must have format {FORMAT!r}, got {manifest.get('format')!r}"
        )
    version = manifest.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer jaxspec: its version is {version}, this "
            f"one reads {VERSION}. Update jaxspec"
        )
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(f"{path} must have version {VERSION}, got {version!r}")
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path} must list `tensors`, got {tensors!r:.80}")
    return tensors


def _tensor(folder: Path, name: str, record: Any, array: StoredArray | None) -> Tensor:
    if array is None:
        raise CheckpointError(
            f"{MANIFEST} lists tensor {name!r}, which {folder / WEIGHTS} does not "
            "hold: copy the whole folder again"
        )
    given = record if isinstance(record, dict) else {}
    for what, found in (("shape", [*array.shape]), ("dtype", array.dtype.name)):
        if given.get(what) != found:
            raise CheckpointError(
                f"tensor {name!r} has {what} {found} in {folder / WEIGHTS}, but "
                f"{MANIFEST} records {given.get(what)}"
            )
    digest = given.get("sha256")
    if not isinstance(digest, str) or len(digest) != 64:
        raise CheckpointError(
            f"{MANIFEST} must record a sha256 of 64 digits for tensor {name!r}, got "
            f"{digest!r} ({folder})"
        )
    return Tensor(
        shape=array.shape,
        dtype=array.dtype,
        source=array.source,
        read=Slabs(array, axis=0).read,
        sha256=digest,
    )


def write_own(
    folder: Path,
    sizes: Sizes,
    tensors: Mapping[str, Tensor],
    *,
    dtype: np.dtype | None,
    on_bytes: Callable[[int], object],
) -> None:
    """Write weights, then the manifest; chunks are rows, so reading rows is cheap.

    Args:
        dtype: Type to cast values to; None keeps each tensor's own.
        on_bytes: Called with the number of bytes after each write.

    Raises:
        CheckpointError: A tensor is damaged or cannot be cast.
    """
    del sizes  # an argument of every writer
    records = {}
    with ArrayWriter(folder / WEIGHTS) as writer:
        for name, tensor in tensors.items():
            kind = dtype or tensor.dtype
            num_rows, *columns = tensor.shape
            row_bytes = tensor.num_bytes // tensor.dtype.itemsize // num_rows
            rows = max(1, BLOCK_BYTES // (row_bytes * kind.itemsize))
            chunks = (min(rows, num_rows), *columns)
            writer.create((name,), tensor.shape, dtype=kind, chunks=chunks)
            digest = hashlib.sha256()
            for start, values in cast_blocks(name, tensor, dtype=kind, rows=rows):
                writer.write(name, (slice(start, start + len(values)),), values)
                digest.update(values.view(np.uint8).data)
                on_bytes(values.nbytes)
            records[name] = {
                "shape": tensor.shape,
                "dtype": kind.name,
                "sha256": digest.hexdigest(),
            }
    manifest = {"format": FORMAT, "version": VERSION, "tensors": records}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
