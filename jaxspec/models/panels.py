"""Panels: the form of a matrix that XLA:CPU multiplies few float32 rows with.

A matmul of few rows only reads its matrix. XLA:CPU's float32 kernel copies an
(out, in) matrix into blocks first, on every call, which takes two to three times as
long. Here `PANEL` outputs lie together, input by input, as the kernel wants them: one
batch of small matmuls, the same sums in the same order, hence the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.sharding import replicated

# Outputs of one panel. Measured on an AVX-512 machine: 32, 96 and 128 are slower.
PANEL = 64
# A batch of matmuls wants its inputs once for each panel. Beyond this many rows their
# copies are more to write than the matrix is to read.
MOST_ROWS = 64

Matrix = Float[Array, "out features"] | Float[Array, "panel features width"]


def is_cut(matrix: Matrix) -> bool:
    """Whether a matrix is in panels, and not (out, in)."""
    return len(matrix.shape) == 3


def num_outputs(matrix: Matrix) -> int:
    """The first axis of an (out, in) matrix, whatever its form is."""
    return matrix.shape[0] * (matrix.shape[2] if is_cut(matrix) else 1)


def are_wanted(mesh: Mesh, dtype: jnp.dtype) -> bool:
    """Whether these devices multiply weights of this type faster as panels."""
    platform = mesh.devices.flat[0].platform
    return platform == "cpu" and mesh.size == 1 and dtype == jnp.float32


def cut(
    matrix: Float[Array, "out features"],
) -> Float[Array, "panel features width"]:
    """An (out, in) matrix in panels; `out` is a multiple of `PANEL`."""
    outputs, features = matrix.shape
    panels = matrix.reshape(outputs // PANEL, PANEL, features)
    return panels.transpose(0, 2, 1)


def cut_params(params: dict[str, Any], mesh: Mesh) -> None:
    """Cut the matrices of a tree in place, one after another, where they divide."""
    for name, value in params.items():
        if isinstance(value, dict):
            cut_params(value, mesh)
        elif value.ndim == 2 and value.shape[0] % PANEL == 0:
            params[name] = jax.device_put(cut(value), replicated(mesh))


def multiply(
    inputs: Float[Array, "token features"],
    panels: Float[Array, "panel features width"],
    **options: Any,
) -> Float[Array, "token out"]:
    """Rows times panels.

    Args:
        options: Of `dot_general`.
    """
    rows, (count, features, width) = inputs.shape[0], panels.shape
    if rows > MOST_ROWS:
        matrix = panels.transpose(1, 0, 2).reshape(features, count * width)
        numbers = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(inputs, matrix, numbers, **options)
    copies = jnp.broadcast_to(inputs[None], (count, rows, features))
    numbers = (((2,), (1,)), ((0,), (0,)))
    outputs = jax.lax.dot_general(copies, panels, numbers, **options)
    return outputs.transpose(1, 0, 2).reshape(rows, count * width)


def take(
    panels: Float[Array, "panel features width"], index: Int[Array, " token"]
) -> Float[Array, "token features"]:
    """Rows of the (out, in) matrix that was cut; an index beyond it is its last."""
    index = jnp.clip(index, 0, num_outputs(panels) - 1)
    width = panels.shape[2]
    return panels[index // width, :, index % width]
