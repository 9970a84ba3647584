"""Move keys and values of accepted drafts to the slots that a chain would use.

In a tree, rows have slots in the order of the nodes. The next round reads consecutive
positions, so the accepted drafts' slots must follow those of the known tokens.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config.engine import ModelConfig
from jaxspec.config.model import KvArray, KvLayer
from jaxspec.models.backend import Backend
from jaxspec.models.batch import layer_slots
from jaxspec.program import history
from jaxspec.program.plan import PoolShape
from jaxspec.program.rows import Active
from jaxspec.program.state import run_if
from jaxspec.program.tree.tree import Tree
from jaxspec_kernels.bits import KvPools


def compact_kv(
    config: ModelConfig,
    pages: KvPools,
    tree: Tree,
    tree_row: Int[Array, " seq"],
    active: Active,
    pool: PoolShape,
    backend: Backend,
) -> KvPools:
    """Move keys and values of drafts up to `tree_row` to the slots of their positions.

    Nothing is read or written if every sequence accepted drafts of the main chain only.
    """
    if tree.is_chain:
        return pages
    level = jnp.arange(1, tree.max_emitted, dtype=jnp.int32)[None]
    path = jnp.asarray(tree.paths)[tree_row][:, 1:]
    is_moved = (level <= jnp.asarray(tree.depths)[tree_row][:, None]) & (path != level)
    is_moved &= active.is_active[:, None]
    newest = active.num_tokens[:, None] - 1

    def slots(page_table: Array, place: Array) -> Array:
        return history.slots(
            page_table,
            newest + place,
            is_moved,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
        ).reshape(-1)

    layout = config.kv_layout(pool.unit_pages)
    tables = {False: active.page_table, True: active.local_page_table}
    places = {
        is_local: (slots(table, path), slots(table, level))
        for is_local, table in tables.items()
        if table is not None
    }

    @functools.cache
    def moved(array: KvArray, layers: tuple[KvLayer, ...], end: int) -> Array:
        """Return the sources (0) or targets (1) of all layers that share an array."""
        size = array.pages_per_unit * pool.num_units * pool.page_size
        parts = [
            _layer_slots(
                layer_slots(places[layer.is_local][end], layer, pool.page_size),
                array.num_turns,
                size,
            )
            for layer in layers
        ]
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    moves = list[tuple[Array, Array]]()
    for index, array in enumerate(layout.arrays):
        layers = tuple(
            one._replace(array=0) for one in layout.layers if one.array == index
        )
        moves.append((moved(array, layers, 0), moved(array, layers, 1)))

    def move(pages: KvPools) -> KvPools:
        return tuple(
            backend.copy(one, source, target, config.num_q_heads)
            for one, (source, target) in zip(pages, moves, strict=True)
        )

    return run_if(is_moved.any(), move, pages)


def _layer_slots(
    slots: Int[Array, " slot"], turns: int, size: int
) -> Int[Array, " moved"]:
    """Slots in a pool that `turns` layers share, one layer after another; pads last.

    An extra pad is added: for a single row XLA would update a slice, and copy the pool
    for it.

    Args:
        size: Slots of one layer.
    """
    turn = jnp.arange(turns, dtype=jnp.int32)[:, None]
    layer_slots = jnp.where(slots[None] < size, slots[None] + turn * size, turns * size)
    return jnp.pad(layer_slots.reshape(-1), (0, 1), constant_values=turns * size)
