"""Every attention backend equals float64, and reads no slot that no query sees.

Such slots hold NaN in all pools here. `test_kernels_aot.py` compiles the kernels for
chips, to check that the chips support them and have enough memory.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import config

from jaxspec_kernels import paged_attention
from jaxspec_kernels.bits import to_storage
from jaxspec_kernels.paged_attention import reference, tpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from tests.kernels.attention_base import (
    BACKENDS,
    BLOCK_TOKENS,
    STRICT,
    TILES,
    compiled,
    count_reads,
    run,
    run_strictly,
    strict_case,
    tiles_of,
)
from tests.kernels.oracle import (
    EXACT,
    IN_LANES,
    SCALED_CALLS,
    SCALED_CASES,
    SMALL,
    Call,
    attend,
    build,
    build_quantized,
    error,
    error_beyond_rounding,
    pages_in_reach,
    random_forest,
)

# Heads of 16 for tests of the C++ operation: for smaller heads, a CPU uses the
# reference.
SIXTEEN = replace(SMALL, head_dim=16)
SMALL_OF = {"reference": SMALL, "cpu": SIXTEEN, "gpu": SMALL, "tpu": SMALL}
FAST_ON_TPU = ("tiny/verify", "2b/tp8/decode-two")
needs_native = pytest.mark.usefixtures("has_native")
in_suite = pytest.mark.long_suite(name="attention_calls")


def row(backend: str, *values: Any, slow: bool = False) -> Any:
    """Return a row of a table; slow rows run only in the suite of slow tests."""
    return pytest.param(backend, *values, marks=[in_suite] * slow)


slow = partial(row, slow=True)


@pytest.fixture(autouse=True)
def _skip_without_library(request: pytest.FixtureRequest):
    if getattr(request.node, "callspec", None) is not None:
        if request.node.callspec.params.get("backend") == "cpu":
            request.getfixturevalue("has_native")


def check(backend: str, call: Call, **own: Any) -> np.ndarray:
    result = run(backend, call, **own)
    assert error(call, result) <= EXACT
    return result


def public(call: Call, arrays: Any = None, **settings: Any) -> jax.Array:
    given: Any = call.settings | dict(ancestor_mask=call.ancestor_mask) | settings
    return paged_attention(*(arrays or call.arrays), **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
@pytest.mark.parametrize("name", CASES)
def test_public_call_equals_float64(name, dtype):
    """The platform's own backend computes the result."""
    call = build(CASES[name], dtype="bfloat16" if dtype == "uint16" else dtype)
    query, pages, *rest = call.arrays
    if dtype == "uint16":
        pages = jax.lax.bitcast_convert_type(pages, jnp.uint16)
    assert error_beyond_rounding(call, public(call, (query, pages, *rest))) <= EXACT


def _scaled_rows() -> Iterator[Any]:
    """Yield rows with heads and queries of real models; fast ones always run."""
    for name, dtype in SCALED_CALLS:
        yield slow("cpu", name, dtype)
        is_fast = name.startswith("tiny") and dtype == "float32"
        yield row("gpu", name, dtype, slow=not is_fast)
        yield row("tpu", name, dtype, slow=name not in FAST_ON_TPU)


@pytest.mark.parametrize(("backend", "name", "dtype"), [*_scaled_rows()])
def test_real_heads_and_queries_equal_float64(backend, name, dtype):
    call = build(SCALED_CASES[name], dtype=dtype)
    if backend == "cpu":
        assert error_beyond_rounding(call, run(backend, call)) <= EXACT
    elif backend == "tpu":
        assert error_beyond_rounding(call, run(backend, call, block_tokens=32)) <= EXACT
    else:
        tiles = tiles_of(call.case, itemsize=call.arrays[0].dtype.itemsize)
        if dtype == "bfloat16":
            tiles = replace(tiles, splits=3)
        limit = {"float32": EXACT, "bfloat16": 2e-2}[dtype]
        assert error(call, run(backend, call, tiles=tiles)) <= limit


RAGGED = [
    *(
        row(backend, window, soft_cap, 4)
        for backend in ("reference", "cpu")
        for window, soft_cap in [(None, 2.0), (1, 2.0), (7, 2.0), (16, 2.0), (7, None)]
    ),
    *(row("tpu", window, 2.0, 4) for window in (None, 7)),
    *(slow("tpu", window, cap, 4) for window, cap in [(1, 2.0), (16, 2.0), (7, None)]),
    row("gpu", None, 2.0, 4),
    row("gpu", 7, None, 16),
    *(
        slow("gpu", *one)
        for one in [(None, None, 1), (1, 2.0, 6), (7, 2.0, 4), (16, 2.0, 32)]
    ),
]


@pytest.mark.parametrize(("backend", "window", "soft_cap", "page_size"), RAGGED)
def test_ragged_batches_equal_float64(backend, window, soft_cap, page_size):
    changes = dict(window=window, soft_cap=soft_cap, page_size=page_size)
    for seed in range(6):
        check(backend, build(replace(SMALL_OF[backend], **changes), seed))


@pytest.mark.parametrize(
    ("backend", "window", "end"),
    [row("tpu", 7, 36), slow("tpu", None, 36), row("gpu", 8, 84), row("gpu", None, 84)],
)
def test_every_length_equals_float64(backend, window, end):
    """Contexts and windows end at every offset of pages, blocks and splits."""
    for first in range(0, end, 4):
        kv_len = [*range(first, first + 4)]
        check(backend, build(replace(SMALL, window=window), first, kv_len=kv_len))


@pytest.mark.parametrize(
    ("backend", "q_heads", "kv_heads", "own"),
    [
        *(row("reference", 6, kv_heads, {}) for kv_heads in (1, 3, 6)),
        *(
            (row if kv_heads == 3 and group in (1, 8) else slow)(
                "tpu", group * kv_heads, kv_heads, {}
            )
            for group in range(1, 9)
            for kv_heads in (1, 3)
        ),
        slow("gpu", 2, 2, {}),
        # One token's heads extend over two tiles.
        row("gpu", 6, 2, dict(tiles=replace(TILES, rows=4))),
        row("gpu", 16, 2, dict(tiles=replace(TILES, rows=64))),
        *(
            slow("gpu", 2 * group, 2, dict(tiles=replace(TILES, rows=64)))
            for group in (2, 4, 5, 6, 7)
        ),
    ],
)
def test_query_heads_share_kv_heads(backend, q_heads, kv_heads, own):
    case = replace(SMALL, q_heads=q_heads, kv_heads=kv_heads)
    check(backend, build(case, seed=3), **own)


@pytest.mark.parametrize(
    ("backend", "window", "own"),
    [
        *(row(backend, None, {}) for backend in BACKENDS),
        *(row(backend, 7, {}) for backend in ("reference", "cpu")),
        row("gpu", None, dict(tiles=replace(TILES, splits=1))),
    ],
)
def test_padding_and_empty_sequences_are_zeros(backend, window, own):
    """On a TPU, buffers pass from a sequence to the next one that is not empty."""
    lengths = [0, 2, 5, 90], [0, 0, 0, 0], [0, 90, 0, 0], [90, 0, 0, 41], [1, 2, 0, 5]
    for kv_len in lengths:
        case = replace(SMALL_OF[backend], window=window)
        call = build(case, kv_len=kv_len)
        result = check(backend, call, **own)
        is_used = call.seen.any(axis=2)
        assert not result[~is_used].any()
        assert result[is_used].any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    ("backend", "nodes", "window"),
    [
        *(row("reference", 7, window) for window in (None, 2, 7)),
        *(row("cpu", 7, window) for window in (None, 2, 7)),
        *(slow("tpu", 7, window) for window in (None, 2)),
        row("tpu", 7, 7),
        *(row("gpu", 7, window) for window in (None, 2)),
        slow("gpu", 7, 7),
        row("reference", 1, None),
        # More nodes than a word has bits.
        *(row(backend, 67, 3) for backend in ("tpu", "gpu")),
        *(slow(backend, 67, None) for backend in ("tpu", "gpu")),
    ],
)
def test_trees_equal_float64(backend, nodes, window):
    case = replace(SMALL_OF[backend], queries=nodes, window=window)
    own = dict(tiles=replace(TILES, rows=64)) if (backend, nodes) == ("gpu", 67) else {}
    for seed in range(6 if nodes == 7 else 1):
        # The tree's root is in the pages, so a sequence has at least `nodes` tokens, or
        # is padding.
        some = np.random.default_rng(seed).integers(nodes, 91, 2).tolist()
        mask = random_forest(4, nodes, seed)
        call = build(case, seed, kv_len=[nodes, 0, *some], mask=mask)
        check(backend, call, **own)


@needs_native
def test_other_head_sizes_use_the_reference_on_cpu():
    check("cpu", build(SMALL))  # head_dim 8


SOME_TILES = (
    Tiles(rows=16, keys=128, splits=2),  # one block: an empty first share
    Tiles(rows=16, keys=16, splits=20),
    Tiles(rows=4, keys=16, splits=3),  # two queries in a tile
)


@pytest.mark.parametrize(
    ("backend", "window", "own"),
    [
        *(row("reference", 7, dict(block_tokens=size)) for size in (1, 20, 64)),
        *(row("reference", None, dict(block_tokens=size)) for size in (8, 512)),
        row("tpu", 7, dict(block_tokens=12)),
        *(slow("tpu", 7, dict(block_tokens=size)) for size in (1, 64, None)),
        *(row("gpu", 40, dict(tiles=tiles)) for tiles in SOME_TILES),
        *(slow("gpu", None, dict(tiles=tiles)) for tiles in SOME_TILES),
        *(
            slow("gpu", window, dict(tiles=tiles))
            for window in (40, None)
            for tiles in (
                Tiles(rows=16, keys=16, splits=1),
                Tiles(rows=1, keys=32, splits=2),
            )
        ),
    ],
)
def test_block_size_does_not_matter(backend, window, own):
    for seed in range(3):
        check(backend, build(replace(SMALL, window=window), seed), **own)


@pytest.mark.parametrize(
    ("backend", "window"),
    [
        *(row(backend, 16) for backend in ("reference", "cpu", "gpu")),
        *(row(backend, None) for backend in ("reference", "cpu", "gpu")),
        row("tpu", 7),
        slow("tpu", None),
    ],
)
def test_row_does_not_depend_on_the_other_rows(backend, window):
    """Compare bits: otherwise a request's text would depend on other requests."""
    case = replace(SMALL_OF[backend], window=window)
    base = build(case, kv_len=[60, 60, 60, 60])
    expected = run(backend, base)[0]
    # Other rows are longer or shorter, and some start before or after the row's own
    # window.
    for others in ([0, 0, 0], [1, 7, 90], [90, 90, 90], [33, 80, 5]):
        other = build(case, seed=5, kv_len=[60, *others])
        pages, table = other.kv_pages.copy(), other.page_table.copy()
        pages[table[0, :15]] = base.kv_pages[base.page_table[0, :15]]
        query = np.concatenate([base.query[:1], other.query[1:]])
        other = replace(other, kv_pages=pages, query=query)
        np.testing.assert_array_equal(run(backend, other)[0], expected)


@needs_native
def test_token_does_not_depend_on_the_number_of_queries():
    """Compare bits, on a CPU, because K changes from round to round."""
    call = build(replace(SIXTEEN, queries=6), kv_len=[90, 41, 16, 6])
    query, *rest = call.arrays
    whole = run("cpu", call)
    for count in range(1, 6):
        found = run("cpu", call, arrays=(query[:, 6 - count :], *rest))
        np.testing.assert_array_equal(found, whole[:, 6 - count :])


@pytest.mark.parametrize(
    ("backend", "window", "kv_len", "num_reads"),
    [
        # Blocks of the reference, from the earliest window of all sequences to the
        # longest one's end; empty sequences do not count.
        row("reference", None, [90, 3, 17, 0], 6),
        row("reference", None, [16, 1, 0, 0], 1),
        # The first query is at 85 and sees at most 78..85, in blocks 4 and 5.
        row("reference", 8, [90, 90, 90, 90], 2),
        row("reference", 8, [90, 0, 0, 0], 2),
        row("reference", 8, [90, 40, 0, 0], 5),
        # The first query sees slots from 85 - 5 = 80 on, where block 5 starts. With one
        # more token in the window it would see block 4.
        row("reference", 6, [90, 90, 90, 90], 1),
        row("reference", 7, [90, 90, 90, 90], 2),
        # Pages of the kernels: 90 tokens fill 23 pages.
        slow("tpu", None, [90, 3, 17, 0], 23 + 1 + 5 + 0),
        # The first query is at 85 and sees 78..85: pages 19 to 22.
        slow("tpu", 8, [90, 90, 0, 90], 12),
        # Page 20 starts at slot 80.
        row("tpu", 6, [90, 0, 0, 0], 3),
        row("tpu", 7, [90, 0, 0, 0], 4),
        slow("tpu", 1, [16, 17, 4, 1], 2 + 2 + 1 + 1),
        row("gpu", None, [90, 3, 17, 0], 29),
        row("gpu", 8, [90, 90, 90, 90], 16),
        slow("gpu", 8, [90, 0, 5, 16], 4 + 0 + 2 + 3),
        slow("gpu", 1, [88, 89, 90, 1], 2 + 2 + 2 + 1),
    ],
)
def test_only_blocks_and_pages_in_reach_are_read(
    monkeypatch, backend, window, kv_len, num_reads
):
    """The TPU kernel reads each visible page once; the GPU kernel reads no others."""
    case = replace(SMALL, window=window)
    kept: dict[str, Any] = {}
    if backend == "gpu":
        case = replace(case, q_heads=2, kv_heads=1)
        kept = dict(dtype="bfloat16", query_dtype="float32")
    call = build(case, kv_len=kv_len, **kept)
    reads = count_reads(monkeypatch, backend, call)
    assert len(set(reads) if backend == "gpu" else reads) == num_reads
    assert backend == "reference" or pages_in_reach(call) == num_reads


@pytest.mark.parametrize(
    ("backend", "dtype", "query_dtype", "limit"),
    [
        row("reference", "bfloat16", "float32", EXACT),
        row("gpu", "bfloat16", "float32", EXACT),
        # On a TPU, softmax weights keep 16 bits in the product with bfloat16 values. A
        # bfloat16 result is rounded.
        row("tpu", "bfloat16", "float32", 3e-5),
        slow("tpu", "float32", "bfloat16", 2**-7),
    ],
)
def test_types_of_query_and_pages_may_differ(backend, dtype, query_dtype, limit):
    call = build(SMALL, seed=4, dtype=dtype, query_dtype=query_dtype)
    assert error(call, run(backend, call)) <= limit


def test_reference_reads_bits_and_rounds_its_result_to_the_type_of_the_query():
    call = build(SMALL, seed=4, dtype="bfloat16", query_dtype="float32")
    query, pages, *rest = call.arrays
    bits = to_storage(pages.astype(jnp.float32), jnp.zeros(0, jnp.uint16))
    check("reference", call, arrays=(query, bits, *rest))
    call = build(SMALL, seed=4)
    query, *rest = call.arrays
    query = query.astype(jnp.bfloat16)
    wide = run("reference", call, arrays=(query.astype(jnp.float32), *rest))
    small = replace(call, query_dtype="bfloat16")
    found = run("reference", small, arrays=(query, *rest))
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16).astype("f4"))


EIGHT_BITS = [
    *itertools.product(("reference", "cpu"), ("uint8", "float8_e4m3fn", "int8")),
    ("reference", IN_LANES),
    *itertools.product(("gpu",), ("float8_e4m3fn", "int8")),
    *itertools.product(("tpu",), ("float8_e4m3fn", IN_LANES)),
]
# `make test` has one window for each; those not listed here have one of 7.
QUICK_WINDOWS = {("reference", "float8_e4m3fn"): None, ("cpu", "int8"): None}
QUICK_WINDOWS |= {("gpu", "float8_e4m3fn"): None}


@pytest.mark.parametrize(
    ("backend", "kind", "window"),
    [
        row(backend, kind, window, slow=window != QUICK_WINDOWS.get((backend, kind), 7))
        for backend, kind in EIGHT_BITS
        for window in (7, None)
    ],
)
def test_pages_of_eight_bits_equal_float64(backend, kind, window):
    case = replace(SMALL_OF[backend], window=window)
    mask = random_forest(4, 5, seed=3)
    calls = [build_quantized(case, kind, seed) for seed in range(3)]
    calls.append(build_quantized(case, kind, 4, kv_len=[5, 17, 60, 90], mask=mask))
    for call, arrays in calls:
        check(backend, call, arrays=arrays)
    call, arrays = build_quantized(case, kind, 5, query_dtype="bfloat16")
    # A GPU multiplies in bfloat16, which represents 8-bit values exactly.
    limit = 2e-2 if backend == "gpu" else EXACT
    measure = error if backend == "gpu" else error_beyond_rounding
    assert measure(call, run(backend, call, arrays=arrays)) <= limit


def _lane_cases() -> Iterator[Any]:
    for name, case in SCALED_CASES.items():
        marks = () if name in FAST_ON_TPU else in_suite
        yield pytest.param(case, 32, marks=marks, id=name)
    # A row of lanes holds the scales of several heads of a page, or one head's scales
    # take several rows.
    for size in (1, 2, 8, 16, 64, 128, 256):
        case = replace(SMALL, page_size=size, q_heads=6, kv_heads=3)
        marks = () if size in (2, 16, 128) else in_suite
        yield pytest.param(case, 128, marks=marks, id=f"pages of {size}")
    # The scales of 8 rows of heads share a row of lanes, or do not fill it.
    for heads in (1, 5, 12):
        case = replace(SMALL, page_size=16, q_heads=heads, kv_heads=heads)
        marks = () if heads == 1 else in_suite
        yield pytest.param(case, 48, marks=marks, id=f"{heads} heads")


@pytest.mark.parametrize(("case", "block_tokens"), [*_lane_cases()])
def test_int8_in_lanes_equals_float64(case, block_tokens):
    kept: dict[str, Any] = {"query_dtype": "bfloat16"} if case.head_dim > 8 else {}
    call, arrays = build_quantized(case, IN_LANES, **kept)
    found = run("tpu", call, arrays=arrays, block_tokens=block_tokens)
    assert error_beyond_rounding(call, found) <= EXACT


def test_nan_scale_affects_only_its_token():
    """A NaN scale makes its own token NaN, and no other in its page or lanes."""
    call, (query, pages, table, kv_len) = build_quantized(SMALL, IN_LANES, 2)
    slot = 40
    page, offset = table[0, slot // SMALL.page_size], slot % SMALL.page_size
    lane = 2 * SMALL.page_size + offset  # the second head's key
    pages = replace(pages, scales=pages.scales.at[page, 0, lane].set(jnp.nan))
    found = run("tpu", call, arrays=(query, pages, table, kv_len))
    is_broken = np.asarray(np.isnan(found).any(axis=3))
    group = SMALL.q_heads // SMALL.kv_heads
    assert is_broken[0, :, group:].all() and is_broken.sum() == 5 * group
    whole = attend(call)
    np.testing.assert_allclose(found[0, :, :group], whole[0, :, :group], atol=EXACT)


@pytest.mark.parametrize("window", [pytest.param(None, marks=in_suite), 7])
def test_heads_and_sequences_split_over_a_mesh(window):
    """Devices have their own heads of all pages, as in the step program."""
    case = replace(SMALL, q_heads=8, kv_heads=4, window=window)
    call = build(case, kv_len=[90, 0, 33, 4])
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    heads = PartitionSpec("data", None, "model", None)
    pages = PartitionSpec(None, None, "model", None)
    specs = heads, pages, PartitionSpec("data", None), PartitionSpec("data")
    one_device = partial(
        tpu.paged_attention,
        ancestor_mask=None,
        block_tokens=BLOCK_TOKENS,
        interpret=True,
        **call.settings,
    )
    split = jax.shard_map(
        one_device, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False
    )
    assert error(call, jax.jit(split)(*call.arrays)) <= EXACT


@pytest.mark.parametrize(
    ("window", "is_scaled"),
    [pytest.param(None, False, marks=in_suite), (7, False), (7, True)],
)
def test_no_race_and_nothing_out_of_bounds(window, is_scaled, capfd):
    call, changes = strict_case(window), {}
    if is_scaled:
        case = replace(SMALL, seqs=3, context=41, window=window)
        call, arrays = build_quantized(case, IN_LANES, kv_len=[0, 41, 19])
        changes["arrays"] = arrays
    assert error(call, run_strictly(call, **changes)) <= EXACT
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", ["reference", "tpu", "gpu"])
def test_positions_past_the_page_table_hold_nothing(name, window):
    """Unused queries of a request's last round may be past the end of its pages."""
    page_size, table = 16, jnp.arange(1, 10, dtype=jnp.int32)[None]
    query, pages = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0)),
            [(1, 5, 2, 128), (20, page_size, 2, 128)],
            strict=True,
        )
    )
    pages = pages.at[0].set(jnp.nan)  # another sequence's
    length = table.size * page_size + 3
    own: dict[str, Any] = {
        "reference": {},
        "tpu": dict(interpret=replace(STRICT, detect_races=False), block_tokens=128),
        "gpu": dict(interpret=True),
    }
    settings: Any = dict(scale=0.1, soft_cap=None, window=window, ancestor_mask=None)
    found = BACKENDS[name].paged_attention(
        query, pages, table, jnp.array([length]), **settings, **own[name]
    )
    # Compute the two queries that are within the pages alone.
    expected = reference.paged_attention(
        query[:, :2], pages, table, jnp.array([length - 3]), **settings
    )
    np.testing.assert_allclose(found[0, :2], expected[0], atol=1e-5)


@pytest.mark.parametrize("has_tree", [pytest.param(True, marks=in_suite), False])
def test_page_table_larger_than_smem_is_read_in_groups(monkeypatch, has_tree):
    """Of five sequences, two fit: three groups, of which the last has a pad."""
    shapes = []

    def attend_group(pages: Any, query: Any, table: Any, *rest: Any, **own: Any) -> Any:
        shapes.append(table.shape)
        return group(pages, query, table, *rest, **own)

    group = tpu._attend
    mask = random_forest(5, 5, seed=3) if has_tree else None
    call = build(replace(SMALL, seqs=5), kv_len=[90, 5, 17, 0, 41], mask=mask)
    whole = run("tpu", call)
    monkeypatch.setattr(tpu, "_attend", attend_group)
    # A row of the page table takes 128 lanes of four bytes.
    monkeypatch.setattr(tpu, "MAX_TABLE_BYTES", 3 * 512)  # three have a pad
    found = run("tpu", call, function=compiled("tpu"))
    assert {shape[0] for shape in shapes} == {2}
    assert error(call, found) <= EXACT
    np.testing.assert_array_equal(found, whole)


def test_arrays_beyond_a_tpus_memories_are_errors():
    def trace(pages: int, tokens: int, kind: str | None = None) -> Any:
        shapes = [(2, tokens, 8, 128), (4, 16, 8, 128), (2, pages), (2,)]
        arrays = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in shapes[:2]]
        arrays += [jax.ShapeDtypeStruct(one, jnp.int32) for one in shapes[2:]]
        settings: Any = dict(scale=1.0, soft_cap=None, window=None, ancestor_mask=None)
        attend_one = partial(tpu.paged_attention, device_kind=kind, **settings)
        return jax.eval_shape(attend_one, *arrays).shape

    # 768 KiB hold the 196,608 page numbers of one sequence, and no more.
    assert trace(196_608, 1) == (2, 1, 8, 128)
    with pytest.raises(NotImplementedError, match=r"\(2, 196609\): a row of 786,944 "):
        trace(196_609, 1)
    # With two query heads for each of four KV heads, queries take 4 * 2048 * 128 values
    # in two blocks, and results, sums and maxima (in whole tiles) as much each.
    message = r"paged_attention needs .* of VMEM, but a kernel on TPU v5 lite may use "
    message += r"16.0 MiB: .* has shape \(4, 2048, 128\) of bfloat16"
    with pytest.raises(NotImplementedError, match=message):
        trace(8, 1024, "TPU v5 lite")
    assert trace(8, 1024, "TPU v6 lite") == trace(8, 1024) == (2, 1024, 8, 128)
    assert trace(8, 32, "TPU v5 lite") == (2, 32, 8, 128)


@pytest.mark.parametrize(
    ("backend", "kind", "page_size", "message"),
    [
        row("tpu", "float32", 4, "query of type float16"),
        row("tpu", "uint16", 4, "uint16 pages are for XLA:CPU"),
        row("tpu", "int8 alone", 4, "kv_pages of type int8"),
        row("tpu", "int8", 4, "not in lanes, but this implementation needs them in"),
        row("tpu", IN_LANES, 6, "page_size 6: .* power of two"),
        row("cpu", IN_LANES, 4, "are in lanes, but this implementation needs them not"),
        row("gpu", IN_LANES, 4, "are in lanes, but this implementation needs them not"),
        row("gpu", "uint16", 4, "`ScaledPages`, not uint16"),
        row("gpu", "uint8 alone", 4, "`ScaledPages`, not uint8"),
        row("gpu", "int8 alone", 4, "`ScaledPages`, not int8"),
    ],
)
def test_unsupported_types_are_errors(backend, kind, page_size, message):
    case = replace(SMALL, page_size=page_size)
    if kind in ("int8", IN_LANES):
        call, (query, pages, *rest) = build_quantized(case, kind)
    else:
        call = build(case)
        query, pages, *rest = call.arrays
        pages = jnp.zeros(pages.shape, kind.removesuffix(" alone"))
        query = query.astype(jnp.float16) if kind == "float32" else query
    attend_one = partial(
        BACKENDS[backend].paged_attention, ancestor_mask=None, **call.settings
    )
    with pytest.raises(NotImplementedError, match=message):
        attend_one(query, pages, *rest)
    if kind == IN_LANES and page_size == 4:
        with pytest.raises(NotImplementedError, match=message):
            public(call, (query, pages, *rest), implementation=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (5, 4, 8)}, "query has shape (5, 4, 8) and"),
        ({"kv_pages": (4, 4, 8)}, "kv_pages has shape (4, 4, 8)"),
        ({"page_table": (3, 4)}, "page_table has shape (3, 4) and kv_len (2,)"),
        ({"page_table": (2,)}, "page_table has shape (2,) and kv_len (2,)"),
        ({"kv_len": (1,)}, "page_table has shape (2, 4) and kv_len (1,)"),
        ({"kv_len": (2, 1)}, "and kv_len (2, 1)"),
        ({"ancestor_mask": (1, 5, 5)}, "ancestor_mask has shape (1, 5, 5)"),
        ({"ancestor_mask": (2, 5, 6)}, "must be (2, 5, 5)"),
        ({"kv_pages": (4, 4, 3, 8)}, "with keys and values alternating"),
        (
            {"query": (2, 5, 2, 8), "kv_pages": (4, 4, 6, 8)},
            "2 query heads cannot share 3 KV heads",
        ),
        ({"window": 0}, "window=0: "),
        ({"window": -1}, "at least 1"),
        ({"implementation": "fast"}, "paged_attention: choose one of"),
    ],
)
def test_bad_arguments_are_errors(change, message, monkeypatch):
    """Type annotations are not checked here, as when a user calls the function."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    shapes = {
        "query": (2, 5, 4, 8),
        "kv_pages": (4, 4, 4, 8),
        "page_table": (2, 4),
        "kv_len": (2,),
        "ancestor_mask": (2, 5, 5),
    } | change
    kinds = {"page_table": jnp.int32, "kv_len": jnp.int32, "ancestor_mask": bool}
    given: dict[str, Any] = {
        name: jnp.zeros(value, kinds.get(name, jnp.float32))
        if isinstance(value, tuple)
        else value
        for name, value in shapes.items()
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**given, scale=1.0)


def test_one_long_sequence_fills_a_gpu():
    case = replace(REAL_CASES["9b/tp1/verify"], seqs=1)
    assert case.kv_heads * tiles_of(case).splits >= 132
    # Splits have a minimum size: merging smaller ones would take longer than it saves.
    assert tiles_of(replace(case, context=512)).splits == 4
    assert tiles_of(replace(case, window=251)).splits == 2


@pytest.mark.parametrize(
    ("kind", "num_sms", "decoding", "prefill"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 2, 1),
        ("NVIDIA L4", 58, 1, 1),
        ("NVIDIA H100 PCIe", 114, 3, 2),
        ("NVIDIA H100 80GB HBM3", 132, 3, 2),
        ("NVIDIA B200", 148, 3, 2),
        ("NVIDIA L40S", 132, 3, 2),  # not known
        (None, 132, 3, 2),
    ],
)
@pytest.mark.parametrize("name", REAL_CASES)
def test_splits_run_at_once_on_a_gpu(name, kind, num_sms, decoding, prefill):
    """All thread blocks run at once, because a second wave would double the time.

    One more split per row tile would not fit, unless splits are as short as allowed.

    Args:
        decoding, prefill: Thread blocks of a multiprocessor at once.
    """
    case = REAL_CASES[name]
    tiles = tiles_of(case, device_kind=kind)
    rows = case.queries * case.q_heads // case.kv_heads
    programs = case.seqs * case.kv_heads * -(-rows // tiles.rows)
    resident = decoding if tiles.rows == 16 else prefill
    assert tiles.splits == 1 or programs * tiles.splits <= resident * num_sms
    tokens = case.context
    if case.window is not None:
        tokens = min(tokens, case.window + case.queries - 1)
    is_shortest = tokens // (tiles.splits + 1) < 128
    assert is_shortest or programs * (tiles.splits + 1) > resident * num_sms
    assert 2 * tiles.keys * case.head_dim * 2 == 32 * 1024
