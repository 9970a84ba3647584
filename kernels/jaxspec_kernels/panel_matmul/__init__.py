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

__all__ = ["WIDTH", "Panels", "QuantizedPanels", "from_panels", "from_quantized_panels"]
__all__ += ["panel_form", "panel_matmul", "panel_rows", "quantized_form"]
__all__ += ["quantized_panels", "to_panels"]

# Number of matrix outputs in one panel.
WIDTH = 32
_MODULES = {"reference": "reference", "cpu": "cpu"}
# Types of quantized panels; a uint8 holds two 4-bit values.
_VALUES = (jnp.int8, jnp.float8_e4m3fn, jnp.uint8)


class QuantizedPanels(NamedTuple):
    """8-bit or 4-bit values, and a scale for each output and group of features.

    Attributes:
        values: int8 or float8_e4m3fn, [panel, features, WIDTH]; or 4-bit values of two
            features in a uint8, the first in its lower half: [panel, pair, WIDTH].
        scales: float32, [panel, group, WIDTH].
    """

    values: Any
    scales: Any


Panels = Num[Array, "..."] | QuantizedPanels


def quantized_form(
    shape: tuple[int, ...], dtype: Any, num_groups: int
) -> tuple[tuple[tuple[int, ...], Any], tuple[tuple[int, ...], Any]]:
    """Return shapes and types of the panels of quantized [out, features] values.

    Raises:
        ValueError: Groups are not whole, or have an odd number of 4-bit values.
    """
    (outputs, features), is_half = shape, dtype == jnp.int4
    if features % (2 * num_groups if is_half else num_groups):
        raise ValueError(
            f"{features} features must divide into {num_groups} groups of equal size, "
            "which must be even for 4-bit values"
        )
    count = -(-outputs // WIDTH)
    values = (count, features // (2 if is_half else 1), WIDTH)
    kind = jnp.uint8 if is_half else dtype
    return (values, kind), ((count, num_groups, WIDTH), jnp.float32)


def quantized_panels(values: np.ndarray, scales: np.ndarray) -> QuantizedPanels:
    """Pack [out, features] values and [out, group] scales in panels, on the host."""
    (_, kind), _ = quantized_form(values.shape, values.dtype, scales.shape[1])
    if kind == jnp.uint8:
        bits = values.astype(np.int8).view(np.uint8) & 0xF
        values = bits[:, ::2] | bits[:, 1::2] << 4
    panels = _split(values, -(-len(values) // WIDTH) * WIDTH)
    return QuantizedPanels(panels, to_panels(np.asarray(scales, np.float32)))


def from_quantized_panels(
    panels: QuantizedPanels, shape: tuple[int, ...]
) -> np.ndarray:
    """Dequantize panels to a float32 (out, features) matrix, on the host."""
    values = np.moveaxis(panels.values, 2, 1).reshape(-1, panels.values.shape[1])
    if values.dtype == np.uint8:
        pairs = np.stack([values << 4, values & 0xF0], axis=2).view(np.int8) >> 4
        values = pairs.reshape(len(values), -1)
    scales = from_panels(panels.scales, (shape[0], panels.scales.shape[1]))
    numbers = values[: shape[0]].astype(np.float32)
    numbers = numbers.reshape(*scales.shape, -1) * scales[:, :, None]
    return numbers.reshape(shape)


def _split(values: np.ndarray, num_rows: int) -> np.ndarray:
    """Split [row, column] into panels of rows, padded with zeros."""
    values = np.pad(values, ((0, num_rows - len(values)), (0, 0)))
    split = values.reshape(-1, WIDTH, values.shape[1])
    return np.ascontiguousarray(np.moveaxis(split, 1, 2))


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
    return np.ascontiguousarray(np.moveaxis(split, 1, 2))


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
        panels: float32 or bfloat16, widened to float32 as they are read; or quantized:
            widened too, and the sum of a group is multiplied by its scale.
        num_outputs: Outputs of the matrix, without padding of the last panel.
        is_rounded: Round rows to bfloat16 first if the panels are bfloat16: processors
            multiply these faster.
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
        panels, implementation: As in `panel_matmul`.

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
    groups, is_half = scales.shape[1], values.dtype == jnp.uint8
    kind = jnp.dtype(jnp.int4) if is_half else values.dtype
    needed = quantized_form(shape, kind, groups)
    found = (values.shape, values.dtype), (scales.shape, scales.dtype)
    if values.dtype not in _VALUES or found != needed:
        raise ValueError(
            f"{values.dtype} panels have shape {values.shape} and {scales.dtype} "
            f"scales {scales.shape}, but for a matrix of {shape[0]} outputs and "
            f"{shape[1]} features they must be {needed}, with panels of type "
            f"{', '.join(jnp.dtype(kind).name for kind in _VALUES)}"
        )
