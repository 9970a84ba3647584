"""Panels: a second form of a matrix, which XLA:CPU multiplies few float32 rows with.

A matmul of few rows takes as long as its matrix takes to read. XLA:CPU's float32 kernel
copies an (out, in) matrix into blocks first, on every call, and takes two to three
times that. In panels, `WIDTH` outputs lie together, input by input, as the kernel wants
them: a batch of small matmuls, the same sums in the same order, hence the same bits.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxspec.sharding import replicated

# Outputs of one panel: the fastest of 32, 64, 96 and 128, with AVX-512.
WIDTH = 64
# A batch wants its rows once for each panel. With more rows than this, or more bytes of
# copies, the (out, in) form is faster.
MAX_ROWS = 24
MAX_COPIED_BYTES = 8 * 2**20
# Of a model's matrices: beyond it, a second form is not worth its memory.
MAX_BYTES = 2**30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix", "panels"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class Panelled:
    """A matrix in both forms; who takes it for an array sees the (out, in) one.

    Attributes:
        matrix: [out, features]; as in any tree, its shape or whatever stands for it.
        panels: [panel, features, width].
    """

    matrix: Any
    panels: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.matrix.dtype

    @property
    def nbytes(self) -> int:
        """What one product reads."""
        return self.matrix.nbytes

    @property
    def sharding(self) -> Any:
        return self.matrix.sharding

    @property
    def at(self) -> Any:
        return self.matrix.at

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.matrix, dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        """The whole, for `parameter[...]`."""
        return self if index is Ellipsis else self.matrix[index]


Matrix = Float[Array, "out features"] | Panelled


def are_wanted(mesh: Mesh, params: dict[str, Any]) -> bool:
    """Whether these devices gain by a second form of a model's matrices."""
    device, dtype = mesh.devices.flat[0], params["embedding"].dtype
    leaves = jax.tree.leaves(params)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    is_one_cpu = device.platform == "cpu" and mesh.size == 1
    return is_one_cpu and dtype == jnp.float32 and num_bytes <= MAX_BYTES


def cut(
    matrix: Float[Array, "out features"],
) -> Float[np.ndarray, "panel features width"]:
    """An (out, in) matrix in panels; `out` is a multiple of `WIDTH`.

    On the host, which has the CPU's arrays: nothing is compiled for it.
    """
    panels = np.asarray(matrix).reshape(-1, WIDTH, matrix.shape[1])
    return np.ascontiguousarray(panels.transpose(0, 2, 1))


def add_panels(params: dict[str, Any], mesh: Mesh) -> None:
    """Give the matrices of a tree, in place, their second form, where they divide.

    Abstract ones get an abstract one.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            add_panels(value, mesh)
        elif value.ndim == 2 and value.shape[0] % WIDTH == 0:
            if isinstance(value, jax.ShapeDtypeStruct):
                count, features = value.shape[0] // WIDTH, value.shape[1]
                panels = jax.ShapeDtypeStruct(
                    (count, features, WIDTH), value.dtype, sharding=replicated(mesh)
                )
            else:
                panels = jax.device_put(cut(value), replicated(mesh))
            params[name] = Panelled(value, panels)


def multiply(
    inputs: Float[Array, "token features"], matrix: Matrix, **options: Any
) -> Float[Array, "token out"]:
    """Rows times an (out, in) matrix, in the form that is faster for so many.

    Args:
        options: Of `dot_general`.
    """
    if isinstance(matrix, Panelled) and _pay(inputs, matrix.panels):
        return _multiply_panels(inputs, matrix.panels, **options)
    whole = matrix.matrix if isinstance(matrix, Panelled) else matrix
    return jax.lax.dot_general(inputs, whole, (((1,), (1,)), ((), ())), **options)


def _pay(inputs: Array, panels: Array) -> bool:
    copied_bytes = panels.shape[0] * inputs.size * inputs.dtype.itemsize
    return inputs.shape[0] <= MAX_ROWS and copied_bytes <= MAX_COPIED_BYTES


def _multiply_panels(
    inputs: Float[Array, "token features"],
    panels: Float[Array, "panel features width"],
    **options: Any,
) -> Float[Array, "token out"]:
    copies = jnp.broadcast_to(inputs, (panels.shape[0], *inputs.shape))
    numbers = (((2,), (1,)), ((0,), (0,)))
    outputs = jax.lax.dot_general(copies, panels, numbers, **options)
    return outputs.transpose(1, 0, 2).reshape(inputs.shape[0], -1)
