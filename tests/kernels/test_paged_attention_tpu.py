"""The TPU kernel equals float64 in Pallas' interpreters and compiles for real chips.

The interpreters find wrong numbers, races and reads out of bounds; the compiler finds
what a chip cannot do or hold. Neither finds the other's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec_kernels.paged_attention import tpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES
from tests.kernels import aot_tpu
from tests.kernels.oracle import (
    SCALED_CASES,
    SMALL,
    Call,
    attend,
    build,
    error,
    pages_in_reach,
    random_forest,
)
from tests.mutants import Mutant, rewritten

TOLERANCE = 1e-5
BLOCK_TOKENS = 16  # four pages of SMALL at once: its longest walk has six blocks
FAST_CASES = ("tiny/verify", "2b/tp8/decode-two")
STRICT = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


STATIC = ("scale", "soft_cap", "window", "block_tokens", "interpret")
compiled = jax.jit(tpu.paged_attention, static_argnames=STATIC)


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
    "name",
    [name if name in FAST_CASES else slow(name) for name in SCALED_CASES],
)
def test_case_equals_float64(name):
    call = build(SCALED_CASES[name], dtype=jnp.bfloat16)
    result = np.asarray(run(call, block_tokens=32), np.float64)
    truth = attend(call)
    # The result's own rounding to the 8 bits of bfloat16, and nothing else.
    assert (np.abs(result - truth) <= np.abs(truth) * 2**-8 + TOLERANCE).all()


@pytest.mark.parametrize(
    ("window", "soft_cap"),
    [(None, 2.0), slow(1, 2.0), (7, 2.0), slow(16, 2.0), slow(7, None)],
)
def test_ragged_batches_equal_float64(window, soft_cap):
    case = replace(SMALL, window=window, soft_cap=soft_cap)
    for seed in range(6):
        call = build(case, seed)
        assert error(call, run(call)) <= TOLERANCE


@pytest.mark.parametrize("window", [slow(None), 7])
def test_every_length_up_to_two_blocks_equals_float64(window):
    """Borders of pages, blocks and windows, each at every offset."""
    case = replace(SMALL, window=window)
    for first in range(0, 2 * BLOCK_TOKENS + 4, 4):
        call = build(case, first, kv_len=[first + rest for rest in (0, 1, 2, 3)])
        assert error(call, run(call)) <= TOLERANCE


@pytest.mark.parametrize(("q_heads", "kv_heads"), [slow(6, 1), (6, 3), slow(6, 6)])
def test_query_heads_share_kv_heads(q_heads, kv_heads):
    call = build(replace(SMALL, q_heads=q_heads, kv_heads=kv_heads), seed=3)
    assert error(call, run(call)) <= TOLERANCE


@pytest.mark.parametrize(
    "kv_len", [[0, 0, 0, 0], [0, 90, 0, 0], [90, 0, 0, 41], [1, 2, 0, 5]]
)
def test_pads_and_empty_sequences_are_zeros(kv_len):
    """The buffers are handed over across sequences that have nothing to read."""
    call = build(SMALL, kv_len=kv_len)
    result = np.asarray(run(call))
    assert error(call, result) <= TOLERANCE
    assert not result[~call.seen.any(axis=2)].any()


@pytest.mark.parametrize("window", [slow(None), slow(2), 7])
def test_trees_equal_float64(window):
    case = replace(SMALL, queries=7, window=window)
    for seed in range(6):
        # The root's own position is in the pages: at least `queries` tokens.
        rng = np.random.default_rng(seed)
        kv_len = [7, *rng.integers(7, 91, 3).tolist()]
        call = build(case, seed, kv_len=kv_len, mask=random_forest(4, 7, seed))
        assert error(call, run(call)) <= TOLERANCE


@pytest.mark.parametrize("block_tokens", [slow(1), 12, slow(64), slow(None)])
def test_block_size_does_not_matter(block_tokens):
    call = build(replace(SMALL, window=7), seed=2)
    assert error(call, run(call, block_tokens=block_tokens)) <= TOLERANCE


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
    assert error(call, result) <= TOLERANCE
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
    assert error(call, run_strictly(call)) <= TOLERANCE
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_unsupported_types_are_errors():
    call = build(SMALL)
    query, pages, *rest = call.arrays
    attend_tpu = partial(tpu.paged_attention, ancestor_mask=None, **call.settings)
    with pytest.raises(NotImplementedError, match="uint16 pages hold bfloat16 bits"):
        attend_tpu(query, jnp.zeros(pages.shape, jnp.uint16), *rest)
    with pytest.raises(NotImplementedError, match="kv_pages of type int8"):
        attend_tpu(query, jnp.zeros(pages.shape, jnp.int8), *rest)
    with pytest.raises(NotImplementedError, match="query of type float16"):
        attend_tpu(query.astype(jnp.float16), pages, *rest)


UNCAPPED = """if soft_cap is not None:
                scores = jnp.tanh(scores / soft_cap) * soft_cap
            scores = jnp.where(seen, scores, _MASKED)
            old_maximum = maximum[head]
            new_maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_maximum), 0.0)
"""
CAPPED_LATE = """scores = jnp.where(seen, scores, _MASKED)
            scores = jnp.tanh(scores / soft_cap) * soft_cap
            old_maximum = maximum[head]
            new_maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - new_maximum)
"""
SUM = "total[head] * rescale + weights.sum(axis=1, keepdims=True)"
BF16_SUM = f"({SUM}).astype(jnp.bfloat16).astype(jnp.float32)"
# Name, what is replaced in the kernel, by what. Seen by a wrong result.
WRONG_NUMBERS = [
    ("own key hidden", "key <= position", "key < position"),
    ("next key seen", "key <= position", "key <= position + 1"),
    ("window too wide", "key < window", "key <= window"),
    ("window too narrow", "key < window", "key < window - 1"),
    ("slot past the end used", "& (at < length)", "& (at <= length)"),
    ("slot before the window used", "(at >= lowest[seq]) &", ""),
    ("first KV head for all", "lane = 2 * head", "lane = 0 * head"),
    ("values for keys", "kv[:, lane : lane", "kv[:, lane + head_dim : head_dim + lane"),
    ("bf16 sum", SUM, BF16_SUM),
    ("no rescale", "mixed[head] * rescale", "mixed[head]"),
    ("no rescale of the sum", "total[head] * rescale", "total[head]"),
    ("cap after mask", UNCAPPED, CAPPED_LATE),
    ("buffer of another block", "return 1 - slot", "return slot"),
    ("buffers not handed over", "next_slot[0] = jax.lax.fori", "jax.lax.fori"),
]
# Seen by the strict interpreter alone, or by counting.
WRONG_COPIES = [
    ("no wait", 'each_page(seq, number, slot, "wait")', "pass"),
    ("one buffer", "buffers.at[slot, at]", "buffers.at[0, at]"),
    ("page past the end read", "end_page[of_seq] -", "end_page[of_seq] + 1 -"),
]


def mutated(name: str, old: str, new: str, function: str = "_kernel"):
    """A function of the kernel's module with one bug in it."""
    mutant = Mutant(
        name=name,
        module=tpu.__name__,
        function=function,
        old=old,
        new=new,
        check=object,
    )
    return rewritten(mutant)[1]


def fresh(function=None):
    """A jit of its own, which has not traced the kernel without the bug."""
    function = tpu.paged_attention if function is None else function
    return jax.jit(partial(function), static_argnames=STATIC)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"), WRONG_NUMBERS, ids=[name for name, *_ in WRONG_NUMBERS]
)
def test_wrong_number_is_seen(monkeypatch, name, old, new):
    monkeypatch.setattr(tpu, "_kernel", mutated(name, old, new))
    # One block, then two, three, two: the buffer that comes next alternates.
    call = build(replace(SMALL, window=35), kv_len=[3, 41, 90, 17])
    assert error(call, run(call, function=fresh())) > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jnp.repeat(depth, group, axis=1)", "jnp.tile(depth, (1, group))"),
        ("mixed.transpose(0, 2, 1, 3, 4)", "mixed"),
        ("window + 1, 0)", "window + 2, 0)"),
    ],
)
def test_wrong_row_or_start_is_seen(old, new):
    function = mutated("wrong row or start", old, new, "paged_attention")
    # One block, then two, three, two: the buffer that comes next alternates.
    call = build(replace(SMALL, window=35), kv_len=[3, 41, 90, 17])
    assert error(call, run(call, function=fresh(function))) > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new"), WRONG_COPIES, ids=[name for name, *_ in WRONG_COPIES]
)
def test_wrong_copy_is_seen(monkeypatch, capfd, name, old, new):
    monkeypatch.setattr(tpu, "_kernel", mutated(name, old, new))
    call = strict_case(7)
    try:
        is_right = error(call, run_strictly(call, fresh())) <= TOLERANCE
    except jax.errors.JaxRuntimeError as raised:
        assert "out-of-bounds" in str(raised).lower()
        return
    assert not is_right or "RACE DETECTED" in capfd.readouterr().out


# Half of what a kernel gets by default on v5e; XLA wants the rest for its own copies.
MAX_VMEM_BYTES = 8 * 2**20
needs_libtpu = pytest.mark.skipif(
    aot_tpu.MISSING is not None, reason=str(aot_tpu.MISSING)
)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", aot_tpu.CHIPS)
@pytest.mark.parametrize("name", CASES | REAL_CASES)
def test_case_compiles_and_fits(name, chip, record_property):
    result = aot_tpu.compile_attention((CASES | REAL_CASES)[name], chip)
    record_property("vmem_bytes", result.vmem_bytes)
    assert result.vmem_bytes <= MAX_VMEM_BYTES
    assert not result.whole_copies


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", aot_tpu.CHIPS)
def test_trees_and_float32_compile(chip):
    for name in ("9b/tp1/verify-window", "2b/tp8/verify"):
        case = REAL_CASES[name]
        with_tree = aot_tpu.compile_attention(case, chip, has_tree=True)
        float32 = aot_tpu.compile_attention(case, chip, dtype=jnp.float32)
        assert max(with_tree.vmem_bytes, float32.vmem_bytes) <= MAX_VMEM_BYTES


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", aot_tpu.CHIPS)
def test_pool_of_narrow_heads_is_copied_unless_it_is_row_major(chip):
    case = replace(CASES["tiny/verify"], context=8192)
    assert aot_tpu.compile_attention(case, chip).whole_copies
    assert not aot_tpu.compile_attention(case, chip, is_row_major=True).whole_copies


@needs_libtpu
@pytest.mark.slow
def test_prefill_tile_that_does_not_fit_is_refused():
    case = replace(REAL_CASES["9b/tp1/prefill"], queries=1024, seqs=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory space vmem"):
        aot_tpu.compile_attention(case, "v5e", block_tokens=16)
