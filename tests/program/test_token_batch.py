"""Tokens are written only to their own slots, and see the right rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.token_tree import MAX_NODES, parents_of
from jaxspec.models.batch import TokenBatch
from jaxspec.program.plan import PoolShape
from jaxspec.program.token_batch import join_batches, make_token_batch
from jaxspec.program.tree.tree import Tree
from tests.support.engines import make_micro
from tests.support.oracles import PagedModel, hf_logits, load_ours, model_config

POOL = PoolShape(num_rows=2, num_pages=10, page_size=4, max_model_len=14, vocab_size=16)
PADS = POOL.num_pages * POOL.page_size
TABLE = np.array([[7, 2, 9, 10], [0, 5, 10, 10]])  # 10 is the pad page


def region(
    kv_len: list[int], count: int, is_written: list[list[bool]] | bool = True
) -> TokenBatch:
    tokens = np.arange(2 * count).reshape(2, count)
    return make_token_batch(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(kv_len, jnp.int32),
        jnp.asarray(TABLE, jnp.int32),
        jnp.broadcast_to(jnp.asarray(is_written), (2, count)),
        POOL,
    )


def expected_slots(kv_len: list[int], count: int) -> list[int]:
    slots = []
    for sequence, length in enumerate(kv_len):
        for position in range(length - count, length):
            inside = 0 <= position < POOL.max_model_len
            page = TABLE[sequence][position // POOL.page_size] if inside else 10
            is_page = page < POOL.num_pages
            offset = position % POOL.page_size
            slots.append(page * POOL.page_size + offset if is_page else PADS)
    return slots


@pytest.mark.parametrize("count", [1, 2, 6])
def test_slots_follow_the_page_table(count):
    for length in range(0, 19):
        kv_len = [length, max(0, 11 - length)]
        batch = region(kv_len, count)
        # jax wraps a negative index, even with mode="drop". A write to any slot at or
        # past the number of slots is dropped, so all of these are equal.
        assert (np.asarray(batch.slot_mapping) >= 0).all()
        slots = np.minimum(np.asarray(batch.slot_mapping), PADS)
        assert slots.tolist() == expected_slots(kv_len, count)
        positions = np.asarray(batch.positions).reshape(2, count)
        assert positions[:, -1].tolist() == [size - 1 for size in kv_len]
        assert (np.diff(positions, axis=1) == 1).all()


def test_joined_regions_stay_in_order():
    first, second = region([6, 5], 3), region([9, 9], 1)
    both = join_batches([first, second])
    for name in ("tokens", "positions", "slot_mapping"):
        parts = [np.asarray(getattr(batch, name)) for batch in (first, second)]
        assert np.asarray(getattr(both, name)).tolist() == [*parts[0], *parts[1]]
    assert [r.num_queries for r in both.regions] == [3, 1]
    assert sum(r.num_rows for r in both.regions) == both.tokens.shape[0]
    assert join_batches([first]) is first


def test_tokens_that_are_not_written_attend_to_nothing():
    """Padding rows have the last row's page table, whose pages may be free again."""
    batch = region([6, 6], 3, is_written=[[True, False, True], [False] * 3])
    slots = np.asarray(batch.slot_mapping)
    assert (slots < PADS).tolist() == [True, False, True, False, False, False]
    (part,) = batch.regions
    assert np.asarray(part.kv_len).tolist() == [6, 0]
    assert np.asarray(batch.positions).tolist() == [3, 4, 5, 3, 4, 5]


def check_tree_region() -> None:
    """Check that positions follow depths and slots follow rows.

    A row sees its ancestors.
    """
    tree = Tree(parents_of([(0,), (0, 0), (1,), (0, 1), (1, 0)]))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    kv_len = np.array([9, 12])
    batch = make_token_batch(
        tokens,
        jnp.asarray(kv_len, jnp.int32),
        jnp.asarray(TABLE, jnp.int32),
        jnp.ones((2, 6), bool),
        POOL,
        tree=tree,
    )
    positions = kv_len[:, None] - 6 + np.array([tree.depths])
    assert np.asarray(batch.positions).reshape(2, 6).tolist() == positions.tolist()
    slots = np.minimum(np.asarray(batch.slot_mapping), PADS)
    assert slots.tolist() == expected_slots(kv_len.tolist(), 6)
    (part,) = batch.regions
    mask = np.asarray(part.ancestor_mask)
    assert (mask == tree.ancestor_mask[None]).all()


def test_tree_positions_follow_depth_and_slots_follow_rows():
    check_tree_region()


@pytest.mark.parametrize(
    "length", [1, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 8, 9, 21))]
)
def test_every_tree_node_has_the_logits_of_its_path(length: int):
    """Trees have up to eleven levels; windows of 8 and pages of 4 end at any offset."""
    reference, random = make_micro(seed=4), np.random.default_rng(length)
    parents = [*range(-1, 10)]
    parents += random.integers(-1, 11, 12).tolist()
    parents += [int(random.integers(11, node)) for node in range(23, MAX_NODES)]
    tree = Tree(tuple(parents))
    known = random.integers(3, 16, length)
    drafts = random.integers(3, 16, tree.num_nodes)
    paged = PagedModel(model_config(reference), load_ours(reference))
    if length > 1:
        paged.run(known[:-1])
    batch = make_token_batch(
        jnp.asarray(np.append(known[-1], drafts)[None], jnp.int32),
        jnp.array([length + tree.num_nodes], jnp.int32),
        jnp.asarray(paged.page_table),
        jnp.ones((1, tree.num_rows), bool),
        paged.pool,
        tree=tree,
    )
    logits, _ = paged.forward(paged.params, batch, paged.kv_pages)
    for row in range(tree.num_rows):
        way = tree.paths[row][1 : tree.depths[row] + 1] - 1
        expected = hf_logits(reference, np.concatenate([known, drafts[way]]))[-1]
        np.testing.assert_allclose(logits[row], expected, atol=2e-4, err_msg=str(way))
