"""Keys and values of accepted drafts are moved from row slots to their positions."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.model import ModelConfig
from jaxspec.config.token_tree import parents_of
from jaxspec.models.backend import Backend
from jaxspec.program.plan import PoolShape
from jaxspec.program.tree.compact_kv import compact_kv
from jaxspec.program.tree.tree import Tree
from tests.support.engines import MICRO
from tests.support.oracles import TINY, model_config
from tests.support.rows import make_active

POOL = PoolShape(num_rows=4, num_pages=24, page_size=4, max_model_len=24, vocab_size=8)
TREE = Tree(
    parents_of([(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (0, 1), (1, 0, 0), (1, 1)])
)
LENGTHS = (3, 4, 6, 11)


def config_of(turns: int, rest: int = 0) -> ModelConfig:
    """Return a config with two layers per turn of the scan, and `rest` others."""
    num_layers = 2 * turns + rest
    sizes = TINY | MICRO | dict(num_hidden_layers=num_layers, model_type="gemma2")
    model = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: sizes))
    config = model_config(model, scan_layers=turns > 1)
    assert turns == 1 or config.num_turns == turns
    return config


def active_of(is_active: list[bool]):
    """Return sequences with scattered pages, whose trees cross page borders."""
    order = np.random.default_rng(3).permutation(POOL.num_pages)
    table = order[: 4 * POOL.table_len].reshape(4, -1).astype(np.int32)
    active = make_active(4, num_tokens=np.array(LENGTHS), is_active=np.array(is_active))
    return dataclasses.replace(active, page_table=jnp.asarray(table))


def kept(
    config: ModelConfig, rows: list[int], is_active: list[bool]
) -> tuple[Any, Any, Any]:
    """Move keys and values; return the pages before and after, and the page table."""
    active = active_of(is_active)
    random = np.random.default_rng(0)
    shape = POOL.page_size, 2, 3
    pages = tuple(
        random.normal(size=(count * POOL.num_pages, *shape)).astype(np.float32)
        for count in config.layers_of_pools
    )
    # Jit a new function, because a cached trace would not contain a mutant.
    run = jax.jit(
        lambda pages, row, active: compact_kv(
            config, pages, TREE, row, active, POOL, Backend()
        )
    )
    after = run(tuple(map(jnp.asarray, pages)), jnp.asarray(rows, jnp.int32), active)
    return pages, tuple(map(np.asarray, after)), np.asarray(active.page_table)


def check_moves(
    turns: int = 1,
    rows: tuple[int, ...] = (8, 7, 3, 5),
    is_active: tuple[bool, ...] = (True, True, True, True),
    rest: int = 0,
) -> None:
    config = config_of(turns, rest)
    assert sum(config.layers_of_pools) == 2 * turns + rest
    before, after, table = kept(config, list(rows), list(is_active))
    size = POOL.page_size
    for count, old, new in zip(config.layers_of_pools, before, after, strict=True):
        expected = old.copy()
        for turn in range(count):
            for seq, row in enumerate(rows):
                if not is_active[seq]:
                    continue
                way = TREE.paths[row][: TREE.depths[row] + 1]
                for depth, source in enumerate(way.tolist()):
                    places = [LENGTHS[seq] - 1 + one for one in (depth, source)]
                    pages = [table[seq][place // size] for place in places]
                    to, of = (
                        (turn * POOL.num_pages + page, place % size)
                        for page, place in zip(pages, places, strict=True)
                    )
                    expected[to] = old[of]
        np.testing.assert_array_equal(new, expected)


ALL, SOME = (True,) * 4, (True, False, True, False)


@pytest.mark.parametrize(
    ("turns", "rows", "is_active", "rest"),
    [
        *(
            (turns, rows, ALL, 0)
            for turns in (1, 3)
            for rows in [(8, 7, 3, 5), (0, 4, 6, 8), (1, 2, 3, 7)]
        ),
        (3, (8, 7, 3, 5), ALL, 1),
        (1, (8, 7, 6, 5), SOME, 0),
    ],
)
def test_only_accepted_paths_of_active_rows_are_moved(turns, rows, is_active, rest):
    check_moves(turns, rows, is_active, rest)


def test_a_chain_has_nothing_to_move():
    active = active_of([True] * 4)
    pages = (jnp.ones((POOL.num_pages, POOL.page_size, 2, 3)),)
    row = jnp.zeros(4, jnp.int32)
    chain = Tree.chain(3)
    kept = compact_kv(config_of(1), pages, chain, row, active, POOL, Backend())
    assert kept is pages
