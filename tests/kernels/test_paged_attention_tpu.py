"""The TPU kernel, interpreted, equals float64, races with nothing, reads what it must.

What a chip cannot do or hold is found by `test_paged_attention_tpu_aot.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from jaxspec_kernels.paged_attention import tpu
from jaxspec_kernels.paged_attention.cases import Case
from tests.kernels.oracle import (
    EXACT,
    IN_LANES,
    SCALED_CALLS,
    SCALED_CASES,
    SMALL,
    UNOPTIMISED,
    Call,
    attend,
    build,
    build_quantized,
    error,
    excess,
    pages_in_reach,
    random_forest,
)

BLOCK_TOKENS = 16  # four pages of SMALL at once: its longest walk has six blocks
FAST_CASES = ("tiny/verify", "2b/tp8/decode-two")
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.battery(name="attention_calls"))


STATIC = ("scale", "soft_cap", "window", "block_tokens", "interpret")
compiled = jax.jit(
    tpu.paged_attention, static_argnames=STATIC, compiler_options=UNOPTIMISED
)


def run(
    call: Call,
    *,
    function: Callable[..., jax.Array] = compiled,
    interpret: bool | pltpu.InterpretParams = True,
    block_tokens: int | None = BLOCK_TOKENS,
) -> jax.Array:
    return function(
        *call.arrays,
        ancestor_mask=call.ancestor_mask,
        block_tokens=block_tokens,
        interpret=interpret,
        **call.settings,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [call if call[0] in FAST_CASES else slow(*call) for call in SCALED_CALLS],
)
def test_case_equals_float64(name, dtype):
    call = build(SCALED_CASES[name], dtype=dtype)
    assert excess(call, run(call, block_tokens=32)) <= EXACT


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(None, 2.0), slow(1, 2.0), (7, 2.0), slow(16, 2.0), slow(7, None)],
)
def test_ragged_batches_equal_float64(window, soft_cap):
    case = replace(SMALL, window=window, soft_cap=soft_cap)
    for seed in range(6):
        call = build(case, seed)
        assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize("window", [slow(None), 7])
def test_every_length_up_to_two_blocks_equals_float64(window):
    """Borders of pages, blocks and windows, each at every offset."""
    case = replace(SMALL, window=window)
    for first in range(0, 2 * BLOCK_TOKENS + 4, 4):
        call = build(case, first, kv_len=[first + rest for rest in (0, 1, 2, 3)])
        assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize("group", [1, *map(slow, range(2, 8)), 8])
@pytest.mark.parametrize("kv_heads", [slow(1), 3])
def test_query_heads_share_kv_heads(group, kv_heads):
    case = replace(SMALL, q_heads=group * kv_heads, kv_heads=kv_heads)
    call = build(case, seed=3)
    assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize(
    "kv_len", [[0, 0, 0, 0], [0, 90, 0, 0], [90, 0, 0, 41], [1, 2, 0, 5]]
)
def test_pads_and_empty_sequences_are_zeros(kv_len):
    """The buffers are handed over across sequences that have nothing to read."""
    call = build(SMALL, kv_len=kv_len)
    result = np.asarray(run(call))
    assert error(call, result) <= EXACT
    assert not result[~call.seen.any(axis=2)].any()


@pytest.mark.parametrize("window", [slow(None), slow(2), 7])
def test_trees_equal_float64(window):
    case = replace(SMALL, queries=7, window=window)
    for seed in range(6):
        # The root's own position is in the pages: at least `queries` tokens.
        rng = np.random.default_rng(seed)
        kv_len = [7, *rng.integers(7, 91, 3).tolist()]
        call = build(case, seed, kv_len=kv_len, mask=random_forest(4, 7, seed))
        assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize("window", [3, slow(None)])
def test_trees_of_more_nodes_than_a_word_has_bits(window):
    case = replace(SMALL, queries=67, window=window)
    call = build(case, kv_len=[67, 68, 80, 90], mask=random_forest(4, 67, seed=1))
    assert error(call, run(call)) <= EXACT


@pytest.mark.parametrize("block_tokens", [slow(1), 12, slow(64), slow(None)])
def test_block_size_does_not_matter(block_tokens):
    call = build(replace(SMALL, window=7), seed=2)
    assert error(call, run(call, block_tokens=block_tokens)) <= EXACT


@pytest.mark.parametrize("window", [slow(None), 7])
def test_row_does_not_depend_on_the_other_rows(window):
    """Bitwise: otherwise the text of a request would depend on its neighbours."""
    case = replace(SMALL, window=window)
    base = build(case, kv_len=[60, 60, 60, 60])
    expected = np.asarray(run(base))[0]
    for others in ([0, 0, 0], [1, 7, 90], [90, 90, 90], [33, 80, 5]):
        other = build(case, seed=5, kv_len=[60, *others])
        pages, table = other.kv_pages.copy(), other.page_table.copy()
        pages[table[0, :15]] = base.kv_pages[base.page_table[0, :15]]
        query = np.concatenate([base.query[:1], other.query[1:]])
        other = replace(other, kv_pages=pages, query=query)
        np.testing.assert_array_equal(np.asarray(run(other))[0], expected)


@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [(jnp.bfloat16, jnp.float32), slow(jnp.float32, jnp.bfloat16)],
)
def test_types_of_query_and_pages_may_differ(dtype, query_dtype):
    call = build(SMALL, seed=4, dtype=dtype, query_dtype=query_dtype)
    result = run(call)
    assert result.dtype == query_dtype
    # Weights have 16 bits over bfloat16 values; a bfloat16 result is rounded, below 4.
    limit = 3e-5 if query_dtype == jnp.float32 else 2**-7
    assert error(call, result) <= limit


@pytest.mark.parametrize("window", [slow(None), 7])
def test_heads_and_sequences_split_over_a_mesh(window):
    """As the step program calls it: every device has its heads of all pages."""
    case = replace(SMALL, q_heads=8, kv_heads=4, window=window)
    call = build(case, kv_len=[90, 0, 33, 4])
    mesh = jax.make_mesh(
        (2, 1, 4),
        ("data", "replica", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    heads = PartitionSpec("data", None, "model", None)
    specs = (
        heads,
        PartitionSpec(None, None, "model", None),
        PartitionSpec("data", None),
        PartitionSpec("data"),
    )
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
    result = jax.jit(split)(*call.arrays)
    assert error(call, result) <= EXACT


def count_copies(monkeypatch, call: Call) -> int:
    """Pages that a run copies from HBM."""
    started = []
    make = tpu.copy_page

    class Counted:
        def __init__(self, *places):
            self.copy = make(*places)
            self.wait = self.copy.wait

        def start(self):
            jax.debug.callback(lambda: started.append(None))
            self.copy.start()

    with monkeypatch.context() as patch:
        patch.setattr(tpu, "copy_page", Counted)
        # A jit of its own: `compiled` may have traced the uncounted form.
        counted = jax.jit(partial(tpu.paged_attention), static_argnames=STATIC)
        result = run(call, function=counted)
        jax.effects_barrier()
    assert error(call, result) <= EXACT
    return len(started)


@pytest.mark.parametrize(
    ("window", "kv_len", "num_pages"),
    [
        # Page 22 is the last of 90 tokens.
        slow(None, [90, 3, 17, 0], 23 + 1 + 5 + 0),
        # The first query is at 85 and sees 78..85: pages 19 to 22.
        slow(8, [90, 90, 0, 90], 12),
        # 85 - 5 = 80 is the first slot of page 20; one more token reaches page 19.
        (6, [90, 0, 0, 0], 3),
        (7, [90, 0, 0, 0], 4),
        slow(1, [16, 17, 4, 1], 2 + 2 + 1 + 1),
    ],
)
def test_only_pages_in_reach_are_copied(monkeypatch, window, kv_len, num_pages):
    call = build(replace(SMALL, window=window), kv_len=kv_len)
    assert pages_in_reach(call) == num_pages
    assert count_copies(monkeypatch, call) == num_pages


def strict_case(window: int | None) -> Call:
    case = replace(SMALL, seqs=3, context=41, window=window)
    call = build(case, kv_len=[0, 41, 19])
    # Ids past the end, and of pages that the window has left behind: out of bounds.
    table = call.page_table.copy()
    for seq, length in enumerate(call.kv_len):
        first = 0 if window is None else max(length - 5 - window + 1, 0) // 4
        table[seq, :first] = table[seq, -(-length // 4) :] = 10**6
    return replace(call, page_table=table)


def run_strictly(call: Call, function=compiled) -> jax.Array:
    try:
        return jax.block_until_ready(run(call, function=function, interpret=STRICT))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("window", [slow(None), 7])
def test_no_race_and_nothing_out_of_bounds(window, capfd):
    call = strict_case(window)
    assert error(call, run_strictly(call)) <= EXACT
    assert "RACE DETECTED" not in capfd.readouterr().out


def quantized_excess(
    case: Case,
    kind: str,
    seed: int = 0,
    *,
    block_tokens: int = BLOCK_TOKENS,
    interpret: bool | pltpu.InterpretParams = True,
    **settings,
) -> float:
    """How far the kernel is off, of a call over keys of eight bits."""
    call, arrays = build_quantized(case, kind, seed, **settings)
    found = compiled(
        *arrays,
        ancestor_mask=call.ancestor_mask,
        block_tokens=block_tokens,
        interpret=interpret,
        **call.settings,
    )
    assert found.dtype == call.query_dtype
    return excess(call, found.astype(jnp.float32))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", IN_LANES])
@pytest.mark.parametrize("window", [slow(None), 7])
def test_keys_of_eight_bits_equal_float64(window, kind):
    case = replace(SMALL, window=window)
    for seed in range(4):
        assert quantized_excess(case, kind, seed) <= EXACT
    assert quantized_excess(case, kind, 5, query_dtype="bfloat16") <= EXACT
    mask = random_forest(4, 5, seed=3)
    lengths = [5, 17, 60, 90]
    assert quantized_excess(case, kind, 6, mask=mask, kv_len=lengths) <= EXACT


@pytest.mark.parametrize(
    "name",
    [name if name in FAST_CASES else slow(name) for name in SCALED_CASES],
)
def test_case_of_int8_equals_float64(name):
    case = SCALED_CASES[name]
    found = quantized_excess(case, IN_LANES, block_tokens=32, query_dtype="bfloat16")
    assert found <= EXACT


@pytest.mark.parametrize(
    "page_size", [slow(1), 2, slow(8), 16, slow(64), 128, slow(256)]
)
def test_scales_of_pages_of_any_size(page_size):
    """Rows of lanes hold many heads of a page, or a page's head has several rows."""
    case = replace(SMALL, page_size=page_size, q_heads=6, kv_heads=3)
    assert quantized_excess(case, IN_LANES, block_tokens=128) <= EXACT


@pytest.mark.parametrize("kv_heads", [1, slow(5), slow(12)])
def test_scales_of_any_number_of_heads(kv_heads):
    """Of 8 heads' rows that share one of lanes, or do not fill it."""
    case = replace(SMALL, page_size=16, q_heads=kv_heads, kv_heads=kv_heads)
    assert quantized_excess(case, IN_LANES, block_tokens=48) <= EXACT


def test_a_scale_that_is_no_number_is_its_tokens_alone():
    """Tokens beside it in its page and its row of lanes keep theirs."""
    call, (query, pages, table, kv_len) = build_quantized(SMALL, IN_LANES, 2)
    slot = 40
    page, offset = table[0, slot // SMALL.page_size], slot % SMALL.page_size
    lane = 2 * SMALL.page_size + offset  # the second head's key
    pages = replace(pages, scales=pages.scales.at[page, 0, lane].set(jnp.nan))
    found = compiled(
        query,
        pages,
        table,
        kv_len,
        ancestor_mask=None,
        block_tokens=BLOCK_TOKENS,
        interpret=True,
        **call.settings,
    )
    is_broken = np.asarray(np.isnan(np.asarray(found)).any(axis=3))
    group = SMALL.q_heads // SMALL.kv_heads
    assert is_broken[0, :, group:].all() and is_broken.sum() == 5 * group
    whole = attend(call)
    np.testing.assert_allclose(found[0, :, :group], whole[0, :, :group], atol=EXACT)


def test_scales_are_copied_without_a_race(capfd):
    try:
        case = replace(SMALL, seqs=3, context=41, window=7)
        found = quantized_excess(case, IN_LANES, interpret=STRICT, kv_len=[0, 41, 19])
        assert found <= EXACT
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_unsupported_types_are_errors():
    call = build(SMALL)
    _, (_, scaled, *_) = build_quantized(SMALL, "int8")
    query, pages, *rest = call.arrays
    attend_tpu = partial(tpu.paged_attention, ancestor_mask=None, **call.settings)
    with pytest.raises(NotImplementedError, match="uint16 pages hold bits"):
        attend_tpu(query, jnp.zeros(pages.shape, jnp.uint16), *rest)
    with pytest.raises(NotImplementedError, match="not in lanes, and this"):
        attend_tpu(query, scaled, *rest)
    _, (_, scaled, *_) = build_quantized(replace(SMALL, page_size=6), IN_LANES)
    with pytest.raises(NotImplementedError, match="page_size 6: .* power of two"):
        attend_tpu(query, scaled, *rest)
    with pytest.raises(NotImplementedError, match="kv_pages of type int8"):
        attend_tpu(query, jnp.zeros(pages.shape, jnp.int8), *rest)
    with pytest.raises(NotImplementedError, match="query of type float16"):
        attend_tpu(query.astype(jnp.float16), pages, *rest)
