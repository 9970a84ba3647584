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

On a TPU scales have a form of their own. The attention kernel copies page by page, so
the scales of a page must be contiguous there. Of `[page, page_size, two_kv_head]` XLA
would keep the pages in the lanes, and copy all scales in every layer for the kernel.
Of `[page, 1, lane]` it keeps pages one after the other, in whole rows of 128 lanes.
Kernels alone read and write them: a scatter of XLA would bring them all to on-chip
memory and back where they fit, and for each number read and write 4 KiB where not.
"""

from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Int8, Num

FP8 = jnp.dtype(jnp.float8_e4m3fn)
MAX_FP8, MAX_INT8 = 448.0, 127.0

# Types of pools that hold bits, and what these are the bits of.
_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, FP8)
LANES = 128  # of a TPU's registers, and numbers in a row of a tile


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledPages:
    """Pages of int8: a number is its value times the scale of its token and head.

    Attributes:
        scales: float32 [page, page_size, two_kv_head]; in lanes [page, 1, lane]: that
            of a slot in lane `head * page_size + offset`, and what is left of the last
            128 lanes is not used. An array that is split over devices has the lanes of
            each device's own heads one after the other.
        is_in_lanes: Which of both; of a TPU the second.
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
# Pages of all layers of a model. A pool that several layers share has more pages.
KvPools = tuple[Num[Array, "_ page_size two_kv_head head_dim"] | ScaledPages, ...]


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Type of a page pool that holds `dtype` values on a platform."""
    dtype = jnp.dtype(dtype)
    if platform == "cpu":
        return {of: bits for bits, of in _BITS.items()}.get(dtype, dtype)
    return dtype


def scaled_form(values: jax.ShapeDtypeStruct, platform: str) -> ScaledPages:
    """Shapes and placement of pages of int8 on a platform, by those of their values."""
    pages, page_size, two_kv_heads, _ = values.shape
    shape, placement = values.shape[:3], values.sharding
    if isinstance(placement, NamedSharding):
        split = PartitionSpec(*placement.spec[:3])
        placement = NamedSharding(placement.mesh, split)
    if platform == "tpu":
        own = two_kv_heads
        if values.sharding is not None:
            own = values.sharding.shard_shape(values.shape)[2]
        lanes = two_kv_heads // own * scale_lanes(page_size, own)
        shape = (pages, 1, lanes)
    scales: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placement)
    forms: Any = values
    return ScaledPages(forms, scales, is_in_lanes=platform == "tpu")


def scale_lanes(page_size: int, two_kv_heads: int) -> int:
    """Lanes of a page's scales on one device: whole rows."""
    return -(-page_size * two_kv_heads // LANES) * LANES


def check_scales(kv_pages: KvPages, *, in_lanes: bool) -> None:
    """Refuse `ScaledPages` of the form that an implementation does not read.

    Raises:
        NotImplementedError: The scales are in lanes, or they are not; or they are, and
            pages have a size that kernels find no token's lanes of.
    """
    if not isinstance(kv_pages, ScaledPages):
        return
    if kv_pages.is_in_lanes != in_lanes:
        found, wanted = ("not in lanes", "them") if in_lanes else ("in lanes", "none")
        raise NotImplementedError(
            f"`ScaledPages` with scales that are {found}, and this implementation "
            f"reads {wanted}: make pages with scaled_form(values, platform)"
        )
    page_size = kv_pages.shape[1]
    if in_lanes and page_size & (page_size - 1):
        raise NotImplementedError(
            f"page_size {page_size}: a TPU's kernels take pages of int8 whose "
            "size is a power of two"
        )


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

    A row that holds NaN stays NaN, so that it is detected. Of `ScaledPages` rows have
    their scales beside them, whatever form the pool's are in.
    """
    if isinstance(pool, ScaledPages):
        rows = rows.astype(jnp.float32)
        # A product, not a quotient: XLA would make one of it or not, as it fuses.
        scales = jnp.abs(rows).max(axis=-1) * jnp.float32(1 / MAX_INT8)
        # The maximum of many rows is a number in XLA:CPU, whatever they hold.
        scales = jnp.where(jnp.isnan(rows).any(axis=-1), jnp.nan, scales)
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
        assert not rows.is_in_lanes  # a pool's: see `read_scales`
        return rows.values.astype(jnp.float32) * rows.scales[..., None]
    dtype = jnp.dtype(rows.dtype)
    if dtype in _BITS:
        rows = jax.lax.bitcast_convert_type(rows, _BITS[dtype])
    return rows.astype(jnp.float32)


def read_scales(
    kv_pages: ScaledPages, page: Int[Array, " page"]
) -> Float[Array, "page page_size two_kv_head"]:
    """The scales of these pages of a pool whose scales are in lanes."""
    lanes = kv_pages.scales.at[page, 0].get(mode="clip")
    return from_lanes(lanes, kv_pages.shape)


def from_lanes(
    lanes: Float[Array, "page lane"], shape: tuple[int, ...]
) -> Float[Array, "page page_size two_kv_head"]:
    """Scales of whole pages, by slot and head.

    Args:
        shape: Of the pool.
    """
    _, page_size, two_kv_heads, _ = shape
    used = lanes[:, : page_size * two_kv_heads]
    return used.reshape(-1, two_kv_heads, page_size).swapaxes(1, 2)


def lanes_of(
    offset: Int[Array, " token"], page_size: int, two_kv_heads: int
) -> Int[Array, "token two_kv_head"]:
    """Where the scales of tokens lie in the lanes of their pages."""
    head = jnp.arange(two_kv_heads, dtype=jnp.int32)[None]
    return head * page_size + offset[:, None]
