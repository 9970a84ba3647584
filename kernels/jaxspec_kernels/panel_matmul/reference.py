"""Products with panels in plain jnp: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Num[Array, "panel ..."],
    *,
    num_outputs: int,
    is_rounded: bool,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.panel_matmul`."""
    if is_rounded and panels.dtype == jnp.bfloat16:
        inputs = inputs.astype(jnp.bfloat16).astype(jnp.float32)
    matrix = _matrix(panels, (num_outputs, inputs.shape[1]))
    return jnp.matmul(inputs, matrix.T, precision=jax.lax.Precision.HIGHEST)


def panel_rows(
    index: Int[Array, " row"],
    panels: Num[Array, "panel ..."],
    *,
    shape: tuple[int, ...],
) -> Float[Array, "row features"]:
    """See `jaxspec_kernels.panel_matmul.panel_rows`."""
    matrix = _matrix(panels, shape)
    return matrix[jnp.clip(index, 0, matrix.shape[0] - 1)]


def _matrix(
    panels: Num[Array, "panel ..."], shape: tuple[int, ...]
) -> Float[Array, "out features"]:
    split = jnp.moveaxis(panels, 2, 1).astype(jnp.float32)
    whole = split.reshape(split.shape[0] * split.shape[1], -1)
    return whole[: shape[0], : shape[1]]
