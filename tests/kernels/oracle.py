"""The oracle of every attention backend: attention over pages in float64.

Slots that no query sees hold NaN, and page table entries past the end of a sequence
are arbitrary.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxspec_kernels.bits import ScaledPages, from_storage, to_storage
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES, Case
from tests.support.programs import fusion_emitters

IN_LANES = "int8 in lanes"  # `ScaledPages` of a TPU
EXACT = 1e-5  # float32 error of a sum of a hundred products
# Compiler options for `jax.jit`. Compiling takes far longer than running here, and they
# reduce the compile time of rejection sampling to a quarter.
UNOPTIMISED: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    **fusion_emitters(False),
}

# Contexts end, and windows start, in the middle of a page and of a block.
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


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of a call; pages hold `key` and `value`, given by position."""

    case: Case
    query: np.ndarray  # [seq, token, q_head, head_dim], float32
    key: np.ndarray  # [seq, position, kv_head, head_dim]
    value: np.ndarray
    kv_len: np.ndarray
    seen: np.ndarray  # [seq, token, position]: whether a query sees a key
    mask: np.ndarray | None
    page_table: np.ndarray
    kv_pages: np.ndarray
    dtype: DTypeLike  # type in which the pages store numbers
    query_dtype: DTypeLike

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """The positional arguments."""
        return (
            jnp.asarray(self.query, self.query_dtype),
            jnp.asarray(self.kv_pages, self.dtype),
            jnp.asarray(self.page_table),
            jnp.asarray(self.kv_len),
        )

    @property
    def settings(self) -> dict[str, float | int | None]:
        """The keyword arguments that are Python numbers."""
        case = self.case
        return dict(scale=case.scale, soft_cap=case.soft_cap, window=case.window)

    @property
    def ancestor_mask(self) -> Array | None:
        return None if self.mask is None else jnp.asarray(self.mask)


def scaled_down(case: Case) -> Case:
    """Return a case with the same heads and queries, but few short sequences."""
    window = None if case.window is None else 2 * case.queries + 23
    context = 3 * case.queries + 70
    return replace(case, seqs=3, context=context, window=window)


# The scaled-down cases without duplicates: cases that become equal when they are scaled
# down are listed once, under the first one's name.
SCALED_CASES = {
    case: name
    for name, case in reversed(
        [(name, scaled_down(case)) for name, case in (CASES | REAL_CASES).items()]
    )
}
SCALED_CASES = {name: case for case, name in SCALED_CASES.items()}
# All cases in bfloat16, which chips use. In float32, only cases of whole models, not
# those of a device's share of the heads.
SCALED_CALLS = [
    (name, dtype)
    for name in SCALED_CASES
    for dtype in ("bfloat16", "float32")
    if dtype == "bfloat16" or "/tp" not in name or "/tp1/" in name
]


def see(case: Case, kv_len: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return which positions each query sees, decided for each pair of positions."""
    seen = np.zeros((case.seqs, case.queries, case.context), bool)
    window = case.context + case.queries if case.window is None else case.window
    for seq, token in np.ndindex(seen.shape[:2]):
        length = kv_len[seq]
        start = length - case.queries
        if start + token < 0:
            continue
        for key in range(length):
            if mask is None:
                seen[seq, token, key] = 0 <= start + token - key < window
                continue
            depth = mask[seq, token].sum() - 1
            if key < start:
                seen[seq, token, key] = start + depth - key < window
            elif mask[seq, token, key - start]:
                ancestor_depth = mask[seq, key - start].sum() - 1
                seen[seq, token, key] = depth - ancestor_depth < window
    return seen


def rounded(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Round to values that `dtype` can represent; return them in float32."""
    return array.astype(jnp.dtype(dtype)).astype(np.float32)


def build(
    case: Case,
    seed: int = 0,
    *,
    kv_len: list[int] | None = None,
    mask: np.ndarray | None = None,
    dtype: DTypeLike = jnp.float32,
    query_dtype: DTypeLike | None = None,
) -> Call:
    """Build a call with random values, in pages of random order."""
    rng = np.random.default_rng(seed)
    query_dtype = dtype if query_dtype is None else query_dtype
    lengths = rng.integers(0, case.context + 1, case.seqs).astype(np.int32)
    lengths[0] = case.context
    if kv_len is not None:
        lengths = np.array(kv_len, np.int32)
    size = (case.seqs, case.context, case.kv_heads, case.head_dim)
    key, value = rounded(rng.normal(size=(2, *size)), dtype)
    size = (case.seqs, case.queries, case.q_heads, case.head_dim)
    # Scores have a magnitude of 2, so that the softmax is neither uniform nor one-hot.
    spread = 2 / (case.scale * case.head_dim**0.5)
    query = rounded(rng.normal(size=size) * spread, query_dtype)
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
        # Page table entries past the end are arbitrary: the pad page, or any other.
        used = -(-lengths[seq] // case.page_size)
        order[seq, used:] = rng.choice([num_pages, 0, 1], table_len - used)
    return Call(
        case=case,
        query=query,
        key=key,
        value=value,
        kv_len=lengths,
        seen=seen,
        mask=mask,
        page_table=order,
        kv_pages=pages.reshape(num_pages, case.page_size, -1, case.head_dim),
        dtype=dtype,
        query_dtype=query_dtype,
    )


def build_quantized(
    case: Case, kind: str, seed: int = 0, **settings: Any
) -> tuple[Call, tuple[Any, ...]]:
    """Build a call with 8-bit keys and values; return it and its positional arguments.

    Args:
        kind: "float8_e4m3fn", "uint8" (its bits), "int8" (with scales), or `IN_LANES`.
    """
    call = build(case, seed, **settings)
    pool: Any
    if kind in ("int8", IN_LANES):
        pool = ScaledPages(jnp.zeros(0, jnp.int8), jnp.zeros(0))
    else:
        pool = jnp.zeros(0, kind)

    def kept(values: np.ndarray) -> Any:
        return to_storage(jnp.asarray(values), pool)

    key, value = (np.asarray(from_storage(kept(one))) for one in (call.key, call.value))
    query, _, *rest = call.arrays
    pages = kept(call.kv_pages)
    if kind == IN_LANES:
        pages = in_lanes(pages)
    return replace(call, key=key, value=value), (query, pages, *rest)


def in_lanes(pages: ScaledPages) -> ScaledPages:
    """Return the pages with scales in a TPU's layout; unused lanes hold NaN."""
    scales = np.asarray(pages.scales)  # [page, page_size, row]
    num_pages, page_size, rows = scales.shape
    lanes = np.full((num_pages, 1, -(-page_size * rows // 128) * 128), np.nan, "f4")
    for offset, row in np.ndindex(page_size, rows):
        lanes[:, 0, row * page_size + offset] = scales[:, offset, row]
    return ScaledPages(pages.values, jnp.asarray(lanes), is_in_lanes=True)


def attend(call: Call) -> np.ndarray:
    """Compute attention in float64 over only the visible keys."""
    case = call.case
    group = case.q_heads // case.kv_heads
    result = np.zeros(call.query.shape)
    for seq, token, head in np.ndindex(*result.shape[:3]):
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


def error(call: Call, result: Array | np.ndarray) -> float:
    """Return the largest error of a result; infinite if any value is NaN."""
    distance = np.abs(np.asarray(result, np.float64) - attend(call))
    return float(distance.max()) if np.isfinite(distance).all() else np.inf


def error_beyond_rounding(call: Call, result: Array | np.ndarray) -> float:
    """Return `error` minus the error of rounding the result to the query's type."""
    truth = attend(call)
    distance = np.abs(np.asarray(result, np.float64) - truth)
    distance -= np.abs(truth) * (float(jnp.finfo(call.query_dtype).eps) / 2)
    return float(distance.max()) if np.isfinite(distance).all() else np.inf


def pages_in_reach(call: Call) -> int:
    """Return the number of pages in which some query sees a slot."""
    size = call.case.page_size
    return sum(
        len({at // size for at in np.flatnonzero(seen.any(axis=0))})
        for seen in call.seen
    )


def random_forest(seqs: int, nodes: int, seed: int) -> np.ndarray:
    """Return ancestor masks of random forests, with parents before children."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((seqs, nodes, nodes), bool)
    for seq, node in np.ndindex(seqs, nodes):
        parent = rng.integers(-1, node)
        if parent >= 0:
            mask[seq, node] = mask[seq, parent]
        mask[seq, node, node] = True
    return mask
