"""Attention of a few queries per sequence over paged keys and values."""

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from jaxspec_kernels import dispatch, tuning
from jaxspec_kernels.bits import KvPages
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles

__all__ = ["paged_attention"]

_MODULES = {"reference": "reference", "cpu": "cpu", "tpu": "tpu", "gpu": "gpu"}


def paged_attention(
    query: Float[Array, "seq token q_head head_dim"],
    kv_pages: KvPages,
    page_table: Int[Array, "seq table"],
    kv_len: Int[Array, " seq"],
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    ancestor_mask: Bool[Array, "seq token token"] | None = None,
    implementation: str | None = None,
    device_kind: str | None = None,
) -> Float[Array, "seq token q_head head_dim"]:
    """Attend from the last `token` positions of every sequence to its pages.

    Queries are right-aligned: query t of sequence s sits at position
    `kv_len[s] - token + t`, and its own key and value are already in the pages. It sees
    the positions up to its own, or the last `window` of them. A query at a negative
    position (padding) sees nothing and returns zeros.

    Draft decoding (1-2 queries), verification (K + 1), tree verification
    (`ancestor_mask`) and prefill tiles are all this call. Slots outside the visible
    range are never used: they may hold NaN.

    Args:
        query: Any float type; scores and statistics are float32.
        kv_pages: Keys in even rows of the third axis, values in odd ones. uint16 and
            uint8 hold the bits of bfloat16 and of float8_e4m3fn; `ScaledPages` are int8
            with a scale for each token and head (see `jaxspec_kernels.bits`).
        page_table: Page ids in order of position; entries past the end of a sequence
            may hold anything.
        kv_len: Visible tokens, including the queries. Positions past the end of the
            page table hold no keys.
        scale: Multiplies the scores, before the cap.
        soft_cap: Scores become `cap * tanh(score / cap)`, before the mask.
        window: Sliding window in tokens, including the query's own.
        ancestor_mask: Which of the last `token` positions each query sees, including
            itself; None is the causal chain. Depth, and so the window, counts
            ancestors.
        implementation: Name of one implementation; None selects that of jax's default
            backend.
        device_kind: Use the tile sizes that were measured on this kind of device
            (`device.device_kind`). With None, or for a device without a table, the
            kernel chooses; on a GPU by the device's number of multiprocessors.

    Returns:
        In the type of the query.

    Raises:
        ValueError: Shapes do not fit each other, or `window` is less than 1.
        NotImplementedError: The implementation does not take pages of this type.

    References: Kwon et al. 2023, arXiv:2309.06180 (pages); Gemma Team 2024,
        arXiv:2408.00118 (soft-capping, alternating windows).
    """
    _check_heads(query.shape, kv_pages.shape)
    mask = None if ancestor_mask is None else ancestor_mask.shape
    _check_seqs(query.shape, page_table.shape, kv_len.shape, mask)
    if window is not None and window < 1:
        raise ValueError(
            f"window={window}: it includes the query's own token, so it must be at "
            "least 1; None means no window"
        )
    name = dispatch.resolve("paged_attention", implementation)
    tuned: dict[str, Any] = {}
    if device_kind is not None:
        page_size, kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
        key = tuning.attention_key(
            seqs=query.shape[0],
            queries=query.shape[1],
            q_heads=query.shape[2],
            kv_heads=kv_heads,
            head_dim=query.shape[3],
            page_size=page_size,
            context=page_table.shape[1] * page_size,
            window=window,
            dtype=str(kv_pages.dtype),
        )
        sizes = tuning.sizes("paged_attention", name, device_kind, key) or {}
        tuned = {"tiles": Tiles(**sizes)} if name == "gpu" and sizes else sizes
        if name in ("tpu", "gpu"):
            tuned = {**tuned, "device_kind": device_kind}
    run = dispatch.choose("paged_attention", _MODULES, name)
    return run(
        query,
        kv_pages,
        page_table,
        kv_len,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        ancestor_mask=ancestor_mask,
        **tuned,
    )


def _check_heads(query: tuple[int, ...], kv_pages: tuple[int, ...]) -> None:
    if len(query) != 4 or len(kv_pages) != 4:
        raise ValueError(
            f"query has shape {query} and kv_pages has shape {kv_pages}, but they must "
            "be [seq, token, q_head, head_dim] and [page, page_size, 2 * kv_head, "
            "head_dim]"
        )
    if query[3] != kv_pages[3] or kv_pages[2] % 2:
        raise ValueError(
            f"query has shape {query} and kv_pages has shape {kv_pages}, but their "
            "last axes must have equal sizes (head_dim), and the third axis of "
            "kv_pages must have an even size, with keys and values alternating"
        )
    if query[2] * 2 % kv_pages[2]:
        raise ValueError(
            f"{query[2]} query heads cannot share {kv_pages[2] // 2} KV heads: the "
            "number of query heads must be a multiple of the number of KV heads"
        )


def _check_seqs(
    query: tuple[int, ...],
    page_table: tuple[int, ...],
    kv_len: tuple[int, ...],
    ancestor_mask: tuple[int, ...] | None,
) -> None:
    seqs, tokens = query[:2]
    if len(page_table) != 2 or page_table[0] != seqs or kv_len != (seqs,):
        raise ValueError(
            f"page_table has shape {page_table} and kv_len {kv_len}, but for a query "
            f"of {seqs} sequences they must be ({seqs}, pages) and ({seqs},)"
        )
    if ancestor_mask not in (None, (seqs, tokens, tokens)):
        raise ValueError(
            f"ancestor_mask has shape {ancestor_mask}, but for a query of shape "
            f"{query} it must be {(seqs, tokens, tokens)}"
        )
