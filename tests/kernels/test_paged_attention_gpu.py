"""The GPU kernel, interpreted, equals float64 and reads no page out of reach.

What a chip cannot do or hold is found by `test_paged_attention_gpu_aot.py`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.paged_attention import gpu
from jaxspec_kernels.paged_attention.cases import REAL_CASES, Case
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles, choose_tiles
from tests.kernels.oracle import (
    SCALED_CALLS,
    SCALED_CASES,
    SMALL,
    UNOPTIMISED,
    Call,
    build,
    build_quantized,
    error,
    pages_in_reach,
    random_forest,
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# SMALL has ten rows a head: one tile. 90 tokens are six blocks in three shares.
TILES = Tiles(rows=16, keys=16, splits=3)

attend = jax.jit(
    partial(gpu.paged_attention, interpret=True),
    static_argnames=("scale", "soft_cap", "window", "tiles"),
    compiler_options=UNOPTIMISED,
)
slow = partial(pytest.param, marks=pytest.mark.battery(name="attention_calls"))


def run(call: Call, tiles: Tiles | None = TILES) -> np.ndarray:
    result = attend(
        *call.arrays, ancestor_mask=call.ancestor_mask, tiles=tiles, **call.settings
    )
    assert result.dtype == jnp.dtype(call.query_dtype)
    return np.asarray(result.astype(jnp.float32))


def tiles_of(case: Case, *, itemsize: int = 2) -> Tiles:
    return choose_tiles(
        (case.seqs, case.queries, case.q_heads, case.head_dim),
        (1, case.page_size, 2 * case.kv_heads, case.head_dim),
        table=-(-case.context // case.page_size),
        itemsize=itemsize,
        window=case.window,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (pytest.param if name.startswith("tiny") and dtype == "float32" else slow)(
            name, dtype
        )
        for name, dtype in SCALED_CALLS
    ],
)
def test_case_equals_float64(name, dtype):
    """With its own tiles: one share in float32, three in bfloat16."""
    case = SCALED_CASES[name]
    call = build(case, dtype=dtype)
    tiles = tiles_of(case, itemsize=call.arrays[0].dtype.itemsize)
    if dtype == "bfloat16":
        tiles = replace(tiles, splits=3)
    assert error(call, run(call, tiles)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("window", "soft_cap", "page_size"),
    [
        (None, 2.0, 4),
        (7, None, 16),
        slow(None, None, 1),
        slow(1, 2.0, 6),
        slow(7, 2.0, 4),
        slow(16, 2.0, 32),
    ],
)
def test_ragged_batches_equal_float64(window, soft_cap, page_size):
    case = replace(SMALL, window=window, soft_cap=soft_cap, page_size=page_size)
    for seed in range(6):
        call = build(case, seed)
        assert error(call, run(call)) <= 1e-5


@pytest.mark.parametrize("window", [None, 8])
def test_every_length_equals_float64(window):
    """Pages, blocks, shares and windows end at every place."""
    case = replace(SMALL, window=window)
    for first in range(0, 84, 4):
        call = build(case, first, kv_len=[*range(first, first + 4)])
        assert error(call, run(call)) <= 1e-5


@pytest.mark.parametrize(
    "tiles",
    [
        slow(Tiles(rows=16, keys=16, splits=1)),
        Tiles(rows=16, keys=128, splits=2),  # one block: the first share is empty
        Tiles(rows=16, keys=16, splits=20),
        Tiles(rows=4, keys=16, splits=3),  # two queries in a tile
        slow(Tiles(rows=1, keys=32, splits=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [40, slow(None)])
def test_tiles_do_not_matter(window, tiles):
    for seed in range(3):
        call = build(replace(SMALL, window=window), seed)
        assert error(call, run(call, tiles)) <= 1e-5


@pytest.mark.parametrize(
    ("group", "rows"),
    [
        slow(1, 16),
        (3, 4),  # a token's heads are in two tiles
        (8, 64),
        *(slow(group, 64) for group in (2, 4, 5, 6, 7)),
    ],
)
def test_query_heads_share_kv_heads(group, rows):
    case = replace(SMALL, q_heads=2 * group, kv_heads=2)
    call = build(case, seed=3)
    assert error(call, run(call, replace(TILES, rows=rows))) <= 1e-5


@pytest.mark.parametrize("splits", [1, 3])
def test_pads_and_empty_sequences_are_zeros(splits):
    tiles = replace(TILES, splits=splits)
    call = build(SMALL, kv_len=[0, 2, 5, 90])
    result = run(call, tiles)
    assert error(call, result) <= 1e-5
    assert not result[0].any() and not result[1, :3].any()
    assert result[1, 3:].any(axis=(1, 2)).all()
    empty = build(SMALL, kv_len=[0, 0, 0, 0])
    assert not run(empty, tiles).any()


@pytest.mark.parametrize("window", [None, 2, slow(7)])
def test_trees_equal_float64(window):
    case = replace(SMALL, queries=7, window=window)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        kv_len = [7, *rng.integers(7, 91, 3).tolist()]
        call = build(case, seed, kv_len=kv_len, mask=random_forest(4, 7, seed))
        assert error(call, run(call)) <= 1e-5


@pytest.mark.parametrize("window", [3, slow(None)])
def test_trees_of_more_nodes_than_a_word_has_bits(window):
    case = replace(SMALL, queries=67, window=window)
    call = build(case, kv_len=[67, 68, 80, 90], mask=random_forest(4, 67, seed=1))
    assert error(call, run(call, replace(TILES, rows=64))) <= 1e-5


@pytest.mark.parametrize("window", [7, slow(None)])
def test_chain_as_a_tree_is_the_chain(window):
    chain = np.broadcast_to(np.tri(5, dtype=bool), (4, 5, 5)).copy()
    for kv_len in ([90, 40, 3, 0], [17, 16, 15, 1]):
        call = build(replace(SMALL, window=window), kv_len=kv_len)
        assert np.abs(run(replace(call, mask=chain)) - run(call)).max() <= 1e-5


@pytest.mark.parametrize("window", [None, 16])
def test_row_does_not_depend_on_the_other_rows(window):
    """Bitwise: otherwise the text of a request would depend on its neighbours."""
    case = replace(SMALL, window=window)
    base = build(case, kv_len=[60, 60, 60, 60])
    expected = run(base)[0]
    for others in ([0, 0, 0], [1, 7, 90], [90, 90, 90], [33, 80, 5]):
        other = build(case, seed=5, kv_len=[60, *others])
        pages, table = other.kv_pages.copy(), other.page_table.copy()
        pages[table[0, :15]] = base.kv_pages[base.page_table[0, :15]]
        query = np.concatenate([base.query[:1], other.query[1:]])
        other = replace(other, kv_pages=pages, query=query)
        np.testing.assert_array_equal(run(other)[0], expected)


@pytest.mark.parametrize(
    ("window", "kv_len"),
    [
        (None, [90, 3, 17, 0]),
        (8, [90, 90, 90, 90]),  # 13 of 90 slots a sequence, not at a page's border
        slow(8, [90, 0, 5, 16]),
        slow(1, [88, 89, 90, 1]),
    ],
)
def test_pages_out_of_reach_are_not_read(monkeypatch, window, kv_len):
    loaded = set()
    load = gpu.plgpu.load

    def counted(ref, *, mask=None, **settings):
        result = load(ref, mask=mask, **settings)
        if ref.dtype == jnp.bfloat16:  # the pages; the query is float32
            page = ref.transforms[-1].indices[0]
            jax.debug.callback(count, page, mask)
        return result

    def count(page, mask):
        loaded.update(np.broadcast_to(page, mask.shape)[mask].tolist())

    monkeypatch.setattr(gpu.plgpu, "load", counted)
    case = replace(SMALL, window=window, q_heads=2, kv_heads=1)
    call = build(case, kv_len=kv_len, dtype="bfloat16", query_dtype="float32")
    # A jit of its own: `attend` may have traced the uncounted form.
    attend_counted = jax.jit(
        partial(
            gpu.paged_attention,
            ancestor_mask=None,
            tiles=TILES,
            interpret=True,
            **call.settings,
        )
    )
    result = attend_counted(*call.arrays)
    jax.effects_barrier()
    assert len(loaded) == pages_in_reach(call)
    assert error(call, result) <= 1e-5


def test_float32_queries_on_bfloat16_pages_are_exact():
    call = build(SMALL, seed=4, dtype="bfloat16", query_dtype="float32")
    assert error(call, run(call)) <= 1e-5


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("window", [None, 7])
def test_keys_of_eight_bits_equal_float64(kind, window):
    case = replace(SMALL, window=window)
    for seed in range(4):
        call, arrays = build_quantized(case, kind, seed)
        settings = call.settings | dict(tiles=TILES, ancestor_mask=None)
        assert error(call, attend(*arrays, **settings)) <= 1e-5
    # With queries of bfloat16, products are bfloat16's, which has all of their digits.
    call, arrays = build_quantized(case, kind, 5, query_dtype="bfloat16")
    settings = call.settings | dict(tiles=TILES, ancestor_mask=None)
    found = attend(*arrays, **settings)
    assert found.dtype == jnp.bfloat16
    assert error(call, found.astype(jnp.float32)) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_trees_over_keys_of_eight_bits_equal_float64(kind):
    mask = random_forest(4, 5, seed=3)
    call, arrays = build_quantized(SMALL, kind, 1, kv_len=[5, 17, 60, 90], mask=mask)
    found = attend(
        *arrays, ancestor_mask=call.ancestor_mask, tiles=TILES, **call.settings
    )
    assert error(call, found) <= 1e-5


@pytest.mark.parametrize("dtype", ["uint16", "uint8", "int8"])
def test_pages_without_floats_are_refused(dtype):
    call = build(SMALL)
    query, pages, *rest = call.arrays
    pages = jnp.zeros(pages.shape, dtype)
    with pytest.raises(NotImplementedError, match=f"`ScaledPages`, not {dtype}"):
        gpu.paged_attention(query, pages, *rest, ancestor_mask=None, **call.settings)


def test_one_long_sequence_fills_the_chip():
    case = replace(REAL_CASES["9b/tp1/verify"], seqs=1)
    assert case.kv_heads * tiles_of(case).splits >= 132
    # Not with shares too small to be worth their sum.
    assert tiles_of(replace(case, context=512)).splits == 4
    assert tiles_of(replace(case, window=251)).splits == 2


@pytest.mark.parametrize("name", REAL_CASES)
def test_splits_run_at_once(name):
    """Programs that wait for a place would take as long as all before them."""
    case = REAL_CASES[name]
    tiles = tiles_of(case)
    rows = case.queries * case.q_heads // case.kv_heads
    programs = case.seqs * case.kv_heads * -(-rows // tiles.rows)
    assert tiles.splits == 1 or programs * tiles.splits <= 3 * 132
    assert 2 * tiles.keys * case.head_dim * 2 == 32 * 1024
