"""Keys and values of accepted drafts, moved to where those of a chain would be.

Rows of a tree have slots in their own order. What the next round reads of them are the
positions after the known tokens, one after the other.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.config.engine import ModelConfig
from jaxspec.models.backend import Backend
from jaxspec.program import history
from jaxspec.program.plan import PoolShape
from jaxspec.program.rows import Active
from jaxspec.program.state import run_if
from jaxspec.program.tree import Tree
from jaxspec_kernels.bits import KvPools

Pages = KvPools


def keep_path(
    config: ModelConfig,
    pages: Pages,
    tree: Tree,
    row: Int[Array, " seq"],
    active: Active,
    pool: PoolShape,
    backend: Backend,
) -> Pages:
    """Move keys and values of the drafts up to `row` to where their positions are.

    Nothing moves, and nothing is read, where every sequence has stayed on the spine.
    """
    if tree.is_chain:
        return pages
    level = jnp.arange(1, tree.max_emitted, dtype=jnp.int32)[None]
    path = jnp.asarray(tree.paths)[row][:, 1:]
    is_moved = (level <= jnp.asarray(tree.depths)[row][:, None]) & (path != level)
    is_moved &= active.is_active[:, None]
    newest = active.num_tokens[:, None] - 1

    def slots(place: Array) -> Array:
        return history.slots(
            active.page_table,
            newest + place,
            is_moved,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
        ).reshape(-1)

    source, target = slots(path), slots(level)
    places = {
        turns: (_in_turns(source, turns, pool), _in_turns(target, turns, pool))
        for turns in dict.fromkeys(config.layers_of_pools)
    }

    def move(pages: Pages) -> Pages:
        return tuple(
            backend.copy(one, *places[turns], config.num_q_heads)
            for one, turns in zip(pages, config.layers_of_pools, strict=True)
        )

    return run_if(is_moved.any(), move, pages)


def _in_turns(
    slots: Int[Array, " slot"], turns: int, pool: PoolShape
) -> Int[Array, " moved"]:
    """The slots of every turn's layers, whose pages lie behind one another; pads last.

    One pad more: of a single row XLA would make a slice that is updated, and copy the
    pool for it.
    """
    size = pool.num_pages * pool.page_size
    turn = jnp.arange(turns, dtype=jnp.int32)[:, None]
    found = jnp.where(slots[None] < size, slots[None] + turn * size, turns * size)
    return jnp.pad(found.reshape(-1), (0, 1), constant_values=turns * size)
