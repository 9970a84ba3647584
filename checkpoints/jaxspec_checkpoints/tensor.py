"""Defines `Tensor`: one named array of a checkpoint, whose rows are read on demand.

Nothing is read before `rows`, so a checkpoint larger than the host's memory can be
checked, converted and placed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec_checkpoints.errors import CheckpointError

# The allocator gives blocks of this size again; larger ones cost page faults each time,
BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One array in canonical form: HuggingFace's name and (out, in) order.

    Attributes:
        shape: Sizes of the axes.
        dtype: Type of the numbers as stored.
        source: Location of the bytes, for messages: file and name in it.
        read: Returns rows `[start, stop)` of the first axis as a host array.
        sha256: Hash of the row-major little-endian bytes, if the format records it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: str
    read: Callable[[int, int], np.ndarray]
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in its own type."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, rows) in order, about `BLOCK_BYTES` at a time.

        Raises:
            CheckpointError: The bytes do not have the recorded hash; raised after the
                last block, so a caller must not use what it read before the end.
        """
        num_rows = self.shape[0]
        step = max(1, BLOCK_BYTES * num_rows // max(1, self.num_bytes))
        digest = hashlib.sha256()
        for start in range(0, num_rows, step):
            rows = self.read(start, min(start + step, num_rows))
            if self.sha256 is not None:
                digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
            yield start, rows
        if self.sha256 is not None and digest.hexdigest() != self.sha256:
            raise CheckpointError(
                f"{self.source}: the bytes have sha256 {digest.hexdigest()}, but "
                f"{self.sha256} was recorded. The file is damaged or was changed "
                "after it was written: fetch or convert it again."
            )

    def head(self, num_rows: int) -> "Tensor":
        """Return the first rows only, without the hash, which covers all rows."""
        return replace(self, shape=(num_rows, *self.shape[1:]), sha256=None)

    def whole(self) -> np.ndarray:
        """Return all rows as one array."""
        out = np.empty(self.shape, self.dtype)
        for start, rows in self.blocks():
            out[start : start + len(rows)] = rows
        return out


def have_same_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have one type, one shape and the same bytes.

    Reads both block by block, as far as the first difference.

    Raises:
        CheckpointError: The bytes of one do not have its recorded hash.
    """
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    pairs = zip(first.blocks(), second.blocks(), strict=True)
    return all(
        np.array_equal(_as_bytes(ours), _as_bytes(theirs))
        for (_, ours), (_, theirs) in pairs
    )


@dataclass(frozen=True, kw_only=True)
class _WithCopies(Tensor):
    origin: Tensor
    copies: tuple[Tensor, ...]

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """As `Tensor.blocks`; also raises if a copy has other bytes."""
        tensors = self.origin, *self.copies
        for (start, rows), *others in zip(*(t.blocks() for t in tensors), strict=True):
            for copy, (_, theirs) in zip(self.copies, others, strict=True):
                if not np.array_equal(_as_bytes(rows), _as_bytes(theirs)):
                    raise _different(self.origin, copy)
            yield start, rows


def with_copies(tensor: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """Return `tensor` with reads that also compare it with its copies.

    For tensors that a file holds several times and that are used once.

    Raises:
        CheckpointError: A copy has another shape or type; or, while reading, other
            bytes.
    """
    for copy in copies:
        if (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            raise _different(tensor, copy)
    return _WithCopies(
        shape=tensor.shape,
        dtype=tensor.dtype,
        source=tensor.source,
        read=tensor.read,
        origin=tensor,
        copies=tuple(copies),
    )


def _different(tensor: Tensor, copy: Tensor) -> CheckpointError:
    return CheckpointError(
        f"{copy.source} and {tensor.source} differ, but config.json says that they "
        "are the same: correct config.json, or export the model again"
    )


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8)


def in_memory(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Wrap host arrays, for tests and for weights that were just made."""
    return {name: _wrap(name, array) for name, array in arrays.items()}


def _wrap(name: str, array: np.ndarray) -> Tensor:
    return Tensor(
        shape=array.shape,
        dtype=array.dtype,
        source=name,
        read=lambda start, stop: array[start:stop],
    )
