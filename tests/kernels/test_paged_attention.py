"""Every call equals a float64 loop over the visible keys; nothing else is read.

Slots that no query sees hold NaN in every pool made here.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels import paged_attention
from jaxspec_kernels.bits import to_storage
from jaxspec_kernels.paged_attention import reference
from jaxspec_kernels.paged_attention.cases import CASES, Case

TOLERANCE = 1e-5
# Contexts end in the middle of a page, of a block, and in the first of several blocks.
SMALL = Case(
    seqs=4,
    queries=5,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    page_size=4,
    context=90,
    window=None,
    scale=0.4,
    soft_cap=2.0,
)
SMALL_BLOCK = 16  # tokens walked at once in the tests of SMALL: six blocks


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call and, in `seen`, which keys each query may use."""

    case: Case
    query: np.ndarray  # [seq, token, q_head, head_dim]
    key: np.ndarray  # [seq, position, kv_head, head_dim]
    value: np.ndarray
    kv_len: np.ndarray
    seen: np.ndarray  # [seq, token, position]
    mask: np.ndarray | None
    page_table: np.ndarray
    kv_pages: np.ndarray

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The positional arguments, on the device."""
        given = (self.query, self.kv_pages, self.page_table, self.kv_len)
        return tuple(jnp.asarray(array) for array in given)

    @property
    def settings(self) -> dict[str, float | None]:
        """The static keyword arguments."""
        case = self.case
        return dict(scale=case.scale, soft_cap=case.soft_cap, window=case.window)


def see(case: Case, kv_len: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Which positions each query sees, one pair of positions at a time."""
    seen = np.zeros((case.seqs, case.queries, case.context), bool)
    window = case.context + case.queries if case.window is None else case.window
    for seq, length in enumerate(kv_len):
        start = length - case.queries
        for token in range(case.queries):
            if start + token < 0:
                continue
            for key in range(length):
                if mask is None:
                    seen[seq, token, key] = 0 <= start + token - key < window
                    continue
                here = mask[seq, token].sum() - 1
                if key < start:
                    seen[seq, token, key] = start + here - key < window
                elif mask[seq, token, key - start]:
                    there = mask[seq, key - start].sum() - 1
                    seen[seq, token, key] = here - there < window
    return seen


def build(
    case: Case,
    seed: int = 0,
    *,
    kv_len: list[int] | None = None,
    mask: np.ndarray | None = None,
) -> Call:
    """A call with random values, in pages of random order."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, case.context + 1, case.seqs).astype(np.int32)
    lengths[0] = case.context
    if kv_len is not None:
        lengths = np.array(kv_len, np.int32)
    size = (case.seqs, case.context, case.kv_heads, case.head_dim)
    key, value = rng.normal(size=(2, *size)).astype(np.float32)
    size = (case.seqs, case.queries, case.q_heads, case.head_dim)
    # Scores of size 2: the softmax is neither flat nor a point.
    spread = 2 / (case.scale * case.head_dim**0.5)
    query = (rng.normal(size=size) * spread).astype(np.float32)
    seen = see(case, lengths, mask)

    table_len = -(-case.context // case.page_size) + 3
    num_pages = case.seqs * table_len
    order = rng.permutation(num_pages).reshape(case.seqs, table_len).astype(np.int32)
    shape = (num_pages, case.page_size, case.kv_heads, 2, case.head_dim)
    pages = np.full(shape, np.nan, np.float32)
    for seq in range(case.seqs):
        for at in np.flatnonzero(seen[seq].any(axis=0)):
            slot = order[seq, at // case.page_size], at % case.page_size
            pages[slot][:, 0], pages[slot][:, 1] = key[seq, at], value[seq, at]
        # Past the end stands anything: the engine's pad page, or somebody's page.
        used = -(-lengths[seq] // case.page_size)
        order[seq, used:] = rng.choice([num_pages, 0, 1], table_len - used)
    pages = pages.reshape(num_pages, case.page_size, -1, case.head_dim)
    return Call(
        case=case,
        query=query,
        key=key,
        value=value,
        kv_len=lengths,
        seen=seen,
        mask=mask,
        page_table=order,
        kv_pages=pages,
    )


def oracle(call: Call) -> np.ndarray:
    """Attention as the sentence in the docstring has it, in float64."""
    case = call.case
    group = case.q_heads // case.kv_heads
    result = np.zeros(call.query.shape)
    for seq, token, head in np.ndindex(result.shape[:3]):
        at = np.flatnonzero(call.seen[seq, token])
        if not at.size:
            continue
        key = call.key[seq, at, head // group].astype(np.float64)
        value = call.value[seq, at, head // group].astype(np.float64)
        scores = key @ call.query[seq, token, head].astype(np.float64) * case.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        weights = np.exp(scores - scores.max())
        result[seq, token, head] = weights @ value / weights.sum()
    return result


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
    mask = None if call.mask is None else jnp.asarray(call.mask)
    return np.asarray(
        attend_blocks(*call.arrays, mask, block_tokens=block_tokens, **call.settings)
    )


def random_forest(seqs: int, nodes: int, seed: int) -> np.ndarray:
    """Ancestor masks of random trees, parents before children, some without one."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((seqs, nodes, nodes), bool)
    for seq in range(seqs):
        for node in range(nodes):
            parent = rng.integers(-1, node)
            if parent >= 0:
                mask[seq, node] = mask[seq, parent]
            mask[seq, node, node] = True
    return mask


@pytest.mark.parametrize("name", CASES)
def test_case_equals_float64(name):
    call = build(CASES[name])
    result = attend(*call.arrays, **call.settings)
    assert np.abs(np.asarray(result) - oracle(call)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, 2.0), (1, 2.0), (7, 2.0), (16, 2.0), (7, None)]
)
def test_ragged_batches_equal_float64(window, soft_cap):
    case = replace(SMALL, window=window, soft_cap=soft_cap)
    for seed in range(6):
        call = build(case, seed)
        assert np.abs(run(call) - oracle(call)).max() <= TOLERANCE


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 1), (6, 3), (6, 6)])
def test_query_heads_share_kv_heads(q_heads, kv_heads):
    case = replace(SMALL, q_heads=q_heads, kv_heads=kv_heads)
    call = build(case, seed=3)
    assert np.abs(run(call) - oracle(call)).max() <= TOLERANCE


def test_pads_and_empty_sequences_are_zeros():
    call = build(SMALL, kv_len=[0, 2, 5, 90])
    result = run(call)
    assert np.abs(result - oracle(call)).max() <= TOLERANCE
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
        assert np.abs(run(call) - oracle(call)).max() <= TOLERANCE


def test_tree_of_one_node_is_the_newest_token():
    mask = np.ones((4, 1, 1), bool)
    call = build(replace(SMALL, queries=1), kv_len=[90, 16, 1, 41], mask=mask)
    assert np.abs(run(call) - oracle(call)).max() <= TOLERANCE


@pytest.mark.parametrize("window", [None, 7])
def test_chain_as_a_tree_is_the_chain(window):
    case = replace(SMALL, window=window)
    chain = np.broadcast_to(np.tri(5, dtype=bool), (4, 5, 5)).copy()
    for kv_len in ([90, 40, 3, 0], [17, 16, 15, 1]):
        call = build(case, kv_len=kv_len)
        # Two programs, which XLA fuses differently.
        assert np.abs(run(replace(call, mask=chain)) - run(call)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("window", "block_tokens"), [(7, 1), (7, 20), (7, 64), (None, 8), (None, 512)]
)
def test_block_size_does_not_matter(window, block_tokens):
    call = build(replace(SMALL, window=window), seed=2)
    assert np.abs(run(call, block_tokens) - oracle(call)).max() <= TOLERANCE


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
    assert np.abs(np.asarray(result) - oracle(call)).max() <= TOLERANCE


def test_bfloat16_pages_as_such_and_as_bits():
    call = build(SMALL, seed=4)
    pages = jnp.asarray(call.kv_pages)
    rounded = jnp.asarray(pages, jnp.bfloat16)
    exact = dict(
        key=np.asarray(jnp.asarray(call.key, jnp.bfloat16), np.float32),
        value=np.asarray(jnp.asarray(call.value, jnp.bfloat16), np.float32),
    )
    expected = oracle(replace(call, **exact))
    query, _, table, kv_len = call.arrays
    for pool in (rounded, to_storage(pages, jnp.dtype(jnp.uint16))):
        result = attend_blocks(query, pool, table, kv_len, **call.settings)
        assert result.dtype == jnp.float32
        assert np.abs(np.asarray(result) - expected).max() <= TOLERANCE


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
