"""The two halves of a decoder's layer: attention, and the gated feed-forward network.

Each takes the residual stream and gives the next one, with matrices in panels
(`jaxspec_kernels.panel_matmul`): for CPUs, where a layer of a small model is a hundred
operations that take longer to start than to run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec_kernels import dispatch
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.panel_matmul import Panels

__all__ = ["GELU", "SILU", "Norm", "Queries", "attention_block", "feed_forward_block"]

# What gates are activated by: GELU by its tanh form, Hendrycks & Gimpel 2016,
# arXiv:1606.08415; SiLU is x * sigmoid(x).
GELU, SILU = "gelu", "silu"
_MODULES = {"reference": "reference", "cpu": "cpu"}


class Norm(NamedTuple):
    """Rows over their root mean square, times `offset + weight`.

    References: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    weight: Num[Array, " model"]  # float32 or bfloat16
    epsilon: float
    offset: float = 0.0


class Queries(NamedTuple):
    """Consecutive rows of `num_queries` per sequence, as of `paged_attention`."""

    page_table: Int[Array, "seq table"]
    kv_len: Int[Array, " seq"]
    num_queries: int
    ancestor_mask: Bool[Array, "seq query query"] | None = None


def attention_block(
    stream: Float[Array, "row model"],
    kv_pages: KvPages,
    *,
    before: Norm,
    after: Norm | None,
    q_proj: Panels,
    kv_proj: Panels,
    o_proj: Panels,
    cosine: Float[Array, "row half"],
    sine: Float[Array, "row half"],
    slot_mapping: Int[Array, " row"],
    regions: Sequence[Queries],
    num_q_heads: int,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    is_rounded: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "row model"], KvPages]:
    """Return `stream + after(attention(before(stream)))` and the pages.

    Projects to queries, keys and values, turns them by their positions, writes keys and
    values to their slots, attends, and projects back. In place when the caller donates
    `kv_pages`. A row's bits do not depend on the rows beside it, on a CPU.

    Args:
        after: None is none.
        q_proj: Panels of the matrix (q_head * head_dim, model).
        kv_proj: Of (kv_head * 2 * head_dim, model): a head's keys, then its values.
        o_proj: Of (model, q_head * head_dim).
        cosine, sine: Of the angles of every row's position: element i of a head is
            paired with i + head_dim / 2 (Su et al. 2021, arXiv:2104.09864).
        slot_mapping: As of `write_kv_pages`.
        regions: The rows, from the first on; those in none attend to nothing.
        scale, soft_cap, window: As of `paged_attention`.
        is_rounded: Rows are rounded to bfloat16 before each product with bfloat16
            panels, and queries before they meet keys.
        implementation: A name to force; None is that of jax's default backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    heads, head_dim = kv_pages.shape[2] // 2, kv_pages.shape[3]
    rows, count = (
        stream.shape[0],
        sum(one.kv_len.shape[0] * one.num_queries for one in regions),
    )
    if num_q_heads % heads or head_dim % 2 or count > rows:
        raise ValueError(
            f"{num_q_heads} query heads for {heads} KV heads of {head_dim}, and "
            f"regions of {count} rows of {rows}: heads of an even size that divide, "
            "and no more rows than there are, are needed"
        )
    run = dispatch.choose("decoder_blocks", _MODULES, implementation, "attention_block")
    return run(
        stream,
        kv_pages,
        before=before,
        after=after,
        q_proj=q_proj,
        kv_proj=kv_proj,
        o_proj=o_proj,
        cosine=cosine,
        sine=sine,
        slot_mapping=slot_mapping,
        regions=regions,
        num_q_heads=num_q_heads,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        is_rounded=is_rounded,
    )


def feed_forward_block(
    stream: Float[Array, "row model"],
    *,
    before: Norm,
    after: Norm | None,
    gate_up_proj: Panels,
    down_proj: Panels,
    hidden_size: int,
    block: int,
    activation: str,
    is_rounded: bool = False,
    implementation: str | None = None,
) -> Float[Array, "row model"]:
    """Return `stream + after(down(activation(gate(x)) * up(x)))`, x = before(stream).

    Args:
        gate_up_proj: Panels of (2 * hidden_size, model): `block` rows of the gate, then
            as many of up, in turn.
        down_proj: Of (model, hidden_size).
        activation: `GELU` or `SILU`.
        after, is_rounded, implementation: As of `attention_block`.

    Raises:
        ValueError: The shapes do not fit each other, or another activation.
        NotImplementedError: There is no such implementation.
    """
    if hidden_size % block or activation not in (GELU, SILU):
        raise ValueError(
            f"blocks of {block} of {hidden_size}, activated by {activation!r}: a "
            f"divisor and one of {GELU!r}, {SILU!r} are needed"
        )
    run = dispatch.choose(
        "decoder_blocks", _MODULES, implementation, "feed_forward_block"
    )
    return run(
        stream,
        before=before,
        after=after,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        hidden_size=hidden_size,
        block=block,
        activation=activation,
        is_rounded=is_rounded,
    )
