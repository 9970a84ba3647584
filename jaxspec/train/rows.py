"""Whole rows of text through a network: differentiable, and split by XLA on any mesh.

The engine's kernels walk pages and cannot be differentiated. Here a row is a sequence
that begins at its first token, and attention is plain operations over all of it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxspec.models.backend import Backend
from jaxspec.models.batch import Region, TokenBatch
from jaxspec_kernels.bits import KvPages, ScaledPages

# Number of queries whose attention scores are computed at a time. The scores of all
# queries would be the largest array in memory.
BLOCK = 128
_MASKED = -1e30


@dataclass(frozen=True, kw_only=True)
class RowsBackend(Backend):
    """Attention over rows; the network's pages are the rows' keys and values.

    Keys and values are [pass * row, token, ...]: each pass over the same rows has its
    own part (see `no_keys`). In pass 0, token t of a row attends to tokens up to t. In
    pass n, t stands for position t + n, the end of a chain of n drafts after token t:
    it attends to the keys of pass 0 up to t, and to the key at t of each pass from 1 to
    n (training-time test: Li et al. 2025, arXiv:2503.01840).

    Attributes:
        number: Number of the pass, from 0.
        num_seen: Number of the last pass whose key at t it attends to; None is its own.
    """

    number: int = 0
    num_seen: int | None = None

    @property
    def has_blocks(self) -> bool:
        """False: fused half-layer operations write to pages and have no gradients."""
        return False

    def write(
        self,
        kv_pages: KvPages,
        key: Float[Array, "row_token kv_head head_dim"],
        value: Float[Array, "row_token kv_head head_dim"],
        slot_mapping: Int[Array, " row_token"],
        num_q_heads: int,
    ) -> KvPages:
        """Store a pass's keys (even) and values (odd)."""
        del slot_mapping, num_q_heads
        assert not isinstance(kv_pages, ScaledPages)  # rows are not quantized
        both = jnp.stack([key, value], axis=2).astype(kv_pages.dtype)
        both = both.reshape(-1, *kv_pages.shape[1:])
        start = self.number * both.shape[0]
        return kv_pages.at[start : start + both.shape[0]].set(both)

    def attend(
        self,
        query: Float[Array, "row token q_head head_dim"],
        kv_pages: KvPages,
        region: Region,
        *,
        scale: float,
        soft_cap: float | None,
        window: int | None,
    ) -> Float[Array, "row token q_head head_dim"]:
        """Attend to the rows' keys, as described at the class."""
        del region
        assert not isinstance(kv_pages, ScaledPages)
        rows, length, q_heads, head_dim = query.shape
        kv_heads = kv_pages.shape[2] // 2
        kept = kv_pages.astype(jnp.float32)
        kept = kept.reshape(-1, rows, length, kv_heads, 2, head_dim)
        seen = kept[: (self.number if self.num_seen is None else self.num_seen) + 1]
        first, *later = [(one[..., 0, :], one[..., 1, :]) for one in seen]
        grouped = query.astype(jnp.float32) * scale
        grouped = grouped.reshape(rows, length, kv_heads, -1, head_dim)
        # Token t of pass n is at position t + n.
        window = length + self.number if window is None else window

        def cap(scores: Array) -> Array:
            return (
                scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap
            )

        @jax.checkpoint  # the gradient recomputes the scores of a block
        def attend_block(here: Array, first: tuple, later: list, seen: Array) -> Array:
            # r row  t query  s key  k kv head  g group  d head_dim
            scores = cap(jnp.einsum("rtkgd,rskd->rkgts", here, first[0]))
            scores = [jnp.where(seen[None, None, None], scores, _MASKED)]
            for key, _ in later:
                scores.append(cap(jnp.einsum("rtkgd,rtkd->rkgt", here, key))[..., None])
            weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
            count = first[0].shape[1]
            mixed = jnp.einsum("rkgts,rskd->rtkgd", weights[..., :count], first[1])
            for number, (_, value) in enumerate(later):
                own = weights[..., count + number].transpose(0, 3, 1, 2)[..., None]
                mixed += own * value[:, :, :, None]
            return mixed

        mixed = []
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            begin = max(0, start - window + 1)
            distance = jnp.arange(start, stop)[:, None] - jnp.arange(begin, stop)[None]
            part = attend_block(
                grouped[:, start:stop],
                (first[0][:, begin:stop], first[1][:, begin:stop]),
                [(key[:, start:stop], value[:, start:stop]) for key, value in later],
                (distance >= 0) & (distance + self.number < window),
            )
            mixed.append(part)
        whole = jnp.concatenate(mixed, axis=1)
        return whole.reshape(query.shape).astype(query.dtype)


@dataclass(frozen=True, kw_only=True)
class BlocksBackend(RowsBackend):
    """Attention of blocks: one after every token of a row (DFlash).

    Rows of queries are [place in the block * row]. Place p of the block after token t
    is at position t + 1 + p. It attends to the keys of pass 0 up to t, and to those at
    t of the other places: of all if the region has a mask, else up to its own. The
    keys of place p are those of pass p + 1.
    """

    def write(
        self,
        kv_pages: KvPages,
        key: Float[Array, "row_token kv_head head_dim"],
        value: Float[Array, "row_token kv_head head_dim"],
        slot_mapping: Int[Array, " row_token"],
        num_q_heads: int,
    ) -> KvPages:
        """Store keys and values of all places, after those of pass 0."""
        del slot_mapping, num_q_heads
        assert not isinstance(kv_pages, ScaledPages)
        both = jnp.stack([key, value], axis=2).astype(kv_pages.dtype)
        both = both.reshape(-1, *kv_pages.shape[1:])
        return kv_pages.at[-both.shape[0] :].set(both)

    def attend(
        self,
        query: Float[Array, "place_row token q_head head_dim"],
        kv_pages: KvPages,
        region: Region,
        *,
        scale: float,
        soft_cap: float | None,
        window: int | None,
    ) -> Float[Array, "place_row token q_head head_dim"]:
        """Attend to the text and to the block, as described at the class."""
        rows = kv_pages.shape[0] - query.shape[0]
        places = query.shape[0] // rows
        mixed = []
        for place, part in enumerate(jnp.split(query, places)):
            is_causal = region.ancestor_mask is None
            backend = RowsBackend(
                number=place + 1, num_seen=place + 1 if is_causal else places
            )
            mixed.append(
                backend.attend(
                    part,
                    kv_pages,
                    region,
                    scale=scale,
                    soft_cap=soft_cap,
                    window=window,
                )
            )
        return jnp.concatenate(mixed)


def rows_batch(tokens: Int[Array, "row token"], shift: int = 0) -> TokenBatch:
    """Make a network's batch of rows.

    Args:
        shift: Added to positions: the number of the pass.
    """
    rows, length = tokens.shape
    region = Region(
        page_table=jnp.zeros((rows, 1), jnp.int32),
        kv_len=jnp.full(rows, length, jnp.int32),
        num_queries=length,
    )
    return TokenBatch(
        tokens=tokens.reshape(-1),
        positions=jnp.tile(jnp.arange(length, dtype=jnp.int32) + shift, rows),
        slot_mapping=jnp.arange(rows * length, dtype=jnp.int32),
        regions=(region,),
    )


def no_keys(
    tokens: Int[Array, "row token"],
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    num_passes: int = 1,
) -> Num[Array, "pass_row token two_kv_head head_dim"]:
    """Return a layer's keys and values before the first pass over rows: zeros."""
    rows, length = tokens.shape
    return jnp.zeros((num_passes * rows, length, 2 * num_kv_heads, head_dim), dtype)


def shifted(
    rows: Num[Array, "row token *rest"], count: int
) -> Num[Array, "row token *rest"]:
    """Shift rows left: entry t becomes entry t + `count`; zeros at the end."""
    pads = [(0, 0), (0, count)] + [(0, 0)] * (rows.ndim - 2)
    return jnp.pad(rows, pads)[:, count:]
