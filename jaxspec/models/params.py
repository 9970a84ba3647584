"""The declaration of a parameter.

Its random values, abstract shape, placement and the tensors read into it all follow
from its `ParamSpec`: see `jaxspec.models.weights`.
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

# A tree of matrices in their storage formats, and of arrays for vectors.
Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """A vector, or a matrix in HuggingFace's order, which is (out, in).

    Attributes:
        axes: Logical axis of each dimension, of those in `jaxspec.sharding`.
        tensors: Canonical names of the tensors it is made of. The rows of several
            alternate, in runs of `unit / len(tensors)`.
        unit: Elements of the split axis that stay on one device, such as a head's.
        copies: Times that every `unit` of rows is repeated, for several devices.
        form: Class of a matrix, which is its storage format; a vector is an array.
        scheme: Quantization scheme; None if it is not quantized.
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
        """Number of values, without those that storage adds, such as padding."""
        return math.prod(self.shape)

    def sharding(self, mesh: Mesh, mesh_axes: tuple[str, ...]) -> NamedSharding:
        """Return the placement of its rows and columns on the devices."""
        return named_sharding(
            mesh, self.axes, self.shape, unit=self.unit, mesh_axes=mesh_axes
        )

    def wrap(self, values: Array | jax.ShapeDtypeStruct | Quantized) -> Any:
        """Return the network's parameter, made from its values or their shape."""
        return values if len(self.shape) == 1 else self.form.of(values)


ParamPath = tuple[str, ...]
Specs = dict[ParamPath, ParamSpec]
