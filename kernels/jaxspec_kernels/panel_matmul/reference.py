"""Products with panels in plain jnp: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec_kernels.panel_matmul import Panels, QuantizedPanels


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Panels,
    *,
    num_outputs: int,
    is_rounded: bool,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.panel_matmul`."""
    is_quantized = isinstance(panels, QuantizedPanels)
    if is_rounded and not is_quantized and panels.dtype == jnp.bfloat16:
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
    values = jnp.moveaxis(panels.values, 2, 1)  # [panel, width, values]
    if values.dtype == jnp.uint8:
        both = jnp.stack([values << 4, values & 0xF0], axis=3)
        values = jax.lax.bitcast_convert_type(both, jnp.int8) >> 4
    values = values.reshape(-1, shape[1])[: shape[0]].astype(jnp.float32)
    scales = _matrix(panels.scales, (shape[0], panels.scales.shape[1]))
    grouped = values.reshape(*scales.shape, -1) * scales[:, :, None]
    return grouped.reshape(shape)
