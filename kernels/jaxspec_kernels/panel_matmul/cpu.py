"""Products with panels in C++: every weight is read once for a dozen rows.

bfloat16 is widened in registers: float32 arithmetic at half the bytes, which XLA:CPU
has no form for.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxspec_kernels import native
from jaxspec_kernels.panel_matmul import WIDTH


def panel_matmul(
    inputs: Float[Array, "row features"],
    panels: Num[Array, "panel ..."],
    *,
    is_rounded: bool,
) -> Float[Array, "row out"]:
    """See `jaxspec_kernels.panel_matmul`."""
    native.require("panel_matmul")
    shape = inputs.shape[0], panels.shape[0] * WIDTH
    made = jax.ShapeDtypeStruct(shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_multiply", made)
    return call(inputs, panels, is_rounded=is_rounded)


def panel_rows(
    index: Int[Array, " row"], panels: Num[Array, "panel ..."]
) -> Float[Array, "row features"]:
    """See `jaxspec_kernels.panel_matmul.panel_rows`."""
    native.require("panel_rows")
    features = math.prod(panels.shape[1:]) // WIDTH
    made = jax.ShapeDtypeStruct((index.shape[0], features), jnp.float32)
    return jax.ffi.ffi_call("jaxspec_look_up", made)(index, panels)
