"""The forms in which a device holds a matrix, and what a network asks of any of them.

A form is chosen once, by `jaxspec.models.weights.choose_forms`, from the platform and
the type of the weights. Networks multiply and look rows up; how the numbers lie is the
form's business alone.

To add a form: a subclass of `Matrix` that is a pytree, and its condition there.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Matrix(ABC):
    """An (out, features) matrix, HuggingFace's order, whatever its form; a pytree."""

    @classmethod
    def fits(cls, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of this shape can have the form."""
        return True

    @classmethod
    @abstractmethod
    def of(cls, values: Any) -> "Matrix":
        """Make the form of placed values; or its shapes, of the shape of values."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the matrix, not of what holds it."""

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
        """Products of rows with the transposed matrix, in float32."""

    @abstractmethod
    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        """Some of its rows in float32; an index beyond the last means the last."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DenseMatrix(Matrix):
    """The numbers themselves.

    Attributes:
        values: [out, features]; as in any tree, the array or whatever stands for it.
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
        """Contracts both second axes.

        For this form XLA:CPU has a bf16 kernel whose cost does not grow between 2 and
        16 rows, which is what verification needs.
        """
        return product(inputs.astype(self.dtype), self.values, (((1,), (1,)), ((), ())))

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        return self.values.at[index].get(mode="clip").astype(jnp.float32)


def product(inputs: Array, weights: Array, dimension_numbers: Any) -> Array:
    """`dot_general` of operands in the weights' type, summed in float32."""
    return jax.lax.dot_general(
        inputs,
        weights,
        dimension_numbers,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
