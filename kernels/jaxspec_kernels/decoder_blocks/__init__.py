"""The two halves of a decoder's layer: attention, and the gated feed-forward network.

Each maps the residual stream to the next one, with matrices in panels
(`jaxspec_kernels.panel_matmul`). They are for CPUs, where a small model's layer would
otherwise be a hundred operations, each of which takes longer to start than to run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec_kernels import dispatch
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.panel_matmul import Panels

__all__ = [
    "GELU",
    "SILU",
    "Attention",
    "FeedForward",
    "Norm",
    "Queries",
    "attention_block",
    "feed_forward_block",
]

# Activations of the gate: GELU in its tanh approximation, Hendrycks & Gimpel 2016,
# arXiv:1606.08415; SiLU is x * sigmoid(x).
GELU, SILU = "gelu", "silu"
_MODULES = {"reference": "reference", "cpu": "cpu"}


class Norm(NamedTuple):
    """RMS norm: rows divided by their root mean square, times `offset + weight`.

    References: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    weight: Num[Array, " feature"]  # float32 or bfloat16
    epsilon: float
    offset: float = 0.0


class Queries(NamedTuple):
    """Consecutive rows, `num_queries` per sequence, as in `paged_attention`."""

    page_table: Int[Array, "seq table"]
    kv_len: Int[Array, " seq"]
    num_queries: int
    ancestor_mask: Bool[Array, "seq query query"] | None = None


class Attention(NamedTuple):
    """Weights, positions and settings of `attention_block`.

    All norms share one epsilon and one offset.

    Attributes:
        before: Applied to the stream.
        after: Applied to the output before it is added to the stream; or None.
        q_norm, k_norm: Applied in float32 to each head of the queries and of the keys,
            before the rotation. One weight of head_dim for all heads; or None.
        q_proj: Panels of the matrix (q_head * head_dim, model).
        kv_proj: Panels of (kv_head * 2 * head_dim, model): a head's keys, then values.
        o_proj: Panels of (model, q_head * head_dim).
        cosine, sine: Cosine and sine of each row's rotary angles: element i of a head
            is paired with i + head_dim / 2 (Su et al. 2021, arXiv:2104.09864).
        slot_mapping: As in `write_kv_pages`.
        regions: Cover the rows from the first on; remaining rows attend to nothing.
        scale, soft_cap, window: As in `paged_attention`.
        is_rounded: Round rows to bfloat16 before each product with bfloat16 panels, and
            queries before the product with keys.
        is_used: Rows whose results are read; None for all. The others keep their
            stream, write no keys and values, and cost nothing on CPU.
    """

    before: Norm
    after: Norm | None
    q_proj: Panels
    kv_proj: Panels
    o_proj: Panels
    cosine: Float[Array, "row half"]
    sine: Float[Array, "row half"]
    slot_mapping: Int[Array, " row"]
    regions: Sequence[Queries]
    num_q_heads: int
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    soft_cap: float | None = None
    window: int | None = None
    is_rounded: bool = False
    is_used: Bool[Array, " row"] | None = None


class FeedForward(NamedTuple):
    """Weights and settings of `feed_forward_block`.

    Attributes:
        before, after, is_rounded, is_used: As in `Attention`.
        gate_up_proj: Panels of (2 * hidden_size, model), in which `block` rows of the
            gate alternate with `block` rows of up.
        down_proj: Panels of (model, hidden_size).
        activation: `GELU` or `SILU`.
    """

    before: Norm
    after: Norm | None
    gate_up_proj: Panels
    down_proj: Panels
    hidden_size: int
    block: int
    activation: str
    is_rounded: bool = False
    is_used: Bool[Array, " row"] | None = None


def attention_block(
    stream: Float[Array, "row model"],
    kv_pages: KvPages,
    attention: Attention,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "row model"], KvPages]:
    """Return `stream + after(attention(before(stream)))` and the pages.

    Projects to queries, keys and values, normalises and rotates queries and keys,
    writes keys and values to their slots, attends, and projects back. In place if the
    caller donates `kv_pages`. On CPU, a row's bits do not depend on other rows.

    Args:
        implementation: Name of one implementation; None selects that of jax's default
            backend.

    Raises:
        ValueError: The shapes do not fit each other.
        NotImplementedError: There is no such implementation.
    """
    heads, head_dim = kv_pages.shape[2] // 2, kv_pages.shape[3]
    rows, num_q_heads = stream.shape[0], attention.num_q_heads
    count = sum(one.kv_len.shape[0] * one.num_queries for one in attention.regions)
    if num_q_heads % heads or head_dim % 2 or count > rows:
        raise ValueError(
            f"the number of query heads ({num_q_heads}) must be a multiple of that of "
            f"KV heads ({heads}), head_dim ({head_dim}) must be even, and the regions "
            f"({count} rows) may not have more rows than the stream ({rows})"
        )
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None and norm.weight.shape != (head_dim,):
            raise ValueError(
                f"a norm of queries or keys has weights of shape {norm.weight.shape}, "
                f"but must have one for each of the {head_dim} elements of a head"
            )
    run = dispatch.choose("decoder_blocks", _MODULES, implementation, "attention_block")
    return run(stream, kv_pages, attention)


def feed_forward_block(
    stream: Float[Array, "row model"],
    network: FeedForward,
    *,
    implementation: str | None = None,
) -> Float[Array, "row model"]:
    """Return `stream + after(down(activation(gate(x)) * up(x)))`, x = before(stream).

    Args:
        implementation: As in `attention_block`.

    Raises:
        ValueError: The shapes do not fit each other, or the activation is unknown.
        NotImplementedError: There is no such implementation.
    """
    hidden_size, block = network.hidden_size, network.block
    activation = network.activation
    if hidden_size % block or activation not in (GELU, SILU):
        raise ValueError(
            f"block must divide hidden_size={hidden_size}, got {block}; activation "
            f"must be {GELU!r} or {SILU!r}, got {activation!r}"
        )
    run = dispatch.choose(
        "decoder_blocks", _MODULES, implementation, "feed_forward_block"
    )
    return run(stream, network)
