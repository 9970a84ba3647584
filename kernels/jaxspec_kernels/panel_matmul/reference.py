"""Products with panels in plain jnp: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec_kernels.panel_matmul import SHIFTS, Panels, QuantizedPanels


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Panels,
    *,
    num_outputs: int,
    is_rounded: bool,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.panel_matmul`."""
    is_float32 = not isinstance(panels, QuantizedPanels) and panels.dtype == jnp.float32
    if is_rounded and not is_float32:
        inputs = inputs.astype(jnp.bfloat16).astype(jnp.float32)
    matrix = _matrix(panels, (num_outputs, inputs.shape[1]))
    return jnp.matmul(inputs, matrix.T, precision=jax.lax.Precision.HIGHEST)


def panel_rows(
    index: Int[Array, " row"],
    panels: Panels,
    *,
    shape: tuple[int, ...],
) -> Float[Array, "row features"]:
    """See `jaxspec_kernels.panel_matmul.panel_rows`."""
    matrix = _matrix(panels, shape)
    return matrix[jnp.clip(index, 0, matrix.shape[0] - 1)]


def _matrix(panels: Panels, shape: tuple[int, ...]) -> Float[Array, "out features"]:
    if isinstance(panels, QuantizedPanels):
        return _quantized_matrix(panels, shape)
    split = jnp.moveaxis(panels, 2, 1).astype(jnp.float32)
    whole = split.reshape(split.shape[0] * split.shape[1], -1)
    return whole[: shape[0], : shape[1]]


def _quantized_matrix(
    panels: QuantizedPanels, shape: tuple[int, ...]
) -> Float[Array, "out features"]:
    count, num_groups, *_, width = panels.scales.shape
    has_minima = panels.scales.ndim == 4
    values = panels.values.reshape(count, -1, width)
    values = jnp.moveaxis(values, 2, 1).reshape(count * width, -1)
    if values.dtype == jnp.uint32:
        bits = values[:, :, None] >> jnp.asarray(SHIFTS)[None, None] << 28
        if not has_minima:
            bits = jax.lax.bitcast_convert_type(bits, jnp.int32)
        values = bits >> 28
    columns = panels.scales.reshape(count, -1, width)
    columns = _matrix(columns, (shape[0], columns.shape[1]))
    scales = columns.reshape(shape[0], num_groups, -1)
    numbers = values[: shape[0]].astype(jnp.float32).reshape(*scales.shape[:2], -1)
    numbers = numbers[:, :, : shape[1] // num_groups] * scales[:, :, :1]
    numbers = numbers + scales[:, :, 1:] if has_minima else numbers
    return numbers.reshape(shape)
