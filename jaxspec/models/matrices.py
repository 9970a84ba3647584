"""Storage formats of a matrix on a device, and the interface that networks use.

`jaxspec.models.weights.choose_forms` chooses a format once, from the platform and the
type of the weights. Networks multiply and look up rows; only the format's class knows
how the numbers are stored.

To add a format: a subclass of `Matrix` that is a pytree, and its condition in
`choose_forms`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Matrix(ABC):
    """An (out, features) matrix, HuggingFace's order, in some format; a pytree."""

    @classmethod
    def fits(cls, shape: tuple[int, ...]) -> bool:
        """Return whether a matrix of this shape can be stored in this format."""
        return True

    @classmethod
    @abstractmethod
    def of(cls, values: Any) -> "Matrix":
        """Make the matrix from values on devices, or from their abstract shape."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, not of the arrays that store it."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The type that rows are rounded to before they are multiplied."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that one product reads."""

    @abstractmethod
    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Return products of rows with the transposed matrix, in float32."""

    @abstractmethod
    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        """Look up rows, in float32; an index past the end returns the last row."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DenseMatrix(Matrix):
    """The matrix as one array.

    Attributes:
        values: [out, features]: an array, or its abstract shape.
    """

    values: Any

    @classmethod
    def of(cls, values: Any) -> "DenseMatrix":
        return cls(values)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Contract both second axes.

        For this format XLA:CPU has a bf16 kernel whose cost does not grow between 2 and
        16 rows, the range of verification.
        """
        return product(inputs.astype(self.dtype), self.values, (((1,), (1,)), ((), ())))

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        return self.values.at[index].get(mode="clip").astype(jnp.float32)


def product(inputs: Array, weights: Array, dimension_numbers: Any) -> Array:
    """Return `dot_general` of operands in the weights' type, summed in float32."""
    return jax.lax.dot_general(
        inputs,
        weights,
        dimension_numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
