"""Quantized matrices: values of few bits, and scales to multiply them by.

A weight is its value times the scale of its output and group of features; some types
add a minimum, also one per output and group. `quantize` computes values and scales from
rows of numbers, on the host or in a jitted function. A `QuantizedTensor` does so block
by block while it is read, so that a model is never in memory both unquantized and
quantized.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.tensor import BLOCK_BYTES, Tensor

INT8, INT4, FP8 = "int8", "int4", "fp8"
# Type of each scheme's values, and the largest value. Ranges are symmetric, so that
# zero remains zero and products need no offset. With minima, values start at 0, and
# 4-bit values have the type `CODES`.
VALUE_TYPES = {
    INT8: (np.dtype(np.int8), 127.0),
    INT4: (np.dtype(ml_dtypes.int4), 7.0),
    FP8: (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
}
CODES = np.dtype(ml_dtypes.uint4), 15.0
# Names in config.json of the quantization methods that can be read.
METHODS = ("compressed-tensors", "awq", "gptq")
# Name of the quantization method of a GGUF file, in which each tensor has its own type.
GGUF = "gguf"
# Default number of features that share a scale; None: all features of an output share
# one.
GROUP_SIZES = {INT8: None, INT4: 128, FP8: None}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the matrices of a model's layers are quantized.

    Attributes:
        kind: "int8", "int4" or "fp8" (e4m3).
        group_size: Number of features that share a scale; None: all features of an
            output share one.
        has_minima: Whether each group has a minimum that is added to its numbers.
        has_embedding: Whether the embedding, which is also the LM head, is quantized to
            int8, with a scale per row.
        method: Name in config.json of the method of a quantized checkpoint; None:
            weights are quantized while they are loaded.
    """

    kind: str
    group_size: int | None = None
    has_minima: bool = False
    has_embedding: bool = False
    method: str | None = None

    @property
    def values(self) -> tuple[np.dtype, float]:
        """The type of the values, and the largest value."""
        if self.has_minima and self.kind == INT4:
            return CODES
        return VALUE_TYPES[self.kind]

    @property
    def value_type(self) -> np.dtype:
        """The type of the values."""
        return self.values[0]

    @property
    def of_embedding(self) -> "Scheme | None":
        """Return the scheme of the embedding; None if it is not quantized."""
        return Scheme(kind=INT8) if self.has_embedding else None

    def of_tensors(self, names: Sequence[str]) -> "Scheme | None":
        """Return the scheme of a matrix that is fused from these canonical tensors."""
        return self if ".layers." in names[0] else self.of_embedding

    def num_groups(self, num_features: int) -> int:
        """Return the number of scales per output."""
        return num_features // (self.group_size or num_features)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales, and minima, of an (out, features) matrix."""
        form = shape[0], self.num_groups(shape[1])
        return (*form, 2) if self.has_minima else form

    def describe(self) -> str:
        """Describe the scheme in words: `int4 in groups of 128`."""
        each = "per output" if self.group_size is None else ""
        shown = f"{self.kind} {each or f'in groups of {self.group_size}'}"
        shown += " with minima" if self.has_minima else ""
        shown += ", embedding int8 per row" if self.has_embedding else ""
        return shown if self.method is None else f"{shown} ({self.method})"


# Types of a GGUF file whose numbers are values times scales, with or without minima,
# and a scheme that holds them exactly. The tables of IQ4_NL and IQ4_XS are of integers
# from -127 to 113.
GGUF_SCHEMES = {
    "Q4_0": Scheme(kind=INT4, group_size=32),
    "Q4_1": Scheme(kind=INT4, group_size=32, has_minima=True),
    "Q5_0": Scheme(kind=INT8, group_size=32),
    "Q5_1": Scheme(kind=INT8, group_size=32, has_minima=True),
    "Q8_0": Scheme(kind=INT8, group_size=32),
    "Q2_K": Scheme(kind=INT4, group_size=16, has_minima=True),
    "Q3_K": Scheme(kind=INT4, group_size=16),
    "Q4_K": Scheme(kind=INT4, group_size=32, has_minima=True),
    "Q5_K": Scheme(kind=INT8, group_size=32, has_minima=True),
    "Q6_K": Scheme(kind=INT8, group_size=16),
    "IQ4_NL": Scheme(kind=INT8, group_size=32),
    "IQ4_XS": Scheme(kind=INT8, group_size=32),
}


@dataclass(frozen=True, kw_only=True)
class MixedScheme:
    """Quantization of a model whose file has a type per tensor (GGUF).

    Attributes:
        types: The canonical name of each matrix and its type in the file.
        has_embedding: Quantize the embedding to int8 if the file does not.
    """

    types: tuple[tuple[str, str], ...] = field(repr=False)
    has_embedding: bool = False
    method: str = GGUF

    @cached_property
    def _schemes(self) -> dict[str, Scheme | None]:
        return {name: GGUF_SCHEMES.get(kind) for name, kind in self.types}

    def of_tensors(self, names: Sequence[str]) -> Scheme | None:
        """Return the scheme that holds all of these tensors exactly.

        None if one tensor has no scheme: the matrix is then stored in the dtype of the
        rows that it is multiplied with.
        """
        found = shared_scheme([self._schemes.get(name) for name in names])
        if found is None and self.has_embedding and ".layers." not in names[0]:
            return Scheme(kind=INT8)
        return found

    def describe(self) -> str:
        """Describe the types: `F16 unpacked, Q5_0 as int8 in groups of 32`."""
        kinds: dict[str, list[str]] = {}
        for kind in sorted({kind for _, kind in self.types}):
            scheme = GGUF_SCHEMES.get(kind)
            form = f"as {scheme.describe()}" if scheme else "unpacked"
            kinds.setdefault(form, []).append(kind)
        shown = [f"{', '.join(names)} {form}" for form, names in kinds.items()]
        shown += ["embedding int8 per row"] * self.has_embedding
        return f"{', '.join(shown)} ({self.method})"


def shared_scheme(schemes: Sequence[Scheme | None]) -> Scheme | None:
    """Return a scheme that can store matrices of all these schemes exactly, or None.

    4-bit integers are also 8-bit ones, a group's scale is valid for its parts, and a
    missing minimum is 0.
    """
    found = [scheme for scheme in schemes if scheme is not None]
    if len(found) < len(schemes):
        return None
    if len(set(found)) == 1:
        return found[0]
    kinds, sizes = {one.kind for one in found}, [one.group_size for one in found]
    if FP8 in kinds or None in sizes:
        return None
    types = {scheme.value_type for scheme in found}
    return Scheme(
        kind=INT4 if kinds == {INT4} and len(types) == 1 else INT8,
        group_size=math.gcd(*(size or 0 for size in sizes)),
        has_minima=any(scheme.has_minima for scheme in found),
    )


def named_scheme(kind: str, *, has_embedding: bool = False) -> Scheme:
    """Return the scheme for one of the names `VALUE_TYPES`, for use while loading."""
    return Scheme(kind=kind, group_size=GROUP_SIZES[kind], has_embedding=has_embedding)


def quantize(rows: Any, scheme: Scheme, xp: Any = np) -> tuple[Any, Any]:
    """Quantize rows to values [out, features] and float32 scales [out, group].

    Rounds to nearest, ties to even. The largest number of a group becomes the largest
    value. With minima, the smallest becomes 0, and the second array is [out, group, 2]:
    scales and minima.

    Args:
        xp: numpy, or jax.numpy for arrays on a device.
    """
    dtype, largest = scheme.values
    num_rows, features = rows.shape
    groups = rows.astype(np.float32).reshape(num_rows, scheme.num_groups(features), -1)
    least, smallest = None, -np.float32(largest)
    if scheme.has_minima:
        least, smallest = xp.min(groups, axis=2), np.float32(0)
        groups = groups - least[:, :, None]
    found = xp.max(xp.abs(groups), axis=2)
    scales = xp.where(found > 0, found / np.float32(largest), np.float32(1))
    values = groups / scales[:, :, None]
    if scheme.kind != FP8:
        values = xp.round(values)
    values = xp.clip(values, smallest, np.float32(largest))
    if least is not None:
        scales = xp.stack([scales, least], axis=2)
    return values.reshape(num_rows, features).astype(dtype), scales


def dequantize(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize [out, features] values to float32.

    Args:
        scales: [out, group], or [out, group, 2]: scales and minima.
    """
    numbers = values.astype(np.float32).reshape(*scales.shape[:2], -1)
    if scales.ndim == 2:
        return (numbers * scales[:, :, None]).reshape(values.shape)
    numbers = numbers * scales[:, :, :1] + scales[:, :, 1:]
    return numbers.reshape(values.shape)


def stored_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of values on a device: two 4-bit values share a byte."""
    count = int(np.prod(shape, dtype=np.int64))
    is_four_bits = dtype in (VALUE_TYPES[INT4][0], CODES[0])
    return -(-count // 2) if is_four_bits else count * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor(Tensor):
    """A matrix stored as values and scales; reading it returns float32 numbers.

    Attributes:
        values: [out, features].
        scales: float32, [out, group]; or [out, group, 2], scales and minima.
    """

    values: Tensor
    scales: Tensor

    @property
    def held_bytes(self) -> int:
        """Bytes of values and scales; `num_bytes` are those of the float32 numbers."""
        held = stored_bytes(self.values.shape, self.values.dtype)
        return held + self.scales.num_bytes

    def head(self, num_rows: int) -> "QuantizedTensor":
        """Return the first rows only."""
        return quantized_tensor(self.values.head(num_rows), self.scales.head(num_rows))

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        scales = self.scales.whole()
        for start, rows in self.values.blocks():
            yield start, dequantize(rows, scales[start : start + len(rows)])


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor as stored."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.held_bytes
    return tensor.num_bytes


def quantized_tensor(values: Tensor, scales: Tensor) -> QuantizedTensor:
    """Combine values and scales to a matrix."""

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
        """Return the first rows only."""
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
    """Describe a tensor computed from the rows of another, whose hash is checked.

    Args:
        make: Takes the first row's number and rows; returns the same number of rows.
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
    """Quantize a matrix block by block as its values are read.

    A matrix that is already quantized keeps its numbers if the scheme can hold them
    (see `shared_scheme`); otherwise it is quantized again, as an LM head is to int8
    rows. The scales of an unquantized matrix are computed while its values are read;
    reading the scales first reads the whole matrix.

    Raises:
        CheckpointError: Groups do not divide the features.
    """
    if isinstance(tensor, QuantizedTensor):
        regrouped = _regrouped(tensor, scheme)
        if regrouped is not None:
            return regrouped
    num_rows, features = tensor.shape
    if features % (scheme.group_size or features):
        raise CheckpointError(
            f"groups of {scheme.group_size} do not divide the {features} features of "
            f"{tensor.source}"
        )
    form = scheme.scales_shape(tensor.shape)
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


def _regrouped(tensor: QuantizedTensor, scheme: Scheme) -> QuantizedTensor | None:
    """Return the same numbers in the scheme's type and groups; None if impossible."""
    num_groups, form = tensor.scales.shape[1], scheme.scales_shape(tensor.shape)
    given, needed = tensor.values.dtype, scheme.value_type
    if given == needed and form == tensor.scales.shape:
        return tensor
    is_four_bits = given in (VALUE_TYPES[INT4][0], CODES[0])
    is_wider = is_four_bits and needed == VALUE_TYPES[INT8][0]
    has_minima = len(tensor.scales.shape) == 3
    if not (given == needed or is_wider) or form[1] % num_groups:
        return None
    if has_minima and not scheme.has_minima:
        return None

    def regroup(start: int, rows: np.ndarray) -> np.ndarray:
        if scheme.has_minima and not has_minima:
            rows = np.stack([rows, np.zeros_like(rows)], axis=2)
        return np.repeat(rows, form[1] // num_groups, axis=1)

    values = derived(
        tensor.values,
        lambda start, rows: rows.astype(scheme.value_type),
        shape=tensor.shape,
        dtype=scheme.value_type,
    )
    scales = derived(tensor.scales, regroup, shape=form, dtype=np.float32)
    return quantized_tensor(values, scales)
