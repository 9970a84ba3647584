"""Orbax folders on disk: lists arrays, reads and writes them in parts.

Orbax stores arrays with TensorStore. This module uses TensorStore itself, because Orbax
restores and saves whole arrays only. Knows nothing of models: names are the file's own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorstore as ts

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, check_tree, read_json
from jaxspec_checkpoints.tensor import BLOCK_BYTES

METADATA = "_METADATA"
MANIFEST = "manifest.ocdbt"
# Each array has one of these files below its name: zarr 2, zarr 3.
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
_ARRAYS = ("jax.Array", "np.ndarray")
_INDEX_CACHE = {"cache_pool#ocdbt": {"total_bytes_limit": 64 * 2**20}}
# Number of bytes that TensorStore buffers before it writes a file.
_COMMIT_BYTES = 4 * BLOCK_BYTES
# Bytes of memory that TensorStore uses in addition to the values of chunks.
_SLACK_BYTES = 2**20
# Errors that TensorStore raises for damaged files.
_FAULTS = (ValueError, OSError, KeyError, IndexError)


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array of a folder; not in memory.

    Attributes:
        name: In the file's spelling: keys of the tree joined with dots.
        chunks: Shape of the pieces that are read and decoded at once.
        spec: TensorStore's specification of the array.
    """

    name: str
    folder: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    spec: Mapping[str, Any]

    @property
    def source(self) -> str:
        """Folder and name, for messages."""
        return f"{self.folder}: {self.name}"


class Slabs:
    """Reads one array along one axis, so that each chunk is decoded once.

    A chunk may be as large as the array. It is cached until the last slab is read, then
    everything is freed.
    """

    def __init__(
        self,
        array: StoredArray,
        axis: int,
        fixed: tuple[int, ...] = (),
        *,
        length: int | None = None,
    ):
        """Read along `axis`, at index `fixed` of the first axes.

        Args:
            length: End of the last slab, if it is before the end of the axis.
        """
        self._array, self._axis, self._fixed = array, axis, fixed
        self._length = array.shape[axis] if length is None else length
        self._store: ts.TensorStore | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return `[start, stop)` of the axis, without the axes of `fixed`.

        Raises:
            CheckpointError: A file is truncated, missing or damaged.
        """
        array = self._array
        index: list[int | slice] = [*self._fixed]
        index += [slice(None)] * (len(array.shape) - len(index))
        index[self._axis] = slice(start, stop)
        try:
            if self._store is None:
                self._store = ts.open(array.spec, context=self._context()).result()
            values = self._store[tuple(index)].read().result()
        except _FAULTS as error:
            self._store = None
            raise CheckpointError(
                f"tensor {array.name!r} of {array.folder} cannot be read; a file is "
                f"truncated, missing or damaged, fetch it again: {error}"
            ) from error
        if stop >= self._length:
            self._store = None
        return values

    def _context(self) -> ts.Context:
        """Return a TensorStore context whose cache holds chunks that slabs share."""
        array, extents = self._array, []
        for axis, (size, chunk) in enumerate(
            zip(array.shape, array.chunks, strict=True)
        ):
            is_one = axis == self._axis or axis < len(self._fixed)
            extents.append(chunk if is_one else math.ceil(size / chunk) * chunk)
        room = math.prod(extents) * array.dtype.itemsize + _SLACK_BYTES
        return ts.Context({"cache_pool": {"total_bytes_limit": room}, **_INDEX_CACHE})


def is_orbax(folder: Path) -> bool:
    """Return whether `folder` itself is an Orbax tree of arrays."""
    if (folder / METADATA).is_file() or (folder / MANIFEST).is_file():
        return True
    # Orbax up to 2023: a msgpack file for the tree, a folder per array.
    return (folder / "checkpoint").is_file() and any(folder.rglob(".zarray"))


def open_arrays(folder: Path) -> dict[str, StoredArray]:
    """Return every array of an Orbax folder by its name; no values are read.

    Raises:
        CheckpointError: A path points outside the folder, a file is damaged, or an
            array in the metadata is missing.
    """
    check_tree(folder)
    metadata = _read_metadata(folder)
    base = {"driver": "file", "path": f"{folder.resolve()}/"}
    is_database = (folder / MANIFEST).is_file()
    store = {"driver": "ocdbt", "base": base} if is_database else base
    # Older versions of Orbax do not write chunks that are all zeros. In OCDBT storage a
    # missing chunk is known to be zeros, as an index lists every chunk that exists.
    # Without that index, a lost file would look the same, so missing chunks are errors.
    is_strict = metadata.get("store_array_data_equal_to_fill_value") or not is_database
    context = ts.Context(_INDEX_CACHE)
    try:
        keys = ts.KvStore.open(store, context=context).result().list().result()
    except _FAULTS as error:
        raise CheckpointError(
            f"{folder} is not a readable Orbax folder, fetch it again: {error}"
        ) from error
    opening = {}
    for name, driver in sorted(_names(keys).items()):
        place = {**base, "path": f"{base['path']}{name}/"}
        if is_database:
            place = {**store, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
        spec = {
            "driver": driver,
            "kvstore": place,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": not is_strict,
        }
        opening[name] = spec, ts.open(spec, context=context, read=True)
    arrays = {name: _describe(folder, name, *each) for name, each in opening.items()}
    for name in _listed(folder, metadata):
        if name not in arrays:
            raise CheckpointError(
                f"{folder / METADATA} lists tensor {name!r}, whose files are not in "
                "the folder: fetch it again"
            )
    return arrays


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    return read_json(check_inside(folder, path)) if path.is_file() else {}


def _listed(folder: Path, metadata: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays in a tree's metadata."""
    try:
        return [
            ".".join(str(key["key"]) for key in leaf["key_metadata"])
            for leaf in metadata.get("tree_metadata", {}).values()
            if leaf["value_metadata"]["value_type"] in _ARRAYS
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is not a description of a tree of arrays, fetch it "
            f"again: {error!r}"
        ) from error


def _names(keys: list[bytes]) -> dict[str, str]:
    """Find the arrays among a store's keys; return each one's driver, by name."""
    found = {}
    for key in keys:
        name, _, file = key.decode(errors="replace").rpartition("/")
        if name and file in _DRIVERS:
            found[name] = _DRIVERS[file]
    return found


def _describe(folder: Path, name: str, spec: Any, opening: Any) -> StoredArray:
    try:
        store = opening.result()
    except _FAULTS as error:
        raise CheckpointError(
            f"tensor {name!r} of {folder} cannot be opened, fetch it again: {error}"
        ) from error
    shape, chunks = tuple(store.shape), tuple(store.chunk_layout.read_chunk.shape)
    if any(chunk > max(1, size) for chunk, size in zip(chunks, shape, strict=True)):
        raise CheckpointError(
            f"tensor {name!r} of {folder} has shape {shape} and chunks of {chunks}, "
            "expected chunks no larger than the tensor"
        )
    return StoredArray(
        name=name,
        folder=folder,
        shape=shape,
        dtype=np.dtype(store.dtype.numpy_dtype),
        chunks=chunks,
        spec=spec,
    )


class ArrayWriter:
    """Writes a folder that Orbax restores, a part of an array at a time.

    A context manager: its exit writes the metadata that make the folder valid. Values
    are not compressed: decompression would cost more time than the disk saves.
    """

    def __init__(self, folder: Path):
        """Create `folder` to write into."""
        folder.mkdir()
        self._folder = folder
        self._context = ts.Context(_INDEX_CACHE)
        self._transaction = ts.Transaction()
        self._pending_bytes = 0
        self._stores: dict[str, ts.TensorStore] = {}
        self._leaves: dict[str, Any] = {}

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._transaction.abort()
            return
        self._transaction.commit_sync()
        content = {
            "tree_metadata": self._leaves,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (self._folder / METADATA).write_text(json.dumps(content), encoding="utf-8")

    def create(
        self,
        keys: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        dtype: np.dtype,
        chunks: tuple[int, ...],
    ) -> str:
        """Add an array at `keys` of the tree; return its name."""
        name = ".".join(keys)
        spec = {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{self._folder.resolve()}/"},
                "path": f"{name}/",
                "cache_pool": "cache_pool#ocdbt",
            },
            "dtype": dtype.name,
            "metadata": {
                "shape": shape,
                "chunks": chunks,
                "compressor": None,
            },
        }
        self._stores[name] = ts.open(
            spec, context=self._context, transaction=self._transaction, create=True
        ).result()
        self._leaves[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        return name

    def write(self, name: str, index: tuple[Any, ...], values: np.ndarray) -> None:
        """Write a part of array `name`; whole chunks at a time are cheapest."""
        store = self._stores[name]
        if store.transaction is not self._transaction:
            store = store.with_transaction(self._transaction)
            self._stores[name] = store
        store[index].write(values).result()
        self._pending_bytes += values.nbytes
        if self._pending_bytes >= _COMMIT_BYTES:
            self._transaction.commit_sync()
            self._transaction, self._pending_bytes = ts.Transaction(), 0
