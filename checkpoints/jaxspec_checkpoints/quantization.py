"""Owns what a quantized matrix is: values of few bits, and scales to multiply them by.

A weight is its value times the scale of its output and group of features. `quantize`
makes both of rows of numbers, on the host or within a jitted function; tensors do it
block by block while they are read, so that a model is never there in both forms.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

INT8, INT4, FP8 = "int8", "int4", "fp8"
# What a value is kept as, and the largest that a scheme makes. Ranges are symmetric:
# a zero stays one, and no offset has to be added to products.
VALUE_TYPES = {
    INT8: (np.dtype(np.int8), 127.0),
    INT4: (np.dtype(ml_dtypes.int4), 7.0),
    FP8: (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}
# What a checkpoint's config.json calls how it was quantized, where it can be read.
METHODS = ("compressed-tensors", "awq", "gptq")
# Features that share a scale, by default; None is all of an output.
GROUP_SIZES = {INT8: None, INT4: 128, FP8: None}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the matrices of a model's layers are kept.

    Attributes:
        kind: "int8", "int4" or "fp8" (e4m3).
        group_size: Features that share a scale; None: all of an output.
        has_embedding: Whether the embedding, which is the LM head as well, is kept in
            int8, with a scale for each row.
        method: Of a checkpoint that is quantized already, what its config.json calls
            the method; None: weights are quantized while they are loaded.
    """

    kind: str
    group_size: int | None = None
    has_embedding: bool = False
    method: str | None = None

    @property
    def value_type(self) -> np.dtype:
        """The type of the values."""
        return VALUE_TYPES[self.kind][0]

    @property
    def of_embedding(self) -> "Scheme | None":
        """How the embedding is kept; None where it is left as it is."""
        return Scheme(kind=INT8) if self.has_embedding else None

    def num_groups(self, num_features: int) -> int:
        """Scales of one output."""
        return num_features // (self.group_size or num_features)

    def describe(self) -> str:
        """In words: `int4 in groups of 128`."""
        each = "per output" if self.group_size is None else ""
        shown = f"{self.kind} {each or f'in groups of {self.group_size}'}"
        shown += ", embedding int8 per row" if self.has_embedding else ""
        return shown if self.method is None else f"{shown} ({self.method})"


def named_scheme(kind: str, *, has_embedding: bool = False) -> Scheme:
    """What one of the names `VALUE_TYPES` asks for while loading."""
    return Scheme(kind=kind, group_size=GROUP_SIZES[kind], has_embedding=has_embedding)


def quantize(rows: Any, scheme: Scheme, xp: Any = np) -> tuple[Any, Any]:
    """Values [out, features] and float32 scales [out, group] of rows.

    Rounds to the nearest value, of two equally near to the even one. The largest of a
    group becomes the largest value.

    Args:
        xp: numpy, or jax.numpy for arrays of a device.
    """
    dtype, largest = VALUE_TYPES[scheme.kind]
    num_rows, features = rows.shape
    groups = rows.astype(np.float32).reshape(num_rows, scheme.num_groups(features), -1)
    found = xp.max(xp.abs(groups), axis=2)
    scales = xp.where(found > 0, found / np.float32(largest), np.float32(1))
    values = groups / scales[:, :, None]
    if scheme.kind != FP8:
        values = xp.round(values)
    values = xp.clip(values, -np.float32(largest), np.float32(largest))
    return values.reshape(num_rows, features).astype(dtype), scales


def dequantize(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 numbers that [out, features] values stand for."""
    numbers = values.astype(np.float32).reshape(*scales.shape, -1)
    return (numbers * scales[:, :, None]).reshape(values.shape)


def stored_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """What values take on a device: two of 4 bits share a byte."""
    count = int(np.prod(shape, dtype=np.int64))
    return -(-count // 2) if dtype == ml_dtypes.int4 else count * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor(Tensor):
    """A matrix that is kept as values and scales, and reads as its float32 numbers.

    Attributes:
        values: [out, features].
        scales: [out, group], float32.
    """

    values: Tensor
    scales: Tensor

    @property
    def held_bytes(self) -> int:
        """Bytes of values and scales; `num_bytes` are those of the numbers."""
        held = stored_bytes(self.values.shape, self.values.dtype)
        return held + self.scales.num_bytes

    def head(self, num_rows: int) -> "QuantizedTensor":
        """The first rows only."""
        return quantized_tensor(self.values.head(num_rows), self.scales.head(num_rows))

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        scales = self.scales.whole()
        for start, rows in self.values.blocks():
            yield start, dequantize(rows, scales[start : start + len(rows)])


def held_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it is kept."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.held_bytes
    return tensor.num_bytes


def quantized_tensor(values: Tensor, scales: Tensor) -> QuantizedTensor:
    """The matrix of values and scales that are read from somewhere."""

    def read(start: int, stop: int) -> np.ndarray:
        return dequantize(values.read(start, stop), scales.read(start, stop))

    return QuantizedTensor(
        shape=values.shape,
        dtype=np.dtype(np.float32),
        source=values.source,
        read=read,
        values=values,
        scales=scales,
    )


@dataclass(frozen=True, kw_only=True)
class _Derived(Tensor):
    origin: Tensor
    make: Callable[[int, np.ndarray], np.ndarray]

    def head(self, num_rows: int) -> Tensor:
        """The first rows only."""
        shape = num_rows, *self.shape[1:]
        return replace(self, shape=shape, origin=self.origin.head(num_rows))

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        for start, rows in self.origin.blocks():
            yield start, self.make(start, rows)


def derived(
    origin: Tensor,
    make: Callable[[int, np.ndarray], np.ndarray],
    *,
    shape: tuple[int, ...],
    dtype: Any,
) -> Tensor:
    """What is made of another tensor's rows, whose hash is checked as they pass.

    Args:
        make: Of the first row's number and some rows, as many rows.
    """
    return _Derived(
        shape=shape,
        dtype=np.dtype(dtype),
        source=origin.source,
        read=lambda start, stop: make(start, origin.read(start, stop)),
        origin=origin,
        make=make,
    )


def quantized(tensor: Tensor, scheme: Scheme) -> QuantizedTensor:
    """A matrix that is quantized block by block as its values are read.

    Scales are there once the values were read; before, reading them reads the matrix.

    Raises:
        CheckpointError: Groups do not divide the features.
    """
    if isinstance(tensor, QuantizedTensor):
        return tensor
    num_rows, features = tensor.shape
    if features % (scheme.group_size or features):
        raise CheckpointError(
            f"groups of {scheme.group_size} do not divide the {features} features of "
            f"{tensor.source}"
        )
    form = num_rows, scheme.num_groups(features)
    kept, is_there = np.empty(form, np.float32), np.zeros(num_rows, bool)

    def make(start: int, rows: np.ndarray) -> np.ndarray:
        values, scales = quantize(rows, scheme)
        kept[start : start + len(rows)] = scales
        is_there[start : start + len(rows)] = True
        return values

    values = derived(tensor, make, shape=tensor.shape, dtype=scheme.value_type)

    def read_scales(start: int, stop: int) -> np.ndarray:
        step = max(1, BLOCK_BYTES // (4 * features))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            if not is_there[first:last].all():
                values.read(first, last)
        return kept[start:stop]

    scales = Tensor(
        shape=form,
        dtype=np.dtype(np.float32),
        source=f"{tensor.source} (scales)",
        read=read_scales,
    )
    return quantized_tensor(values, scales)
