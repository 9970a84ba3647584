"""Every call equals a float64 loop over the visible keys; nothing else is read.

Slots that no query sees hold NaN in every pool made here.
"""

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import config

from jaxspec_kernels import paged_attention
from jaxspec_kernels.bits import to_storage
from jaxspec_kernels.paged_attention import gpu, reference, tpu
from jaxspec_kernels.paged_attention.cases import CASES
from tests.kernels.oracle import (
    EXACT,
    IN_LANES,
    SCALED_CALLS,
    SCALED_CASES,
    SMALL,
    Call,
    build,
    build_quantized,
    error,
    excess,
    random_forest,
)

SMALL_BLOCK = 16  # tokens walked at once in the tests of SMALL: six blocks


@partial(jax.jit, static_argnames=("scale", "soft_cap", "window"))
def attend(query, kv_pages, page_table, kv_len, mask=None, **settings):
    return paged_attention(
        query, kv_pages, page_table, kv_len, ancestor_mask=mask, **settings
    )


@partial(jax.jit, static_argnames=("scale", "soft_cap", "window", "block_tokens"))
def attend_blocks(
    query,
    kv_pages,
    page_table,
    kv_len,
    mask=None,
    *,
    block_tokens=SMALL_BLOCK,
    **settings,
):
    return reference.paged_attention(
        query,
        kv_pages,
        page_table,
        kv_len,
        ancestor_mask=mask,
        block_tokens=block_tokens,
        **settings,
    )


def run(call: Call, block_tokens: int = SMALL_BLOCK) -> np.ndarray:
    return np.asarray(
        attend_blocks(
            *call.arrays, call.ancestor_mask, block_tokens=block_tokens, **call.settings
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_case_equals_float64(name):
    call = build(CASES[name])
    assert error(call, attend(*call.arrays, **call.settings)) <= EXACT


@pytest.mark.battery(name="attention_calls")
@pytest.mark.parametrize(("name", "dtype"), SCALED_CALLS)
def test_real_heads_and_queries_equal_float64(name, dtype):
    call = build(SCALED_CASES[name], dtype=dtype)
    assert excess(call, attend(*call.arrays, **call.settings)) <= EXACT


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, 2.0), (1, 2.0), (7, 2.0), (16, 2.0), (7, None)]
)
def test_ragged_batches_equal_float64(window, soft_cap):
    case = replace(SMALL, window=window, soft_cap=soft_cap)
    for seed in range(6):
        call = build(case, seed)
        assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 1), (6, 3), (6, 6)])
def test_query_heads_share_kv_heads(q_heads, kv_heads):
    case = replace(SMALL, q_heads=q_heads, kv_heads=kv_heads)
    call = build(case, seed=3)
    assert error(call, run(call)) <= EXACT


def test_pads_and_empty_sequences_are_zeros():
    call = build(SMALL, kv_len=[0, 2, 5, 90])
    result = run(call)
    assert error(call, result) <= EXACT
    assert not result[0].any() and not result[1, :3].any()
    assert result[1, 3:].any(axis=(1, 2)).all()


@pytest.mark.parametrize("window", [None, 7])
def test_batch_without_tokens_is_zeros(window):
    call = build(replace(SMALL, window=window), kv_len=[0, 0, 0, 0])
    assert not run(call).any()


@pytest.mark.parametrize("window", [None, 2, 7])
def test_trees_equal_float64(window):
    case = replace(SMALL, queries=7, window=window)
    for seed in range(6):
        # The root's own position is in the pages: at least `queries` tokens.
        rng = np.random.default_rng(seed)
        kv_len = [7, *rng.integers(7, 91, 3).tolist()]
        call = build(case, seed, kv_len=kv_len, mask=random_forest(4, 7, seed))
        assert error(call, run(call)) <= EXACT


def test_tree_of_one_node_is_the_newest_token():
    mask = np.ones((4, 1, 1), bool)
    call = build(replace(SMALL, queries=1), kv_len=[90, 16, 1, 41], mask=mask)
    assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize("window", [None, 7])
def test_chain_as_a_tree_is_the_chain(window):
    case = replace(SMALL, window=window)
    chain = np.broadcast_to(np.tri(5, dtype=bool), (4, 5, 5)).copy()
    for kv_len in ([90, 40, 3, 0], [17, 16, 15, 1]):
        call = build(case, kv_len=kv_len)
        # Two programs, which XLA fuses differently.
        assert np.abs(run(replace(call, mask=chain)) - run(call)).max() <= EXACT


@pytest.mark.parametrize(
    ("window", "block_tokens"), [(7, 1), (7, 20), (7, 64), (None, 8), (None, 512)]
)
def test_block_size_does_not_matter(window, block_tokens):
    call = build(replace(SMALL, window=window), seed=2)
    assert error(call, run(call, block_tokens)) <= EXACT


@pytest.mark.parametrize("window", [None, 16])
def test_row_does_not_depend_on_the_other_rows(window):
    """Bitwise: otherwise the text of a request would depend on its neighbours."""
    case = replace(SMALL, window=window)
    base = build(case, kv_len=[60, 60, 60, 60])
    expected = run(base)[0]
    # Shorter and longer walks, starts before and after the row's own window.
    for others in ([0, 0, 0], [1, 7, 90], [90, 90, 90], [33, 80, 5]):
        other = build(case, seed=5, kv_len=[60, *others])
        pages, table = other.kv_pages.copy(), other.page_table.copy()
        pages[table[0, :15]] = base.kv_pages[base.page_table[0, :15]]
        query = np.concatenate([base.query[:1], other.query[1:]])
        other = replace(other, kv_pages=pages, query=query)
        np.testing.assert_array_equal(run(other)[0], expected)


@pytest.mark.parametrize(
    ("window", "kv_len", "num_blocks"),
    [
        (None, [90, 3, 17, 0], 6),
        (None, [16, 1, 0, 0], 1),
        # The first query is at 85 and sees 78..85 at most: blocks 4 and 5.
        (8, [90, 90, 90, 90], 2),
        # An empty row takes part in nothing, a short one pulls the walk to its start.
        (8, [90, 0, 0, 0], 2),
        (8, [90, 40, 0, 0], 5),
        # 85 - 5 = 80 is the first slot of block 5; one more token reaches block 4.
        (6, [90, 90, 90, 90], 1),
        (7, [90, 90, 90, 90], 2),
    ],
)
def test_walk_visits_only_blocks_in_reach(monkeypatch, window, kv_len, num_blocks):
    visited = []
    read = reference.from_storage

    def counted(rows):
        jax.debug.callback(lambda: visited.append(None))
        return read(rows)

    monkeypatch.setattr(reference, "from_storage", counted)
    call = build(replace(SMALL, window=window), kv_len=kv_len)
    # A jit of its own: `attend_blocks` may have traced the uncounted form.
    attend_counted = jax.jit(
        partial(
            reference.paged_attention,
            ancestor_mask=None,
            block_tokens=SMALL_BLOCK,
            **call.settings,
        )
    )
    result = attend_counted(*call.arrays)
    jax.effects_barrier()
    assert len(visited) == num_blocks
    assert error(call, result) <= EXACT


def test_bfloat16_pages_as_such_and_as_bits():
    call = build(SMALL, seed=4, dtype="bfloat16", query_dtype="float32")
    query, pages, table, kv_len = call.arrays
    bits = to_storage(pages.astype(jnp.float32), jnp.zeros(0, jnp.uint16))
    for pool in (pages, bits):
        result = attend_blocks(query, pool, table, kv_len, **call.settings)
        assert result.dtype == jnp.float32
        assert error(call, result) <= EXACT


@pytest.mark.usefixtures("has_native")
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *itertools.product(["uint8", "float8_e4m3fn", "int8"], ["reference", "cpu"]),
        (IN_LANES, "reference"),
    ],
)
@pytest.mark.parametrize("window", [None, 7])
def test_keys_of_eight_bits_equal_float64(kind, implementation, window):
    case = replace(SMALL, window=window)
    settings: dict[str, Any] = dict(implementation=implementation)
    for seed in range(3):
        call, arrays = build_quantized(case, kind, seed)
        found = paged_attention(*arrays, **call.settings, **settings)
        assert error(call, found) <= EXACT
    mask = random_forest(4, 5, seed=3)
    call, arrays = build_quantized(case, kind, 4, kv_len=[5, 17, 60, 90], mask=mask)
    settings["ancestor_mask"] = call.ancestor_mask
    found = paged_attention(*arrays, **call.settings, **settings)
    assert error(call, found) <= EXACT


@pytest.mark.usefixtures("has_native")
@pytest.mark.parametrize("implementation", ["cpu", "gpu"])
def test_scales_in_lanes_are_of_a_tpu_alone(implementation):
    call, arrays = build_quantized(SMALL, IN_LANES)
    with pytest.raises(NotImplementedError, match="that are in lanes, and this impl"):
        paged_attention(*arrays, **call.settings, implementation=implementation)


def test_result_has_the_type_of_the_query():
    call = build(SMALL, seed=4)
    query, *rest = call.arrays
    query = query.astype(jnp.bfloat16)
    result = attend_blocks(query, *rest, **call.settings)
    wide = attend_blocks(query.astype(jnp.float32), *rest, **call.settings)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, wide.astype(jnp.bfloat16))


def test_heads_that_cannot_be_shared_are_an_error():
    call = build(replace(SMALL, q_heads=3, kv_heads=3))
    query, *rest = call.arrays
    with pytest.raises(ValueError, match="2 query heads cannot share 3 KV heads"):
        paged_attention(query[:, :, :2], *rest, scale=1.0)


def test_unknown_implementation_is_an_error():
    call = build(SMALL)
    with pytest.raises(ValueError, match="paged_attention: choose one of"):
        paged_attention(*call.arrays, scale=1.0, implementation="fast")


IMPLEMENTATIONS = {
    "reference": reference.paged_attention,
    "tpu": partial(
        tpu.paged_attention,
        interpret=pltpu.InterpretParams(uninitialized_memory="nan"),
        block_tokens=128,
    ),
    "gpu": partial(gpu.paged_attention, interpret=True),
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_positions_past_the_page_table_hold_nothing(name, window):
    """A last round reaches past what was reserved, with queries that nobody reads."""
    page_size, table = 16, jnp.arange(1, 10, dtype=jnp.int32)[None]
    query, pages = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0)),
            [(1, 5, 2, 128), (20, page_size, 2, 128)],
            strict=True,
        )
    )
    pages = pages.at[0].set(jnp.nan)  # somebody else's
    length = table.size * page_size + 3
    settings: Any = dict(scale=0.1, soft_cap=None, window=window, ancestor_mask=None)
    found = IMPLEMENTATIONS[name](query, pages, table, jnp.array([length]), **settings)[
        0, :2
    ]
    # The two queries that are inside, asked alone.
    inside = jnp.array([length - 3])
    expected = reference.paged_attention(
        query[:, :2], pages, table, inside, **settings
    )[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_keys_without_values_are_an_error():
    query, table = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 4), jnp.int32)
    pages = jnp.zeros((4, 4, 3, 8))
    with pytest.raises(ValueError, match="must hold keys and values in turn"):
        paged_attention(query, pages, table, jnp.array([3]), scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (5, 4, 8)}, "query (5, 4, 8) on pages"),
        ({"kv_pages": (4, 4, 8)}, "on pages (4, 4, 8)"),
        ({"page_table": (3, 4)}, "page_table (3, 4) and kv_len (2,)"),
        ({"page_table": (2,)}, "page_table (2,) and kv_len (2,)"),
        ({"kv_len": (1,)}, "page_table (2, 4) and kv_len (1,)"),
        ({"kv_len": (2, 1)}, "and kv_len (2, 1)"),
        ({"ancestor_mask": (1, 5, 5)}, "ancestor_mask (1, 5, 5)"),
        ({"ancestor_mask": (2, 5, 6)}, "(2, 5, 5) is needed"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(change, message, monkeypatch):
    """Where nothing checks the annotations, as with a user."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    shapes = {
        "query": (2, 5, 4, 8),
        "kv_pages": (4, 4, 4, 8),
        "page_table": (2, 4),
        "kv_len": (2,),
        "ancestor_mask": (2, 5, 5),
    } | change
    kinds = {"page_table": jnp.int32, "kv_len": jnp.int32, "ancestor_mask": bool}
    arrays: dict[str, Any] = {
        name: jnp.zeros(shape, kinds.get(name, jnp.float32))
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**arrays, scale=1.0)


@pytest.mark.parametrize("window", [0, -1])
def test_window_without_the_query_itself_is_an_error(window):
    call = build(SMALL)
    with pytest.raises(ValueError, match=f"window={window}: .* at least 1"):
        paged_attention(*call.arrays, scale=1.0, window=window)
