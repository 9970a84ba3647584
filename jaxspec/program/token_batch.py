"""Build flat token batches for a model from rows of the state."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.models.batch import Region, TokenBatch
from jaxspec.program import history
from jaxspec.program.plan import PoolShape
from jaxspec.program.tree.tree import Tree


def make_token_batch(
    tokens: Int[Array, "seq query"],
    kv_len: Int[Array, " seq"],
    page_table: Int[Array, "seq table"],
    is_written: Bool[Array, "seq query"],
    pool: PoolShape,
    *,
    tree: Tree | None = None,
    local_page_table: Int[Array, "seq table"] | None = None,
    is_used: Bool[Array, "seq query"] | None = None,
) -> TokenBatch:
    """Make a batch of one region; the queries' slots are right-aligned at `kv_len`.

    Args:
        is_written: Tokens whose keys and values are stored; a sequence with none
            attends to nothing. A position without a reserved page (its table entry is
            the pad page) is not written either.
        tree: Tree whose rows are the queries; None if each query continues the one
            before it.
        local_page_table: The table of layers with a sliding window; None if they use
            the other one.
        is_used: Tokens whose results are read; None for those that are written.
    """
    count = tokens.shape[1]
    tree = Tree.chain(count - 1) if tree is None else tree
    assert tree.num_rows == count, (tree, count)
    start = kv_len[:, None] - count
    positions = start + jnp.array([tree.depths], jnp.int32)
    place = start + jnp.arange(count, dtype=jnp.int32)[None]

    def slots(page_table: Array) -> Array:
        return history.slots(
            page_table,
            place,
            is_written & (place < pool.max_model_len),
            num_pages=pool.num_pages,
            page_size=pool.page_size,
        ).reshape(-1)

    # Inactive rows get kv_len 0; their pages may already be freed.
    seen = jnp.where(is_written.any(axis=1), kv_len, 0)
    mask = None
    if not tree.is_chain:
        mask = jnp.broadcast_to(tree.ancestor_mask, (tokens.shape[0], count, count))
    region = Region(
        page_table=page_table,
        kv_len=seen,
        num_queries=count,
        ancestor_mask=mask,
        local_page_table=local_page_table,
    )
    return TokenBatch(
        tokens=tokens.reshape(-1),
        positions=positions.reshape(-1),
        slot_mapping=slots(page_table),
        regions=(region,),
        local_slot_mapping=None
        if local_page_table is None
        else slots(local_page_table),
        unit_pages=None if local_page_table is None else pool.unit_pages,
        is_used=(is_written if is_used is None else is_used).reshape(-1),
    )


def join_batches(batches: list[TokenBatch]) -> TokenBatch:
    """Concatenate batches, in order."""
    if len(batches) == 1:
        return batches[0]
    local = [slots for one in batches if (slots := one.local_slot_mapping) is not None]
    assert len(local) in (0, len(batches)), "some batches have no local pages"
    return TokenBatch(
        tokens=jnp.concatenate([batch.tokens for batch in batches]),
        positions=jnp.concatenate([batch.positions for batch in batches]),
        slot_mapping=jnp.concatenate([batch.slot_mapping for batch in batches]),
        regions=tuple(region for batch in batches for region in batch.regions),
        local_slot_mapping=jnp.concatenate(local) if local else None,
        unit_pages=batches[0].unit_pages,
        is_used=_join_used(batches),
    )


def _join_used(batches: list[TokenBatch]) -> Bool[Array, " token"] | None:
    """Concatenate the masks of used tokens; None if all tokens are used."""
    masks = [mask for one in batches if (mask := one.is_used) is not None]
    assert len(masks) in (0, len(batches)), "some batches have no mask of used tokens"
    return jnp.concatenate(masks) if masks else None
