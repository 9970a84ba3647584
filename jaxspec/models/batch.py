"""The input of a forward pass: one flat batch of tokens, divided into regions.

Projections take all rows at once, so that weights are read once; attention is called
per region, because each has its own number of queries per sequence.
"""

from dataclasses import dataclass, field
from typing import no_type_check

import jax
from jaxtyping import Array, Bool, Int


@no_type_check  # jax rebuilds pytrees with leaves that are no arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Region:
    """`seq * num_queries` consecutive rows, sequence-major, right-aligned at `kv_len`.

    Row t of sequence s has slot `kv_len[s] - num_queries + t` of its sequence; a
    negative slot is a pad. `ancestor_mask[s, i, j]`: row i of a sequence attends to its
    row j; None is causal.
    """

    page_table: Int[Array, "seq table"]
    kv_len: Int[Array, " seq"]
    num_queries: int = field(metadata=dict(static=True))
    ancestor_mask: Bool[Array, "seq query query"] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the flat batch that belong to this region."""
        return self.kv_len.shape[0] * self.num_queries


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Tokens of all regions, one after the other."""

    tokens: Int[Array, " token"]
    positions: Int[Array, " token"]
    slot_mapping: Int[Array, " token"]  # pads hold the number of slots
    regions: tuple[Region, ...]
