"""A parameter's one declaration.

Its random values, abstract shape, placement and the tensors that are read into it all
follow from a `ParamSpec`: see `jaxspec.models.weights`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.quantized import Quantized
from jaxspec.sharding import named_sharding
from jaxspec_checkpoints.quantization import Scheme

# A tree of matrices in their forms, and of arrays for vectors.
Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """A vector, or a matrix in HuggingFace's order, which is (out, in).

    Attributes:
        axes: Logical axis of each dimension, of those in `jaxspec.sharding`.
        tensors: Canonical names of what it is made of. The rows of several alternate:
            each gives `unit / len(tensors)` at a time.
        unit: Elements of the split axis that stay on one device: a head's.
        copies: How often every `unit` of rows is repeated, for several devices.
        form: How a matrix is stored; a vector is an array.
        scheme: How it is quantized; None: not at all.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    tensors: tuple[str, ...]
    unit: int = 1
    copies: int = 1
    form: type[Matrix] = DenseMatrix
    scheme: Scheme | None = None

    @property
    def num_values(self) -> int:
        """Of all rows and columns, before a form adds any."""
        return math.prod(self.shape)

    def sharding(self, mesh: Mesh, mesh_axes: tuple[str, ...]) -> NamedSharding:
        """Which device holds which of its rows and columns."""
        return named_sharding(
            mesh, self.axes, self.shape, unit=self.unit, mesh_axes=mesh_axes
        )

    def wrap(self, values: Array | jax.ShapeDtypeStruct | Quantized) -> Any:
        """The parameter that the network is given, of its values or their shape."""
        return values if len(self.shape) == 1 else self.form.of(values)


ParamPath = tuple[str, ...]
Specs = dict[ParamPath, ParamSpec]
