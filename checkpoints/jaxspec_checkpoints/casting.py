"""Casts tensors for files, one block of rows at a time."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.layout import DTYPES
from jaxspec_checkpoints.tensor import Tensor


def find_dtype(name: str) -> np.dtype:
    """Return the numpy type of that name.

    Raises:
        CheckpointError: Weights cannot have that type.
    """
    if name not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


def cast_blocks(
    name: str, tensor: Tensor, *, dtype: np.dtype, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, values) in order, `rows` rows at a time; the last may be fewer.

    Raises:
        CheckpointError: The file is damaged, or a value is too large for `dtype`.
    """
    num_rows = tensor.shape[0]
    first = filled = 0
    buffer = np.empty((min(rows, num_rows), *tensor.shape[1:]), dtype)
    for _, values in tensor.blocks():
        while len(values):
            part, values = np.split(values, [len(buffer) - filled])
            buffer[filled : filled + len(part)] = _cast(name, part, dtype)
            filled += len(part)
            if filled < len(buffer):
                continue
            yield first, buffer
            first, filled = first + filled, 0
            # Make a new array each time, because the caller may keep the previous one.
            buffer = np.empty((min(rows, num_rows - first), *buffer.shape[1:]), dtype)


def _cast(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        out = values.astype(dtype)
    overflown = np.isinf(out) & ~np.isinf(values)
    if overflown.any():
        raise CheckpointError(
            f"tensor {name!r} holds {values[overflown].flat[0]}, too large for "
            f"{dtype.name} (at most {ml_dtypes.finfo(dtype).max}): choose another dtype"
        )
    return out
