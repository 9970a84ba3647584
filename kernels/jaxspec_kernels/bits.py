"""What pages of keys and values hold: floats, their bits, or eight bits of each.

XLA:CPU has no gather or scatter of bf16 or fp8: it converts the whole operand to a
wider type and back, every page of the pool on every call, and a bitcast of the pool is
a copy too. A pool of uint16 or uint8 is read and written in place; only the rows that
are touched are bitcast.

Quantized, a key or a value depends on its own token and head alone: on no other token
of its page, which a scale for the page would have it do. So what is kept of a token is
the same whether it was fed by itself, among drafts or with a prompt.

- fp8 is e4m3 without a scale, as vLLM's default is: each number has an exponent of its
  own, and a scale would help only those beyond 448, which become 448, or below 2^-6,
  which are kept to 2^-10.
- int8 has a scale for each token and head, of its keys and of its values: the largest
  magnitude becomes 127. With 256 numbers a head these are 1.6 % more bytes.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Num

FP8 = jnp.dtype(jnp.float8_e4m3fn)
MAX_FP8, MAX_INT8 = 448.0, 127.0

# Types of pools that hold bits, and what these are the bits of.
_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, FP8)


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledPages:
    """Pages of int8: a number is its value times the scale of its token and head."""

    values: Int8[Array, "page page_size two_kv_head head_dim"]
    scales: Float[Array, "page page_size two_kv_head"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


KvPages = Num[Array, "page page_size two_kv_head head_dim"] | ScaledPages


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Type of a page pool that holds `dtype` values on a platform."""
    dtype = jnp.dtype(dtype)
    if platform == "cpu":
        return {of: bits for bits, of in _BITS.items()}.get(dtype, dtype)
    return dtype


def check_storage(kv_pages: KvPages) -> None:
    """Refuse pools of a type that no implementation reads.

    Raises:
        NotImplementedError: It is one of those.
    """
    is_scaled = isinstance(kv_pages, ScaledPages)
    if not is_scaled and kv_pages.dtype not in (*_FLOATS, *_BITS):
        raise NotImplementedError(
            f"pages of {jnp.dtype(kv_pages.dtype)}: keys and values are kept as "
            "bfloat16, float16, float32 or float8_e4m3fn, as bits of bfloat16 in "
            "uint16 or of float8_e4m3fn in uint8, or as `ScaledPages` of int8"
        )


def to_storage(rows: Num[Array, "... head_dim"], pool: Any) -> Any:
    """Rows as they are kept by `pool`, which has a type, or is `ScaledPages`.

    A row that holds NaN stays NaN, so that it is detected.
    """
    if isinstance(pool, ScaledPages):
        rows = rows.astype(jnp.float32)
        # A product, not a quotient: XLA would make one of it or not, as it fuses.
        scales = jnp.abs(rows).max(axis=-1) * jnp.float32(1 / MAX_INT8)
        inverse = jnp.where(scales > 0, 1.0 / scales, 0.0)
        values = jnp.round(rows * inverse[..., None])
        values = jnp.clip(values, -MAX_INT8, MAX_INT8).astype(jnp.int8)
        return ScaledPages(values, scales)
    dtype = jnp.dtype(pool.dtype)
    kept = _BITS.get(dtype, dtype)
    if kept == FP8:
        # Beyond the largest number, a conversion gives NaN.
        rows = jnp.clip(rows.astype(jnp.float32), -MAX_FP8, MAX_FP8)
    rows = rows.astype(kept)
    return jax.lax.bitcast_convert_type(rows, dtype) if dtype in _BITS else rows


def from_storage(rows: Any) -> Float[Array, "..."]:
    """Rows of a pool as float32."""
    if isinstance(rows, ScaledPages):
        return rows.values.astype(jnp.float32) * rows.scales[..., None]
    dtype = jnp.dtype(rows.dtype)
    if dtype in _BITS:
        rows = jax.lax.bitcast_convert_type(rows, _BITS[dtype])
    return rows.astype(jnp.float32)
