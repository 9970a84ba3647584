"""Formats of quantized matrices for accelerators, and placement of their parts.

Products read the values as stored: XLA converts them within the fusion of the dot, or a
GPU kernel in registers, so that no matrix of the rows' type is ever written
(`tests/models/test_quantized_aot.py`). Formats for CPUs are in `jaxspec.models.cpu`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.models.matrices import Matrix, product
from jaxspec_checkpoints.quantization import INT4, Scheme, stored_bytes
from jaxspec_kernels import grouped_matmul


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized matrix as read from a file: placed arrays, or their abstract shapes.

    Attributes:
        values: [out, features], of the scheme's type.
        scales: float32, [out, group]; or [out, group, 2]: scales and minima.
        dtype: Type that rows are rounded to before they are multiplied with it.
    """

    values: Any
    scales: Any
    dtype: jnp.dtype


def scales_sharding(sharding: NamedSharding, num_groups: int) -> NamedSharding:
    """Return the placement of scales and minima, from that of the values.

    Outputs are split as those of the values are. Groups are split as the features are,
    if their number divides evenly.
    """
    outputs, features = sharding.spec
    names = (features,) if isinstance(features, str) else features or ()
    parts = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
    split = features if num_groups % parts == 0 else None
    return NamedSharding(sharding.mesh, PartitionSpec(outputs, split))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ScaledMatrix(Matrix):
    """One scale per output, which multiplies the products of the values.

    Attributes:
        values: [out, features], int8, int4 (not on CPUs) or float8_e4m3fn.
        scales: [out], float32.
        row_type: Type that rows are rounded to.
    """

    values: Any
    scales: Any
    row_type: str = field(metadata=dict(static=True))

    @classmethod
    def of(cls, values: Quantized) -> "ScaledMatrix":
        matrix, scales = values.values, values.scales
        row_type, mesh = jnp.dtype(values.dtype).name, scales.sharding.mesh
        placement = NamedSharding(mesh, PartitionSpec(scales.sharding.spec[0]))
        kind = _stored_type(matrix.dtype, mesh)
        if isinstance(matrix, jax.ShapeDtypeStruct):
            matrix = matrix.update(dtype=kind)
            scales = scales.update(shape=scales.shape[:1], sharding=placement)
        else:
            if kind != matrix.dtype:
                widen = functools.partial(_widened, dtype=kind)
                matrix = _reshaped(matrix, widen, matrix.sharding)
            scales = _reshaped(scales, _first_column, placement)
        return cls(matrix, scales, row_type)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.row_type)

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.values.shape, self.values.dtype) + self.scales.nbytes

    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Multiply; converting the values to the rows' type is exact."""
        outputs = product(
            inputs.astype(self.dtype),
            self.values.astype(self.dtype),
            (((1,), (1,)), ((), ())),
        )
        return outputs * self.scales[None]

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        values = self.values.at[index].get(mode="clip").astype(jnp.float32)
        return values * self.scales.at[index].get(mode="clip")[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GroupedMatrix(Matrix):
    """Scales for groups of features: one product per group.

    Groups are the leading axis, the batch of the dot: a TPU would copy the values of an
    (out, features) matrix into this order on every call.

    Attributes:
        values: [group, feature of the group, out].
        scales: float32, [group, out]; or [2, group, out]: scales and minima.
        row_type: Type that rows are rounded to.
        placement: If a kernel multiplies on several GPUs: how the values are split.
            None if XLA splits the product, or for a single device.
        implementation: As in `grouped_matmul`.
    """

    values: Any
    scales: Any
    row_type: str = field(metadata=dict(static=True))
    placement: NamedSharding | None = field(default=None, metadata=dict(static=True))
    implementation: str = field(default="reference", metadata=dict(static=True))

    @classmethod
    def of(cls, values: Quantized) -> "GroupedMatrix":
        """Reorder on the devices; needs memory for a second copy of the matrix."""
        values = _with_split_group(values)
        matrix, scales = values.values, values.scales
        outputs, features = scales.sharding.spec
        mesh, groups = scales.sharding.mesh, scales.shape[1]
        size = matrix.shape[1] // groups
        of_values = NamedSharding(mesh, PartitionSpec(features, None, outputs))
        kinds = (None,) * (len(scales.shape) - 2)  # of [2, group, out]
        of_scales = NamedSharding(mesh, PartitionSpec(*kinds, features, outputs))
        form, kind = (groups, size, matrix.shape[0]), _stored_type(matrix.dtype, mesh)
        settings: dict[str, Any] = dict(row_type=jnp.dtype(values.dtype).name)
        if _is_gpu(mesh.devices.flat[0].platform) and _has_kernel(
            matrix.dtype, of_values.shard_shape(form)
        ):
            settings |= dict(implementation="gpu", placement=_abstract(of_values))
        if isinstance(matrix, jax.ShapeDtypeStruct):
            return cls(
                matrix.update(shape=form, dtype=kind, sharding=of_values),
                scales.update(shape=scales.shape[::-1], sharding=of_scales),
                **settings,
            )
        split = functools.partial(_groups_first, num_groups=groups, dtype=kind)
        return cls(
            _reshaped(matrix, split, of_values),
            _reshaped(scales, jnp.transpose, of_scales),
            **settings,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        groups, size, outputs = self.values.shape
        return outputs, groups * size

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.row_type)

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.values.shape, self.values.dtype) + self.scales.nbytes

    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Multiply; group sums and their total are float32.

        A minimum is multiplied by the sum of the row's features.
        """
        multiply = functools.partial(grouped_matmul, implementation=self.implementation)
        if self.placement is not None:
            multiply = self._split(multiply, self.placement)
        return multiply(inputs.astype(self.dtype), self.values, self.scales)

    def _split(
        self, multiply: Callable[..., Array], placement: NamedSharding
    ) -> Callable[..., Array]:
        """Return a function that multiplies on each device, and sums over groups."""
        groups, _, outputs = placement.spec

        def run(inputs: Array, values: Array, scales: Array) -> Array:
            products = multiply(inputs, values, scales)
            return products if groups is None else jax.lax.psum(products, groups)

        kinds = (None,) * (self.scales.ndim - 2)
        return jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(
                PartitionSpec(None, groups),
                placement.spec,
                PartitionSpec(*kinds, groups, outputs),
            ),
            out_specs=PartitionSpec(None, outputs),
            check_vma=False,  # kernels do not declare what varies by device
        )

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        numbers = self.values.at[:, :, index].get(mode="clip").astype(jnp.float32)
        scales, minima = self._scales_and_minima()
        numbers = numbers * scales.at[:, index].get(mode="clip")[:, None]
        if minima is not None:
            numbers = numbers + minima.at[:, index].get(mode="clip")[:, None]
        return numbers.transpose(2, 0, 1).reshape(len(index), -1)

    def _scales_and_minima(self) -> tuple[Array, Array | None]:
        if self.scales.ndim == 2:
            return self.scales, None
        return self.scales[0], self.scales[1]


def _with_split_group(values: Quantized) -> Quantized:
    """Make a single group of features one group per device that has a part of them.

    Devices have whole groups: each would have all features of a single group.
    """
    matrix, scales = values.values, values.scales
    parts = matrix.shape[1] // matrix.sharding.shard_shape(matrix.shape)[1]
    if scales.shape[1] > 1 or parts == 1:
        return values
    placement = scales_sharding(matrix.sharding, parts)
    if isinstance(scales, jax.ShapeDtypeStruct):
        shape = scales.shape[0], parts, *scales.shape[2:]
        return replace(values, scales=scales.update(shape=shape, sharding=placement))
    repeat = functools.partial(jnp.repeat, repeats=parts, axis=1)
    return replace(values, scales=_reshaped(scales, repeat, placement))


def _has_kernel(dtype: jnp.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a GPU's part of the values is multiplied by a kernel.

    XLA would write the products of each group, and widened 4-bit values.
    """
    return dtype == jnp.int8 or (_has_four_bits(dtype) and shape[2] % 2 == 0)


def _stored_type(dtype: jnp.dtype, mesh: Mesh) -> jnp.dtype:
    """Return the type that these devices store a matrix's values in.

    A CPU's int4 arrays take a byte per value, and programs compiled ahead of time
    reject them: they expect a layout with elements of 4 bits (jax 0.10.2).
    """
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(jnp.int8) if is_cpu and _has_four_bits(dtype) else dtype


def _has_four_bits(dtype: jnp.dtype) -> bool:
    return dtype in (jnp.int4, jnp.uint4)


def _is_gpu(platform: str) -> bool:
    return platform in ("gpu", "cuda")


def _abstract(placement: NamedSharding) -> NamedSharding | None:
    """Return the placement without its devices; None for a single device.

    Programs that were compiled for described devices run on real ones: both must have
    equal parameters.
    """
    mesh = placement.mesh
    if mesh.size == 1:
        return None
    sizes, names = tuple(mesh.shape.values()), mesh.axis_names
    return NamedSharding(AbstractMesh(sizes, names), placement.spec)


def choose_form(scheme: Scheme, platform: str) -> type[Matrix]:
    """Choose the storage format of a quantized matrix, for devices of a platform.

    On a GPU, XLA would widen 4-bit values with a scale per output in memory; as one
    group they are multiplied by a kernel.
    """
    is_grouped = scheme.group_size is not None
    is_widened = scheme.kind == INT4 and _is_gpu(platform)
    return GroupedMatrix if is_grouped or is_widened else ScaledMatrix


def _first_column(scales: Array) -> Array:
    return scales[:, 0]


def _widened(values: Array, dtype: jnp.dtype) -> Array:
    return values.astype(dtype)


def _groups_first(values: Array, num_groups: int, dtype: jnp.dtype) -> Array:
    values = _widened(values, dtype)
    return values.reshape(len(values), num_groups, -1).transpose(1, 2, 0)


def _reshaped(array: Array, make: Any, sharding: NamedSharding) -> Array:
    # Compiled, because only a compiled function allocates the shards without the whole
    # array.
    return jax.jit(make, out_shardings=sharding)(array)  # noqa: TID251
