"""Products with panels in C++: a thread reads each weight from memory once.

bfloat16 weights are widened in registers: the arithmetic is in float32, but half the
bytes of float32 weights are read, which XLA:CPU cannot do. Quantized weights are
widened as well: a quarter or an eighth of the bytes are read. Rows rounded to bfloat16
are multiplied in bfloat16.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec_kernels import native
from jaxspec_kernels.panel_matmul import Panels, QuantizedPanels


def operands(panels: Panels) -> tuple[Array, Array]:
    """Return values and scales (empty if none) as operands of the C++ operations."""
    if isinstance(panels, QuantizedPanels):
        return panels.values, panels.scales
    return panels, jnp.zeros((0,), jnp.float32)


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Panels,
    *,
    num_outputs: int,
    is_rounded: bool,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.panel_matmul`."""
    native.require("panel_matmul")
    made = jax.ShapeDtypeStruct((inputs.shape[0], num_outputs), jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_multiply", made)
    return call(inputs, *operands(panels), is_rounded=is_rounded)


def panel_rows(
    index: Int[Array, " row"],
    panels: Panels,
    *,
    shape: tuple[int, ...],
) -> Float[Array, "row features"]:
    """See `jaxspec_kernels.panel_matmul.panel_rows`."""
    native.require("panel_rows")
    made = jax.ShapeDtypeStruct((index.shape[0], shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_look_up", made)
    return call(index, *operands(panels), num_outputs=np.int64(shape[0]))
