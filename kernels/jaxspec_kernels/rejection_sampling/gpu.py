"""Rejection sampling for GPU: the passes over all rows in Triton, through Pallas.

Grid: (row, split). One program reads one tile of one row into registers and writes its
partial results, so that few rows fill the chip and a pass is one launch that reads the
logits once. XLA combines the splits of a row. Drawing from one row per sequence is
plain jnp: XLA compiles it to two kernels and writes that row once.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (sum and maximum in one pass).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec_kernels.rejection_sampling import passes, reference
from jaxspec_kernels.rejection_sampling.noise import exponential
from jaxspec_kernels.rejection_sampling.passes import (
    Distribution,
    Draft,
    Statistics,
    VocabShard,
)
from jaxspec_kernels.rejection_sampling.reference import Kernels

# Columns per tile: 16 logits per thread, in loads of 16 bytes. 6 rows of 256,000
# columns are 378 programs.
TILE, NUM_WARPS = 4096, 8


def _scalar(array: Any, *index: Any) -> Array:
    # The interpreter accepts no Python integers as indices.
    return plgpu.load(array.at[tuple(jnp.int32(i) for i in index)])


def _read(
    logits: Any, row: Array, offset: Any, *, tile: int, vocab_size: int
) -> tuple[Array, Array, Array]:
    """Return this split of a row, its ids, and which are tokens (and not NaN)."""
    column = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    is_held = column < logits.shape[1]  # the last tile may exceed the slice
    values = plgpu.load(logits.at[row, column], mask=is_held, other=-jnp.inf)
    values = values.astype(jnp.float32)
    ids = _scalar(offset, 0) + column
    # A NaN is not equal to itself.
    is_token = is_held & (ids < vocab_size) & (values == values)
    values = jnp.where(is_token, jnp.minimum(values, passes.LARGEST), -jnp.inf)
    return values, ids, is_token


def _to_weights(values: Array, distribution: Any, row: Array) -> Array:
    """See `passes.to_weights`; `distribution` is f32[row, 3]."""
    temperature, maximum, threshold = (_scalar(distribution, row, i) for i in range(3))
    weights = jnp.exp((values - passes.safe_max(maximum)) / temperature)
    return jnp.where(values >= threshold, weights, 0.0)


def _statistics(*refs: Any, **shape: int):
    (
        # In
        logits,  # [row, vocab]
        offset,  # i32[1]
        temperature,  # f32[row]
        tokens,  # i32[row]
        # Out
        maximum,  # f32[row, split]
        best,  # i32[row, split]
        total,  # f32[row, split]
        draft_logit,  # f32[row, split]
    ) = refs
    place = row, _ = pl.program_id(0), pl.program_id(1)
    values, ids, is_token = _read(logits, row, offset, **shape)
    top = values.max()
    at = jnp.where((values == top) & is_token, ids, passes.NO_ID).min()
    row_temperature, token = _scalar(temperature, row), _scalar(tokens, row)
    plgpu.store(maximum.at[place], top)
    plgpu.store(best.at[place], at)
    weights = jnp.exp((values - passes.safe_max(top)) / row_temperature)
    plgpu.store(total.at[place], weights.sum())
    plgpu.store(draft_logit.at[place], jnp.where(ids == token, values, -jnp.inf).max())


def _mass_above(*refs: Any, counts: bool, **shape: int):
    (
        # In
        logits,  # [row, vocab]
        offset,  # i32[1]
        distribution,  # f32[row, 3]
        limits,  # f32[row, try]
        # Out
        mass_above,  # f32[try, row, split]
    ) = refs
    row, split = pl.program_id(0), pl.program_id(1)
    values, _, is_token = _read(logits, row, offset, **shape)
    weights = (
        is_token.astype(jnp.float32)
        if counts
        else _to_weights(values, distribution, row)
    )
    for number in range(limits.shape[1]):
        is_above = values >= _scalar(limits, row, number)
        mass = jnp.where(is_above, weights, 0.0).sum()
        plgpu.store(mass_above.at[jnp.int32(number), row, split], mass)


def _gumbel_argmax(*refs: Any, **shape: int):
    (
        # In
        logits,  # [row, vocab]
        offset,  # i32[1]
        distribution,  # f32[row, 3]
        words,  # u32[row, 2]
        # Out
        score,  # f32[row, split]
        best,  # i32[row, split]
    ) = refs
    place = row, _ = pl.program_id(0), pl.program_id(1)
    values, ids, is_token = _read(logits, row, offset, **shape)
    first, second = (_scalar(words, row, i) for i in range(2))
    scores = _to_weights(values, distribution, row) / exponential(first, second, ids)
    top = scores.max()
    at = jnp.where((scores == top) & is_token, ids, passes.NO_ID).min()
    plgpu.store(score.at[place], top)
    plgpu.store(best.at[place], at)


def _residual_mass(*refs: Any, **shape: int):
    (
        # In
        logits,  # [row, vocab]
        offset,  # i32[1]
        distribution,  # f32[row, 3]
        total,  # f32[row]
        joint,  # f32[seq, inner]
        proposal,  # [seq, draft, vocab], or i32[seq, draft] for point masses
        # Out
        mass,  # f32[pair, split]
    ) = refs
    pair, split = pl.program_id(0), pl.program_id(1)
    inner = joint.shape[1]
    # Rows 1 to `inner` of a sequence: row `index` verifies draft `index`.
    seq, index = pair // inner, pair % inner + 1
    row = seq * (inner + 2) + index
    values, ids, _ = _read(logits, row, offset, **shape)
    if len(proposal.shape) == 2:
        draft = (ids == _scalar(proposal, seq, index)).astype(jnp.float32)
    else:
        column = ids - _scalar(offset, 0)
        is_held = column < logits.shape[1]
        at = seq, index, column
        draft = plgpu.load(proposal.at[at], mask=is_held, other=0.0)
        draft = draft.astype(jnp.float32)
    target = passes.normalise(
        _to_weights(values, distribution, row), _scalar(total, row)
    )
    above = _scalar(joint, seq, index - 1) * target - draft
    plgpu.store(mass.at[pair, split], jnp.maximum(above, 0.0).sum())


def _launch(
    kernel: Callable,
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    *others: Array,
    results: Sequence[DTypeLike],
    before: tuple[int, ...] = (),
    rows: int | None = None,
    tile: int = TILE,
    interpret: bool = False,
) -> Sequence[Array]:
    """Run a kernel on every tile of every row; returns arrays [*before, row, split]."""
    grid = rows or logits.shape[0], pl.cdiv(logits.shape[1], tile)
    return pl.pallas_call(
        functools.partial(kernel, tile=tile, vocab_size=shard.vocab_size),
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct((*before, *grid), dtype) for dtype in results],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=f"rejection_sampling{kernel.__name__}",
    )(logits, jnp.asarray(shard.offset, jnp.int32).reshape(1), *others)


def statistics(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
    is_sampled: Bool[Array, " row"] | None = None,
    *,
    tile: int = TILE,
    interpret: bool = False,
) -> Statistics:
    """See `passes.statistics`; sums of all rows are computed."""
    del is_sampled
    floats = jnp.float32
    results = floats, jnp.int32, floats, floats
    maximum, best, total, draft_logit = _launch(
        _statistics,
        shard,
        logits,
        temperature,
        tokens,
        results=results,
        tile=tile,
        interpret=interpret,
    )
    top, at = passes.lowest(maximum, best)
    at = jnp.where(at == passes.NO_ID, shard.offset, at)
    distribution = Distribution(temperature, top, jnp.full_like(top, -jnp.inf), top)
    total = (total * passes.to_weights(maximum, distribution)).sum(axis=1)
    return Statistics(top, at, total, draft_logit.max(axis=1))


def mass_above(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    limits: Float[Array, "row tries"],
    *,
    counts: bool,
    **launch: Any,
) -> Float[Array, "row tries"]:
    """See `passes.mass_above`."""
    kernel = functools.partial(_mass_above, counts=counts)
    kernel.__name__ = _mass_above.__name__  # pyright: ignore[reportAttributeAccessIssue]
    [split_masses] = _launch(
        kernel,
        shard,
        logits,
        jnp.stack(distribution[:3], axis=1),
        limits,
        results=[jnp.float32],
        before=limits.shape[1:],
        **launch,
    )
    return split_masses.sum(axis=2).T


def gumbel_argmax(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    words: UInt32[Array, "row 2"],
    **launch: Any,
) -> tuple[Float[Array, " row"], Int[Array, " row"]]:
    """See `passes.gumbel_argmax`."""
    shared = jnp.stack(distribution[:3], axis=1)
    results = jnp.float32, jnp.int32
    split_results = _launch(
        _gumbel_argmax, shard, logits, shared, words, results=results, **launch
    )
    score, best = passes.lowest(*split_results)
    return score, jnp.where(score > 0, best, shard.offset)


def residual_mass(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    joint: Float[Array, "seq inner"],
    **launch: Any,
) -> Float[Array, "seq inner"]:
    """See `passes.residual_mass`."""
    [split_masses] = _launch(
        _residual_mass,
        shard,
        logits,
        jnp.stack(distribution[:3], axis=1),
        distribution.total,
        joint,
        draft.tokens if draft.probs is None else draft.probs,
        results=[jnp.float32],
        rows=joint.size,
        **launch,
    )
    return split_masses.sum(axis=1).reshape(joint.shape)


def rejection_sampling(
    *arguments: Any, tile: int = TILE, interpret: bool = False, **settings: Any
) -> Any:
    """See `jaxspec_kernels.rejection_sampling`; `tile` is a power of two.

    Under `shard_map`, with `check_vma=False`.
    """
    launch: dict[str, Any] = dict(tile=tile, interpret=interpret)
    kernels = Kernels(
        functools.partial(statistics, **launch),
        functools.partial(mass_above, **launch),
        functools.partial(gumbel_argmax, **launch),
        functools.partial(residual_mass, **launch),
        fan=16,
    )
    return reference.rejection_sampling(
        *arguments,
        tile=arguments[2].shape[2],
        kernels=kernels,
        **settings,
    )
