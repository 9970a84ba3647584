"""Pages that hold bfloat16 values as bits.

XLA:CPU has no bf16 gather or scatter: it converts the whole operand to float32 and
back, every page of the pool on every call, and a bitcast of the pool is a copy too. A
pool of uint16 is read and written in place; only the rows that are touched are bitcast.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Type of a page pool that holds `dtype` values on a platform."""
    dtype = jnp.dtype(dtype)
    if platform == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return dtype


def check_storage(dtype: jnp.dtype) -> None:
    """Refuse pools of a type that no implementation reads.

    Raises:
        NotImplementedError: It is one of those.
    """
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.uint16):
        raise NotImplementedError(
            f"pages of {jnp.dtype(dtype)}: keys and values are kept as bfloat16, "
            "float16 or float32, or as bits of bfloat16 in uint16; quantised pages "
            "are not there yet"
        )


def to_storage(rows: Array, dtype: jnp.dtype) -> Array:
    """Rows as a pool of type `dtype` keeps them."""
    if dtype != jnp.uint16:
        return rows.astype(dtype)
    return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)


def from_storage(rows: Array) -> Array:
    """Rows of a pool as float32."""
    if rows.dtype == jnp.uint16:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return rows.astype(jnp.float32)
