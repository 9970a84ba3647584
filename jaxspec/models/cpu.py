"""Code that networks need to be fast and bit-exact on CPUs.

Owns the matrix layouts that the C++ operations read, calls of those operations, and
workarounds for XLA:CPU where they are not available. Each workaround names its reason
and the test that fails without it. Three more are elsewhere: the sums of norms in
`jaxspec_kernels.sums` (`tests/models/test_same_bits.py`), bf16 pages as uint16 in
`jaxspec_kernels.bits` (`tests/program/test_step.py`), and the largest value by two
maxima instead of argmax in `passes.lowest` (`tests/models/test_cpu.py`).
"""

import functools
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.batch import TokenBatch
from jaxspec.models.matrices import DenseMatrix, Matrix, product
from jaxspec.models.quantized import Quantized
from jaxspec.sharding import replicated
from jaxspec_kernels import decoder_blocks, native, panel_matmul, panel_rows
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.decoder_blocks import Attention, FeedForward, Queries
from jaxspec_kernels.panel_matmul import (
    QuantizedPanels,
    from_panels,
    from_quantized_panels,
    panel_form,
    quantized_form,
    quantized_panels,
    to_panels,
)

# Minimum rows of a batch. From four rows on, XLA:CPU's products sum each row in the
# same order, for any number of rows. With `row_sums`, and padding that is added as
# tokens before the first layer, a row's bits do not depend on the other rows: plain
# decoding equals verification bit for bit (`tests/models/test_same_bits.py`). On other
# devices a few more rows cost nothing.
MIN_ROWS = 4

# XLA:CPU offloads parts of a program, depending on array sizes, to a library with its
# own `exp` and `tanh`. If only matmuls are offloaded, a row's result does not depend on
# the number of rows (`tests/kernels/test_sums.py`).
COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}

_log = logging.getLogger(__name__)


@functools.cache
def instructions() -> str:
    """Return instruction sets of this CPU from /proc/cpuinfo; empty if unknown."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line for line in lines if line.startswith(("flags", "Features")))
    return next(found, "")


def has_bfloat16() -> bool:
    """Return whether XLA multiplies bfloat16 with instructions of the CPU.

    Without them it converts every weight to float32 on each use, six times slower than
    float32 weights.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return any(name in instructions() for name in ("avx512_bf16", "amx_bf16"))


@functools.cache
def compiler_options() -> dict[str, str | bool] | None:
    """Return compiler options for CPU devices; None if this XLA does not know them."""
    nothing = jax.jit(lambda: 0, compiler_options=COMPILER_OPTIONS)  # noqa: TID251
    try:
        nothing.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        _log.warning(
            "%s: with this version of jax, log-probabilities may differ in their last "
            "bit with the size of the batch",
            error,
        )
        return None
    return COMPILER_OPTIONS


def pad_batch(batch: TokenBatch, num_slots: int) -> TokenBatch:
    """Pad the batch to at least `MIN_ROWS` tokens; pads are in no region.

    The pads are tokens, not zero rows after the embedding: XLA fuses operations over
    padding differently, which changes bits.
    """
    missing = MIN_ROWS - batch.tokens.shape[0]
    if missing <= 0:
        return batch
    pads, local = (0, missing), batch.local_slot_mapping
    if local is not None:
        # A layer's slots may be a part of these (`layer_slots`).
        last = num_slots * (batch.unit_pages or 1)
        local = jnp.pad(local, pads, constant_values=last)
    return replace(
        batch,
        tokens=jnp.pad(batch.tokens, pads),
        positions=jnp.pad(batch.positions, pads),
        slot_mapping=jnp.pad(batch.slot_mapping, pads, constant_values=num_slots),
        local_slot_mapping=local,
        is_used=None if batch.is_used is None else jnp.pad(batch.is_used, pads),
    )


def with_pads(
    function: Callable[[Array], Array], rows: Float[Array, "row features"]
) -> Float[Array, "row out"]:
    """Call `function` on at least `MIN_ROWS` rows; drop its results for pads."""
    return function(pad_rows(rows))[: rows.shape[0]]


def pad_rows(rows: Array) -> Array:
    """Append rows of zeros up to `MIN_ROWS`."""
    missing = max(MIN_ROWS - rows.shape[0], 0)
    return jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))


def choose_form(
    dtype: jnp.dtype,
    *,
    num_devices: int,
    num_bytes: int,
    are_bfloat16: bool = False,
    is_trained: bool = False,
) -> type[Matrix]:
    """Choose how a model's matrices are stored on CPU devices.

    Args:
        num_bytes: Bytes of the whole model.
        are_bfloat16: The values are exact in bfloat16, whatever `dtype` stores them.
        is_trained: Whether gradients are taken through products; C++ products have
            none.
    """
    if num_devices == 1 and not is_trained and native.is_available():
        if dtype == jnp.float32 and are_bfloat16:
            return HalfMatrix
        return NativeMatrix
    if dtype == jnp.bfloat16:
        return Bfloat16Matrix
    if dtype == jnp.float32 and num_devices == 1 and num_bytes <= MAX_BYTES:
        return PanelMatrix
    return DenseMatrix


def choose_quantized_form(of_xla: type[Matrix], *, num_devices: int) -> type[Matrix]:
    """Choose how a model's quantized matrices are stored on CPU devices.

    Args:
        of_xla: The class to use if the C++ operations are not available.
    """
    if num_devices == 1 and native.is_available():
        return QuantizedMatrix
    return of_xla


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NativeMatrix(Matrix):
    """A matrix in panels, multiplied by `jaxspec_kernels.native`.

    Attributes:
        panels: As in `jaxspec_kernels.panel_matmul`, of the type of the weights.
        out, features: The matrix's own axes.
    """

    panels: Any
    out: int = field(metadata=dict(static=True))
    features: int = field(metadata=dict(static=True))

    @classmethod
    def of(cls, values: Any) -> "NativeMatrix":
        """Cut the panels on the host, which has the CPU's arrays: nothing compiles."""
        return cls(_panels_of(values, values.dtype), *values.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out, self.features

    @property
    def dtype(self) -> jnp.dtype:
        return self.panels.dtype

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    @property
    def is_rounded(self) -> bool:
        """Whether rows are rounded to bfloat16 before they are multiplied."""
        return self.dtype == jnp.bfloat16

    @property
    def operand(self) -> Any:
        """The matrix as the argument of C++ operations."""
        return self.panels

    @property
    def values(self) -> np.ndarray:
        """The matrix on the host, (out, features)."""
        return from_panels(np.asarray(self.panels), self.shape).astype(self.dtype)

    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Round rows to the weights' type; sum in float32."""
        return panel_matmul(
            inputs.astype(jnp.float32),
            self.operand,
            num_outputs=self.out,
            is_rounded=self.is_rounded,
            implementation=CPU,
        )

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        return panel_rows(index, self.operand, shape=self.shape, implementation=CPU)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class HalfMatrix(NativeMatrix):
    """A float32 matrix stored as bfloat16: exact, and half the bytes to read.

    Used for checkpoints that were published in bfloat16 and run with float32
    arithmetic.
    """

    @classmethod
    def of(cls, values: Any) -> "HalfMatrix":
        """Convert the values; raise `ValueError` if one is not exact in bfloat16."""
        matrix = cls(_panels_of(values, jnp.bfloat16), *values.shape)
        is_there = not isinstance(values, jax.ShapeDtypeStruct)
        if is_there and not np.array_equal(matrix.values, values, equal_nan=True):
            raise ValueError(
                f"matrix of shape {values.shape} has values that bfloat16 cannot "
                "represent exactly"
            )
        return matrix

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class QuantizedMatrix(NativeMatrix):
    """Values of 4 or 8 bits, which C++ operations widen in registers, and their scales.

    bfloat16 rows are rounded as for bfloat16 weights; sums are float32.

    Attributes:
        panels: As in `QuantizedPanels`.
        scales: As in `QuantizedPanels`.
        row_type: The type of the network's rows.
    """

    scales: Any
    row_type: str = field(metadata=dict(static=True))

    @classmethod
    def of(cls, values: Quantized) -> "QuantizedMatrix":
        """Cut the panels on the host, which has the CPU's arrays: nothing compiles."""
        matrix, scales = values.values, values.scales
        placement = replicated(matrix.sharding.mesh)
        if isinstance(matrix, jax.ShapeDtypeStruct):
            forms = quantized_form(
                matrix.shape,
                matrix.dtype,
                scales.shape[1],
                has_minima=len(scales.shape) == 3,
            )
            panels = QuantizedPanels(
                *(jax.ShapeDtypeStruct(*form, sharding=placement) for form in forms)
            )
        else:
            panels = quantized_panels(np.asarray(matrix), np.asarray(scales))
            panels = jax.device_put(panels, placement)
        row_type = jnp.dtype(values.dtype).name
        outputs, features = matrix.shape
        return cls(panels.values, outputs, features, panels.scales, row_type)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.row_type)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + self.scales.nbytes

    @property
    def operand(self) -> QuantizedPanels:
        return QuantizedPanels(self.panels, self.scales)

    @property
    def values(self) -> np.ndarray:
        """The dequantized float32 matrix, (out, features)."""
        held = QuantizedPanels(np.asarray(self.panels), np.asarray(self.scales))
        return from_quantized_panels(held, self.shape)


def are_native(params: Mapping[str, Any]) -> bool:
    """Return whether operations in C++ can read all of these matrices."""
    return all(isinstance(one, NativeMatrix) for one in params.values())


def attention_block(
    params: Mapping[str, Any],
    stream: Float[Array, "row model"],
    kv_pages: KvPages,
    *,
    batch: TokenBatch,
    tables: tuple[Array, Array],
    **settings: Any,
) -> tuple[Float[Array, "row model"], KvPages]:
    """See `jaxspec.models.layers.attention_block`."""
    cosine, sine = (table[:, 0] for table in tables)
    attention = Attention(
        **{name: matrix.operand for name, matrix in params.items()},
        cosine=cosine,
        sine=sine,
        slot_mapping=batch.slot_mapping,
        regions=[
            Queries(one.page_table, one.kv_len, one.num_queries, one.ancestor_mask)
            for one in batch.regions
        ],
        is_rounded=params["q_proj"].is_rounded,
        is_used=batch.is_used,
        **settings,
    )
    return decoder_blocks.attention_block(
        stream, kv_pages, attention, implementation=CPU
    )


def feed_forward_block(
    params: Mapping[str, Any],
    stream: Float[Array, "row model"],
    **settings: Any,
) -> Float[Array, "row model"]:
    """See `jaxspec.models.layers.feed_forward_block`."""
    network = FeedForward(
        **{name: matrix.operand for name, matrix in params.items()},
        hidden_size=params["down_proj"].shape[1],
        is_rounded=params["down_proj"].is_rounded,
        **settings,
    )
    return decoder_blocks.feed_forward_block(stream, network, implementation=CPU)


def _panels_of(values: Any, dtype: Any) -> Any:
    """Pack an (out, features) matrix in panels of a type, or its abstract shape."""
    placement = replicated(values.sharding.mesh)
    if isinstance(values, jax.ShapeDtypeStruct):
        form = panel_form(values.shape, jnp.dtype(dtype).itemsize)
        return jax.ShapeDtypeStruct(form, dtype, sharding=placement)
    return jax.device_put(to_panels(np.asarray(values).astype(dtype)), placement)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Bfloat16Matrix(DenseMatrix):
    """A matrix whose rows are looked up without converting all of it.

    XLA:CPU has no bf16 gather: it converts the whole table first, unless it can fuse
    the two. In a loop it would hoist the conversion, since the table does not change;
    the barrier prevents that (`tests/program/test_hlo.py`).
    """

    def rows(self, index: Int[Array, " token"]) -> Float[Array, "token features"]:
        values, index = jax.lax.optimization_barrier((self.values, index))
        return DenseMatrix(values).rows(index)


# Name of the implementation whose operations are in C++.
CPU = "cpu"
# Matrix outputs per panel for XLA's products: with AVX-512, the fastest of 32, 64, 96
# and 128.
XLA_WIDTH = 64
# Maximum rows, and bytes of copies, for which panels are used. The product copies its
# rows once per panel; with more of them, the (out, in) matrix is faster.
MAX_ROWS = 24
MAX_COPIED_BYTES = 8 * 2**20
# Maximum bytes of a model whose matrices are stored twice; for larger models the gain
# in speed is not worth the memory.
MAX_BYTES = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PanelMatrix(DenseMatrix):
    """A float32 matrix stored twice: (out, in), and in panels for products of few rows.

    A matmul of few rows takes as long as reading its matrix. XLA:CPU's float32 kernel
    copies an (out, in) matrix into blocks first, on every call, and takes two to three
    times as long. In a panel, the values of `XLA_WIDTH` outputs for the same input are
    adjacent, which is the order that the kernel itself uses. The product becomes a
    batch of small matmuls with the same sums in the same order, so the result has the
    same bits (`tests/models/test_cpu.py`).

    Attributes:
        panels: [panel, features, width].
    """

    panels: Any

    @classmethod
    def fits(cls, shape: tuple[int, ...]) -> bool:
        """Return whether the matrix's outputs divide into panels."""
        return shape[0] % XLA_WIDTH == 0

    @classmethod
    def of(cls, values: Any) -> "PanelMatrix":
        """Cut the panels on the host, which has the CPU's arrays: nothing compiles."""
        placement = replicated(values.sharding.mesh)
        if isinstance(values, jax.ShapeDtypeStruct):
            shape = values.shape[0] // XLA_WIDTH, values.shape[1], XLA_WIDTH
            return cls(values, values.update(shape=shape, sharding=placement))
        panels = np.asarray(values).reshape(-1, XLA_WIDTH, values.shape[1])
        panels = np.ascontiguousarray(panels.transpose(0, 2, 1))
        return cls(values, jax.device_put(panels, placement))

    def multiply(
        self, inputs: Float[Array, "token features"]
    ) -> Float[Array, "token out"]:
        """Multiply with the copy that is faster for this number of rows."""
        inputs = inputs.astype(self.dtype)
        copied_bytes = self.panels.shape[0] * inputs.size * inputs.dtype.itemsize
        if inputs.shape[0] > MAX_ROWS or copied_bytes > MAX_COPIED_BYTES:
            return super().multiply(inputs)
        copies = jnp.broadcast_to(inputs, (self.panels.shape[0], *inputs.shape))
        outputs = product(copies, self.panels, (((2,), (1,)), ((0,), (0,))))
        return outputs.transpose(1, 0, 2).reshape(inputs.shape[0], -1)
