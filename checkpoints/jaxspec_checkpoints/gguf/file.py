"""Reads and checks the header of a GGUF file, and locates its tensors (`read_gguf`).

Files come from anywhere, so every length is compared with the file size before memory
is allocated for it. Tensors are not read.

    magic, version, number of tensors, number of metadata entries
    metadata: key, type, value
    tensors: name, sizes (innermost first), type, offset in the data
    padding to `general.alignment`; the data

Source: docs/gguf.md of ggml.
"""

import functools
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import check_inside, expand, readable
from jaxspec_checkpoints.gguf.blocks import OTHER_TYPES, TYPES, BlockType

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Nanoseconds after a file's last change before its header is cached. Two changes within
# one tick of the file system's clock have the same time stamp, so the second could go
# unnoticed.
_SETTLED_NS = 2 * 10**9
_MAX_DIMENSIONS = 4
# Limits on the header, far above real models: 262,144 tokens make a header of 6.5 MB.
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_ARRAY = 2**22
_MAX_STRINGS = 2**22
_MAX_ENTRIES = 2**16
_MAX_NAME_BYTES = 2**16
_MAX_SHARDS = 1024
# The header is read in pieces of this size.
_PIECE_BYTES = 256 * 2**10

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    **{0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_DTYPES = {number: np.dtype(name) for number, name in _SCALARS.items()}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Location of one tensor.

    Attributes:
        shape: Outermost axis first, as in numpy.
        type: Type of its blocks.
        path: The file; one of several if the model is sharded.
        offset: Position of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    path: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.num_elements * self.type.num_bytes


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The header of a file, or of all shards of a model.

    Attributes:
        path: The file; for shards, the first.
        metadata: Values by key: int, float, bool, str, list of str, or numpy arrays.
        tensors: By llama.cpp's names.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header of a file, and those of its other shards.

    Raises:
        CheckpointError: It cannot be read, is not GGUF, is damaged, has an unsupported
            type, or shards are missing.
    """
    path = expand(path)
    with readable(path):
        first, *others = shards(path)
        file = _read_header(first)
        count = _integer(file, "split.count", 1)
        if max(count, 1) != 1 + len(others):
            raise CheckpointError(
                f"{first} is one of {count} shards, but {1 + len(others)} were "
                "found: keep all shards in one folder under their original names, "
                "NAME-00001-of-0000N.gguf"
            )
        tensors = dict(file.tensors)
        for other in others:
            for name, tensor in _read_header(other).tensors.items():
                if name in tensors:
                    _fail(other, f"tensor {name!r:.80} is also in {tensors[name].path}")
                tensors[name] = tensor
    announced = _integer(file, "split.tensors.count", len(tensors))
    if announced != len(tensors):
        _fail(first, f"its shards hold {len(tensors)} tensors, not {announced}")
    return GgufFile(
        path=first, version=file.version, metadata=file.metadata, tensors=tensors
    )


def shards(path: Path) -> list[Path]:
    """Return all files of the model that a file is part of, in order.

    Raises:
        CheckpointError: One is missing or lies outside the folder.
    """
    named = _SHARD.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[3])
    if not 1 <= int(named[2]) <= count <= _MAX_SHARDS:
        raise CheckpointError(
            f"{path} is not named like a shard: expected 00001 to 0000N, and at most "
            f"{_MAX_SHARDS} shards"
        )
    found = [
        path.with_name(f"{stem}-{number:05}-of-{named[3]}.gguf")
        for number in range(1, count + 1)
    ]
    for shard in found:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing: {path.name} is one of {count}")
    return [check_inside(path.parent, shard) for shard in found]


def _read_header(path: Path) -> GgufFile:
    found = path.stat()
    is_settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
    read = _read_settled if is_settled else _read_version
    return read(path, found.st_size, found.st_mtime_ns)


def _read_version(path: Path, num_bytes: int, changed_ns: int) -> GgufFile:
    """Read the header. All arguments are cache keys: a changed file is read again."""
    with path.open("rb") as stream:
        return _Header(path, stream).read()


# An engine reads config, tokenizer, chat template and weights one after the other;
# reading a vocabulary of 262,144 tokens takes 0.2 s each time.
_read_settled = functools.lru_cache(maxsize=2)(_read_version)


def forget_headers() -> None:
    """Free the headers that were read last: 30 MB for a vocabulary of 262,144."""
    _read_settled.cache_clear()


def _integer(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        _fail(file.path, f"{key} must be an integer, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Format a metadata value for messages; long ones are cut before formatting."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value[:60])
    is_array = isinstance(value, list | np.ndarray)
    return f"an array of {len(value):,}" if is_array else repr(value)


def _fail(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} is not a usable GGUF file: {reason}")


class _Header:
    """Reads the header; every read is checked against the file's size."""

    def __init__(self, path: Path, stream: BinaryIO):
        self._path, self._stream = path, stream
        self._file_bytes = stream.seek(0, 2)
        stream.seek(0)
        self._buffer, self._position = bytearray(), 0
        self._num_strings = 0

    def read(self) -> GgufFile:
        """Read the whole header."""
        if self._file_bytes < 24:
            self._fail(f"it has {self._file_bytes} bytes, less than a header")
        magic = bytes(self._take(4))
        if magic != _MAGIC:
            self._fail(f"it begins with {magic!r}, not with {_MAGIC!r}")
        version = self._number(4)
        if version & 0xFFFF == 0:
            self._fail(
                "it is big-endian: fetch the little-endian file of the model, or "
                "convert it with gguf-convert-endian"
            )
        if version not in _VERSIONS:
            self._fail(f"its version is {version}, but only 2 and 3 are supported")
        num_tensors, num_keys = self._count("tensors"), self._count("metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", most=_MAX_NAME_BYTES)
            if key in metadata:
                self._fail(f"metadata key {key!r:.80} appears twice")
            metadata[key] = self._value(key)
        found = list(self._tensors(num_tensors))
        start = self._align(self._position, alignment := self._alignment(metadata))
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            if name in tensors:
                self._fail(f"tensor {name!r:.80} appears twice")
            if offset % alignment:
                self._fail(
                    f"tensor {name!r:.80} has offset {offset}, no multiple of "
                    f"the alignment {alignment}"
                )
            tensor = GgufTensor(
                name=name,
                shape=shape,
                type=kind,
                path=self._path,
                offset=start + offset,
            )
            end = tensor.offset + tensor.num_bytes
            if end > self._file_bytes:
                self._fail(
                    f"tensor {name!r:.80} ends at byte {end:,} of "
                    f"{self._file_bytes:,}: the file is truncated or damaged, fetch it "
                    "again"
                )
            tensors[name] = tensor
        return GgufFile(
            path=self._path, version=version, metadata=metadata, tensors=tensors
        )

    def _fail(self, reason: str) -> NoReturn:
        _fail(self._path, reason)

    def _need(self, num_bytes: int) -> None:
        """Ensure that the next `num_bytes` are in the buffer."""
        end = self._position + num_bytes
        if end <= len(self._buffer):
            return
        if end > self._file_bytes:
            self._fail(
                f"it ends at byte {self._file_bytes:,}, within its header: it is "
                "truncated or damaged, fetch it again"
            )
        if end > _MAX_HEADER_BYTES:
            self._fail(f"its header has more than {_MAX_HEADER_BYTES:,} bytes")
        num_read = len(self._buffer)
        missing = max(end - num_read, _PIECE_BYTES)
        self._buffer += self._stream.read(min(missing, self._file_bytes - num_read))
        if end > len(self._buffer):
            self._fail("it became shorter while it was read")

    def _take(self, num_bytes: int) -> bytearray:
        self._need(num_bytes)
        start, self._position = self._position, self._position + num_bytes
        return self._buffer[start : self._position]

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _count(self, what: str) -> int:
        count = self._number(8)
        if count > _MAX_ENTRIES:
            self._fail(
                f"it has {count:,} {what}, but at most {_MAX_ENTRIES:,} are supported"
            )
        return count

    def _string(self, what: str, *, most: int = _MAX_HEADER_BYTES) -> str:
        length = self._number(8)
        if length > most:
            self._fail(
                f"{what} has {length:,} bytes, but at most {most:,} are supported"
            )
        content = self._take(length)
        try:
            return content.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8: {bytes(content[:60])!r:.80}")

    def _value(self, key: str) -> Any:
        kind = self._number(4)
        if kind == _STRING:
            return self._string(f"the value of {key!r:.80}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _DTYPES:
            self._fail(
                f"the value of {key!r:.80} has type {kind}, which does not exist"
            )
        value = np.frombuffer(self._take(_DTYPES[kind].itemsize), _DTYPES[kind])[0]
        if kind == _BOOL:
            return bool(value)
        # The shortest spelling of a float32: 1e-06, not 9.999999974752427e-07.
        return float(str(value)) if value.dtype.kind == "f" else int(value)

    def _array(self, key: str) -> Any:
        kind, count = self._number(4), self._number(8)
        if count > _MAX_ARRAY:
            self._fail(
                f"{key!r:.80} has {count:,} values, but at most {_MAX_ARRAY:,} are "
                "supported"
            )
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _DTYPES:
            name = "an array" if kind == _ARRAY else f"type {kind}"
            self._fail(
                f"the values of {key!r:.80} are of {name}, which is not supported"
            )
        # Copy the values; a view would keep the whole buffer in memory.
        values = np.frombuffer(
            self._take(count * _DTYPES[kind].itemsize), _DTYPES[kind]
        )
        return values.astype(bool) if kind == _BOOL else values

    def _strings(self, key: str, count: int) -> list[str]:
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            self._fail(f"its header has more than {_MAX_STRINGS:,} strings")
        if count * 8 > self._file_bytes - self._position:
            self._fail(
                f"{key!r:.80} has {count:,} strings, more than the file has room "
                "for: it is truncated or damaged, fetch it again"
            )
        values: list[str] = []
        start = stop = 0
        read_length = struct.Struct("<Q").unpack_from
        while len(values) < count:
            # Read all complete strings in the buffer in a loop without function calls.
            buffer, position, end = self._buffer, self._position, len(self._buffer)
            try:
                for _ in range(count - len(values)):
                    start = position + 8
                    if start > end:
                        break
                    stop = start + read_length(buffer, position)[0]
                    if stop > end:
                        break
                    values.append(buffer[start:stop].decode())
                    position = stop
            except UnicodeDecodeError:
                text = bytes(buffer[start:stop][:60])
                self._fail(
                    f"{key!r:.80}, string {len(values)}, is not UTF-8: {text!r:.80}"
                )
            self._position = position
            if len(values) < count:
                self._need(8)
                self._need(8 + read_length(self._buffer, position)[0])
        return values

    def _tensors(
        self, count: int
    ) -> Iterator[tuple[str, tuple[int, ...], BlockType, int]]:
        for _ in range(count):
            name = self._string("a tensor's name", most=_MAX_NAME_BYTES)
            num_dimensions = self._number(4)
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor {name!r:.80} has {num_dimensions} dimensions")
            sizes = [self._number(8) for _ in range(num_dimensions)]
            kind, offset = self._number(4), self._number(8)
            if kind not in TYPES:
                raise CheckpointError(
                    f"{self._path}: tensor {name!r:.80} is of type "
                    f"{OTHER_TYPES.get(kind, f'number {kind}')}, which is not "
                    "supported. Choose a file with these types only: "
                    f"{', '.join(known.name for known in TYPES.values())}"
                )
            block = TYPES[kind].num_elements
            if min(sizes) < 1 or sizes[0] % block:
                self._fail(
                    f"tensor {name!r:.80} has sizes {sizes}: expected at least 1, and "
                    f"the first a multiple of {block} for {TYPES[kind].name}"
                )
            yield name, tuple(reversed(sizes)), TYPES[kind], offset

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or value < 1 or value & (value - 1):
            self._fail(f"general.alignment must be a power of two, got {shown(value)}")
        return value

    def _align(self, position: int, alignment: int) -> int:
        return -(-position // alignment) * alignment
