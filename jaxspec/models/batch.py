"""The input of a forward pass: one flat batch of tokens, divided into regions.

Projections take all rows at once, so that weights are read once; attention is called
per region, because each has its own number of queries per sequence.
"""

from dataclasses import dataclass, field, replace
from typing import no_type_check

import jax
from jaxtyping import Array, Bool, Int

from jaxspec.config.model import KvLayer


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
    # The table of layers with a sliding window; None if they use the other one.
    local_page_table: Int[Array, "seq table"] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the flat batch that belong to this region."""
        return self.kv_len.shape[0] * self.num_queries


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Tokens of all regions, one after the other.

    Attributes:
        local_slot_mapping: Slots of the first layer of a unit that has a sliding
            window; None if all layers use one page table.
        unit_pages: As for `PoolShape`.
        is_used: Tokens whose results are read; None for all.
    """

    tokens: Int[Array, " token"]
    positions: Int[Array, " token"]
    slot_mapping: Int[Array, " token"]  # pads hold the number of slots
    regions: tuple[Region, ...]
    local_slot_mapping: Int[Array, " token"] | None = None
    unit_pages: int | None = field(default=None, metadata=dict(static=True))
    is_used: Bool[Array, " token"] | None = None

    def of_layer(self, layer: KvLayer, page_size: int) -> "TokenBatch":
        """Return the batch with the page table and the slots of one layer."""
        if not layer.is_local:
            return self
        assert self.local_slot_mapping is not None
        regions = []
        for region in self.regions:
            assert region.local_page_table is not None
            table = region.local_page_table
            if layer.divisor > 1:
                table //= layer.divisor
            if layer.offset:
                table += layer.offset
            regions.append(replace(region, page_table=table))
        slots = layer_slots(self.local_slot_mapping, layer, page_size)
        return replace(self, slot_mapping=slots, regions=tuple(regions))


def layer_slots(
    slots: Int[Array, " slot"], layer: KvLayer, page_size: int
) -> Int[Array, " slot"]:
    """Return a layer's slots in its array, given those that its page table names.

    Pads remain at or past the number of slots.
    """
    if layer.divisor > 1:
        unit = layer.divisor * page_size
        return slots // unit * page_size + slots % page_size
    return slots + layer.offset * page_size if layer.offset else slots
