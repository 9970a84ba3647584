"""Element types of pages: floats, bits of floats, or 8-bit values.

XLA:CPU has no gather or scatter of bf16 or fp8: it converts the whole operand to a
wider type and back, every page of the pool on every call, and a bitcast of the pool is
a copy too. So on CPU a pool has type uint16 or uint8: it is read and written in place,
and only the accessed rows are bitcast.

A quantized key or value depends on its own token and head only. (With one scale per
page it would depend on the page's other tokens.) So the stored values of a token are
the same whether it was written alone, among drafts or with a prompt.

- fp8 is e4m3 without a scale, as vLLM's default is: each number has an exponent of its
  own. A scale would help only numbers beyond 448, which become 448, and numbers below
  2^-6, which are rounded to within 2^-10.
- int8 has a scale for each token and head, of its keys and of its values: the largest
  magnitude becomes 127. With 256 numbers per head, scales add 1.6 % to the bytes.

On TPU scales have a layout of their own. The attention kernel copies page by page, so
the scales of a page must be contiguous. XLA would store `[page, page_size,
two_kv_head]` with the pages in the lanes, and copy all scales in every layer for the
kernel. An array `[page, 1, lane]`, however, is stored page by page, in whole rows of
128 lanes. Only kernels read and write this array: for a scatter, XLA would copy all
scales to on-chip memory and back if they fit, and else read and write 4 KiB per number.
"""

from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Int8, Num

FP8 = jnp.dtype(jnp.float8_e4m3fn)
MAX_FP8, MAX_INT8 = 448.0, 127.0

# Integer types of pools that store raw bits, and the float types of these bits.
_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, FP8)
LANES = 128  # lanes of a TPU's registers, and numbers in a row of a tile


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledPages:
    """Pages of int8: a number is its value times the scale of its token and head.

    Attributes:
        scales: float32 [page, page_size, two_kv_head]; or in lanes, [page, 1, lane]:
            the scale of a slot is in lane `head * page_size + offset`, and the rest of
            the last 128 lanes is not used. In an array that is split over devices, the
            lanes of one device's heads follow those of another's.
        is_in_lanes: Whether scales are in lanes, as on TPU.
    """

    values: Int8[Array, "page page_size two_kv_head head_dim"]
    scales: Float[Array, "page page_size two_kv_head"] | Float[Array, "page 1 lane"]
    is_in_lanes: bool = field(default=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


KvPages = Num[Array, "page page_size two_kv_head head_dim"] | ScaledPages
# Pools of all layers of a model. A pool that several layers share has more pages.
KvPools = tuple[Num[Array, "_ page_size two_kv_head head_dim"] | ScaledPages, ...]


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Return the type of a page pool that holds `dtype` values on a platform."""
    dtype = jnp.dtype(dtype)
    if platform == "cpu":
        return {of: bits for bits, of in _BITS.items()}.get(dtype, dtype)
    return dtype


def scaled_form(values: jax.ShapeDtypeStruct, platform: str) -> ScaledPages:
    """Return shapes and shardings of int8 pages on a platform, given their values'."""
    pages, page_size, two_kv_heads, _ = values.shape
    shape, placement = values.shape[:3], values.sharding
    if isinstance(placement, NamedSharding):
        split = PartitionSpec(*placement.spec[:3])
        placement = NamedSharding(placement.mesh, split)
    if platform == "tpu":
        device_heads = two_kv_heads
        if values.sharding is not None:
            device_heads = values.sharding.shard_shape(values.shape)[2]
        lanes = two_kv_heads // device_heads * scale_lanes(page_size, device_heads)
        shape = (pages, 1, lanes)
    scales: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placement)
    forms: Any = values
    return ScaledPages(forms, scales, is_in_lanes=platform == "tpu")


def scale_lanes(page_size: int, two_kv_heads: int) -> int:
    """Return the number of lanes for a page's scales on one device, in whole rows."""
    return -(-page_size * two_kv_heads // LANES) * LANES


def check_scales(kv_pages: KvPages, *, in_lanes: bool) -> None:
    """Reject `ScaledPages` whose scales an implementation cannot read.

    Raises:
        NotImplementedError: The scales are in the other layout, or they are in lanes
            and page_size is not a power of two.
    """
    if not isinstance(kv_pages, ScaledPages):
        return
    if kv_pages.is_in_lanes != in_lanes:
        places = ["in lanes", "not in lanes"]
        wanted, found = places if in_lanes else places[::-1]
        raise NotImplementedError(
            f"the scales of these `ScaledPages` are {found}, but this implementation "
            f"needs them {wanted}: create the pages with scaled_form(values, platform)"
        )
    page_size = kv_pages.shape[1]
    if in_lanes and page_size & (page_size - 1):
        raise NotImplementedError(
            f"page_size {page_size}: for int8 pages the TPU kernels need a power of two"
        )


def check_storage(kv_pages: KvPages) -> None:
    """Raise `NotImplementedError` for pages of a type that no implementation reads."""
    is_scaled = isinstance(kv_pages, ScaledPages)
    if not is_scaled and kv_pages.dtype not in (*_FLOATS, *_BITS):
        raise NotImplementedError(
            f"KV pages of type {jnp.dtype(kv_pages.dtype)} are not supported: use "
            "bfloat16, float16, float32, float8_e4m3fn, the raw bits of bfloat16 (as "
            "uint16) or of float8_e4m3fn (as uint8), or int8 `ScaledPages`"
        )


def to_storage(rows: Num[Array, "... head_dim"], pool: Any) -> Any:
    """Convert rows to the type of `pool`.

    A row that holds NaN remains NaN, so that it is detected. For `ScaledPages` the
    result has one scale per row, whatever the layout of the pool's scales.
    """
    if isinstance(pool, ScaledPages):
        rows = rows.astype(jnp.float32)
        # Multiply by the reciprocal: XLA may turn a division into that when it fuses,
        # which would change bits.
        scales = jnp.abs(rows).max(axis=-1) * jnp.float32(1 / MAX_INT8)
        # XLA:CPU's maximum over many rows ignores NaN.
        scales = jnp.where(jnp.isnan(rows).any(axis=-1), jnp.nan, scales)
        inverse = jnp.where(scales > 0, 1.0 / scales, 0.0)
        values = jnp.round(rows * inverse[..., None])
        values = jnp.clip(values, -MAX_INT8, MAX_INT8).astype(jnp.int8)
        return ScaledPages(values, scales)
    dtype = jnp.dtype(pool.dtype)
    float_type = _BITS.get(dtype, dtype)
    if float_type == FP8:
        # Clip first: the conversion would turn numbers beyond the largest one into NaN.
        rows = jnp.clip(rows.astype(jnp.float32), -MAX_FP8, MAX_FP8)
    rows = rows.astype(float_type)
    return jax.lax.bitcast_convert_type(rows, dtype) if dtype in _BITS else rows


def from_storage(rows: Any) -> Float[Array, "..."]:
    """Convert rows of a pool to float32."""
    if isinstance(rows, ScaledPages):
        assert not rows.is_in_lanes  # only a pool's scales are: see `read_scales`
        return rows.values.astype(jnp.float32) * rows.scales[..., None]
    dtype = jnp.dtype(rows.dtype)
    if dtype in _BITS:
        rows = jax.lax.bitcast_convert_type(rows, _BITS[dtype])
    return rows.astype(jnp.float32)


def read_scales(
    kv_pages: ScaledPages, page: Int[Array, " page"]
) -> Float[Array, "page page_size two_kv_head"]:
    """Return the scales of these pages of a pool whose scales are in lanes."""
    lanes = kv_pages.scales.at[page, 0].get(mode="clip")
    return from_lanes(lanes, kv_pages.shape)


def from_lanes(
    lanes: Float[Array, "page lane"], shape: tuple[int, ...]
) -> Float[Array, "page page_size two_kv_head"]:
    """Reorder scales of whole pages from lanes to [page, page_size, two_kv_head].

    Args:
        shape: Shape of the pool.
    """
    _, page_size, two_kv_heads, _ = shape
    used = lanes[:, : page_size * two_kv_heads]
    return used.reshape(-1, two_kv_heads, page_size).swapaxes(1, 2)


def lanes_of(
    offset: Int[Array, " token"], page_size: int, two_kv_heads: int
) -> Int[Array, "token two_kv_head"]:
    """Return, for each token, the lanes of its page that hold its scales."""
    head = jnp.arange(two_kv_heads, dtype=jnp.int32)[None]
    return head * page_size + offset[:, None]
