"""Products of rows with a matrix stored in the order in which a CPU reads it.

A panel stores `WIDTH` outputs: their float32 values of one feature are adjacent,
[panel, features, WIDTH]; bfloat16 values are stored in pairs of features,
[panel, pair, WIDTH, 2]. Zeros fill the last panel and the last pair. A quantized matrix
is stored as `QuantizedPanels`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxspec_kernels import dispatch

__all__ = ["SHIFTS", "WIDTH", "Panels", "QuantizedPanels", "from_panels"]
__all__ += ["from_quantized_panels", "panel_form", "panel_matmul", "panel_rows"]
__all__ += ["quantized_form", "quantized_panels", "to_panels"]

# Number of matrix outputs in one panel.
WIDTH = 32
_MODULES = {"reference": "reference", "cpu": "cpu"}
# Types of quantized panels; a uint32 holds eight 4-bit values.
_VALUES = (jnp.int8, jnp.float8_e4m3fn, jnp.uint32)
# Bits to shift a uint32 by for each of its eight features: even ones in its lower half.
SHIFTS = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)


class QuantizedPanels(NamedTuple):
    """8-bit or 4-bit values, and a scale for each output and group of features.

    With minima, a number is its value times the scale, plus the minimum of its output
    and group; 4-bit values are then 0 to 15 instead of -8 to 7.

    Attributes:
        values: int8 or float8_e4m3fn, [panel, pair of features, 2, WIDTH]; or 4-bit
            values of eight features in a uint32, [panel, eight features, WIDTH]: those
            of even features in its lower half, the first in the lowest bits. Zeros fill
            the last pair or uint32 of each group.
        scales: float32, [panel, group, WIDTH]; or [panel, group, 2, WIDTH]: scales and
            minima.
    """

    values: Any
    scales: Any


Panels = Num[Array, "..."] | QuantizedPanels


def quantized_form(
    shape: tuple[int, ...], dtype: Any, num_groups: int, *, has_minima: bool = False
) -> tuple[tuple[tuple[int, ...], Any], tuple[tuple[int, ...], Any]]:
    """Return shapes and types of the panels of quantized [out, features] values.

    Args:
        dtype: int8 or float8_e4m3fn; int4, or uint4 with minima.

    Raises:
        ValueError: Groups are not whole.
    """
    outputs, features = shape
    if features % num_groups:
        raise ValueError(
            f"{features} features must divide into {num_groups} groups of equal size"
        )
    count = -(-outputs // WIDTH)
    is_packed = dtype in (jnp.int4, jnp.uint4)
    steps = -(-features // num_groups // (8 if is_packed else 2)) * num_groups
    values = ((count, steps, WIDTH), jnp.uint32)
    if not is_packed:
        values = ((count, steps, 2, WIDTH), dtype)
    scales = (count, num_groups, 2, WIDTH) if has_minima else (count, num_groups, WIDTH)
    return values, (scales, jnp.float32)


def quantized_panels(values: np.ndarray, scales: np.ndarray) -> QuantizedPanels:
    """Pack [out, features] values and their scales in panels, on the host.

    Args:
        scales: [out, group]; or [out, group, 2]: scales and minima.
    """
    num_groups, has_minima = scales.shape[1], scales.ndim == 3
    (form, kind), (form_of_scales, _) = quantized_form(
        values.shape, values.dtype, num_groups, has_minima=has_minima
    )
    is_packed, whole = kind == jnp.uint32, -(-len(values) // WIDTH) * WIDTH
    values = values.reshape(len(values), num_groups, -1)
    missing = -values.shape[2] % (8 if is_packed else 2)
    values = np.pad(values, ((0, 0), (0, 0), (0, missing)))
    if is_packed:
        bits = values.astype(np.int8).view(np.uint8) & 0xF
        values = np.zeros((*bits.shape[:2], bits.shape[2] // 8), np.uint32)
        for feature, shift in enumerate(SHIFTS):
            values |= bits[:, :, feature::8].astype(np.uint32) << shift
    panels = _split(values.reshape(len(values), -1), whole).reshape(form)
    columns = np.asarray(scales, np.float32).reshape(len(values), -1)
    return QuantizedPanels(panels, to_panels(columns).reshape(form_of_scales))


def from_quantized_panels(
    panels: QuantizedPanels, shape: tuple[int, ...]
) -> np.ndarray:
    """Dequantize panels to a float32 (out, features) matrix, on the host."""
    count, num_groups = panels.scales.shape[:2]
    has_minima = panels.scales.ndim == 4
    values = panels.values.reshape(count, -1, WIDTH)
    values = np.moveaxis(values, 2, 1).reshape(count * WIDTH, -1)
    if values.dtype == np.uint32:
        bits = values[:, :, None] >> SHIFTS << np.uint32(28)
        values = (bits if has_minima else bits.view(np.int32)) >> 28
    columns = panels.scales.reshape(count, -1, WIDTH)
    columns = from_panels(columns, (shape[0], columns.shape[1]))
    scales = columns.reshape(shape[0], num_groups, -1)
    numbers = values[: shape[0]].astype(np.float32).reshape(*scales.shape[:2], -1)
    numbers = numbers[:, :, : shape[1] // num_groups] * scales[:, :, :1]
    numbers = numbers + scales[:, :, 1:] if has_minima else numbers
    return numbers.reshape(shape)


def _split(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Split [row, column] into panels of rows, padded with zeros."""
    values = np.pad(values, ((0, num_rows - len(values)), (0, 0)))
    split = values.reshape(-1, WIDTH, values.shape[1])
    return _aligned(np.moveaxis(split, 1, 2))


def _aligned(values: np.ndarray) -> np.ndarray:
    """Copy an array so that it begins at a cache line.

    `jax.device_put` uses such memory as it is. A CPU reads it faster than memory that
    XLA allocates, because numpy asks the system for huge pages.
    """
    memory = np.empty(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + values.nbytes].view(values.dtype)
    made = made.reshape(values.shape)
    made[...] = values
    return made


def panel_form(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the panels' shape for an (out, features) matrix of 2- or 4-byte values."""
    count, features = -(-shape[0] // WIDTH), shape[1]
    return (
        (count, features, WIDTH)
        if itemsize == 4
        else (count, -(-features // 2), WIDTH, 2)
    )


def to_panels(values: np.ndarray) -> np.ndarray:
    """Pack an (out, features) matrix in panels, on the host."""
    form = panel_form(values.shape, values.itemsize)
    whole = form[0] * WIDTH, form[1] * (2 if len(form) == 4 else 1)
    if values.shape != whole:
        missing = [
            (0, size - there) for size, there in zip(whole, values.shape, strict=True)
        ]
        values = np.pad(values, missing)
    split = values.reshape(form[0], WIDTH, *form[1:2], *form[3:])
    return _aligned(np.moveaxis(split, 1, 2))


def from_panels(panels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo `to_panels` for a matrix of this shape."""
    split = np.ascontiguousarray(np.moveaxis(panels, 2, 1))
    whole = split.reshape(panels.shape[0] * WIDTH, -1)
    return np.ascontiguousarray(whole[: shape[0], : shape[1]])


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Panels,
    *,
    num_outputs: int,
    is_rounded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "row out"]:
    """Return float32 products of rows with the transposed (out, features) matrix.

    On CPU, a row's bits do not depend on other rows.

    Args:
        inputs: float32.
        panels: float32; or bfloat16 or quantized, widened as they are read. The sum of
            a group is multiplied by its scale; a minimum is multiplied by the sum of
            the row's features.
        num_outputs: Outputs of the matrix, without padding of the last panel.
        is_rounded: Round rows to bfloat16 first, unless the panels are float32:
            processors multiply bfloat16 faster. Sums are float32 in any case.
        implementation: Name of one implementation; None selects that of jax's default
            backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, (num_outputs, inputs.shape[1]))
    run = dispatch.choose("panel_matmul", _MODULES, implementation)
    return run(inputs, panels, num_outputs=num_outputs, is_rounded=is_rounded)


def panel_rows(
    index: Int[Array, " row"],
    panels: Panels,
    *,
    shape: tuple[int, ...],
    implementation: str | None = None,
) -> Float[Array, "row features"]:
    """Return some rows of the (out, features) matrix, in float32.

    Args:
        index: Row numbers; clamped to those of the matrix.
        shape: Shape of the matrix.
        panels: As in `panel_matmul`.
        implementation: As in `panel_matmul`.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    _check(panels, shape)
    run = dispatch.choose("panel_matmul", _MODULES, implementation, "panel_rows")
    return run(index, panels, shape=shape)


def _check(panels: Panels, shape: tuple[int, ...]) -> None:
    if isinstance(panels, QuantizedPanels):
        return _check_quantized(panels, shape)
    needed = panel_form(shape, panels.dtype.itemsize)
    if panels.shape != needed:
        raise ValueError(
            f"{panels.dtype} panels have shape {panels.shape}, but for a matrix of "
            f"{shape[0]} outputs and {shape[1]} features they must be {needed}: "
            f"[panel, features, {WIDTH}] of float32 or "
            f"[panel, pair of features, {WIDTH}, 2] of bfloat16"
        )


def _check_quantized(panels: QuantizedPanels, shape: tuple[int, ...]) -> None:
    values, scales = panels
    groups, has_minima = scales.shape[1], scales.ndim == 4
    is_packed = values.dtype == jnp.uint32
    kind = jnp.dtype(jnp.int4) if is_packed else values.dtype
    needed = quantized_form(shape, kind, groups, has_minima=has_minima)
    found = (values.shape, values.dtype), (scales.shape, scales.dtype)
    if values.dtype not in _VALUES or found != needed:
        raise ValueError(
            f"{values.dtype} panels have shape {values.shape} and {scales.dtype} "
            f"scales {scales.shape}, but for a matrix of {shape[0]} outputs and "
            f"{shape[1]} features they must be {needed}, with panels of type "
            f"{', '.join(jnp.dtype(kind).name for kind in _VALUES)}"
        )
