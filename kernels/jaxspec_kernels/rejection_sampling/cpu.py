"""Rejection sampling for CPUs: passes over rows in C++, the rules in plain jnp.

XLA:CPU makes a loop of each pass, and reads a row once for each of its sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec_kernels import native
from jaxspec_kernels.rejection_sampling import passes, reference
from jaxspec_kernels.rejection_sampling.passes import (
    Distribution,
    Draft,
    Slice,
    Statistics,
)
from jaxspec_kernels.rejection_sampling.reference import Kernels

# Columns of what is still made in plain jnp, of one row of each sequence: all of them,
# of most vocabularies.
TILE = 2**18


def statistics(
    part: Slice,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
    is_sampled: Bool[Array, " row"] | None,
) -> Statistics:
    """See `passes.statistics`."""
    has_sums = False if is_sampled is None else is_sampled.any()
    is_summed = jnp.broadcast_to(has_sums, logits.shape[:1])
    made = [_row(logits, kind) for kind in (float, int, float, float)]
    call = jax.ffi.ffi_call("jaxspec_statistics", made)
    given = logits, temperature, tokens.astype(jnp.int32), is_summed, _offset(part)
    return Statistics(*call(*given, **_settings(part)))


def amounts(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    limits: Float[Array, "row tries"],
    *,
    counts: bool,
) -> Float[Array, "row tries"]:
    """See `passes.amounts`."""
    made = jax.ShapeDtypeStruct(limits.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_amounts", made)
    given = logits, *_distribution(distribution), limits, _offset(part)
    return call(*given, counts=counts, **_settings(part))


def race(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    words: UInt32[Array, "row 2"],
) -> tuple[Float[Array, " row"], Int[Array, " row"]]:
    """See `passes.race`."""
    made = [_row(logits, kind) for kind in (float, int)]
    call = jax.ffi.ffi_call("jaxspec_race", made)
    score, best = call(
        logits, *_distribution(distribution), words, _offset(part), **_settings(part)
    )
    return score, best


def excess(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    joint: Float[Array, "seq inner"],
) -> Float[Array, "seq inner"]:
    """See `passes.excess`."""
    if draft.probs is None:
        return passes.excess(part, logits, distribution, draft, joint)
    made = jax.ShapeDtypeStruct(joint.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_excess", made)
    probs = draft.probs.astype(jnp.float32)
    return call(
        logits,
        *_distribution(distribution),
        distribution.total,
        probs,
        joint,
        _offset(part),
        **_settings(part),
    )


def probabilities(
    part: Slice, logits: Float[Array, "row vocab"], distribution: Distribution
) -> Float[Array, "row vocab"]:
    """See `passes.probabilities`."""
    made = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_probabilities", made)
    return call(
        logits,
        *_distribution(distribution),
        distribution.total,
        _offset(part),
        **_settings(part),
    )


def search(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    wanted: Float[Array, " row"],
    *,
    is_searched: Bool[Array, " row"],
    counts: bool,
) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
    """See `search.search`; of rows that this device has all of, and in one call."""
    made = [_row(logits, kind) for kind in (float, float)]
    call = jax.ffi.ffi_call("jaxspec_search", made)
    given = (
        logits,
        *_distribution(distribution),
        distribution.total,
        wanted,
        is_searched,
    )
    threshold, amount = call(*given, counts=counts, **_settings(part))
    return threshold, amount


def draw(
    part: Slice,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    *,
    row: Int[Array, " seq"],
    index: Int[Array, " seq"],
    is_rejected: Bool[Array, " seq"],
    joint: Float[Array, " seq"],
    uniform: Float[Array, " seq"],
) -> Int[Array, " seq"]:
    """See `draw.draw`; of rows that this device has all of."""
    seqs = row.shape[0]
    tokens, probs = jnp.zeros(seqs, jnp.int32), jnp.zeros((seqs, 0, 0), jnp.float32)
    if draft.tokens.shape[1]:
        tokens = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)[:, 0]
        if draft.probs is not None:
            probs = draft.probs.astype(jnp.float32)
    made = jax.ShapeDtypeStruct((seqs,), jnp.int32)
    call = jax.ffi.ffi_call("jaxspec_draw", made)
    given = (
        logits,
        *_distribution(distribution),
        distribution.total,
        tokens,
        probs,
        row,
        index,
    )
    return call(*given, is_rejected, joint, uniform, **_settings(part))


def rejection_sampling(*arguments: Any, tile: int = TILE, **settings: Any) -> Any:
    """See `jaxspec_kernels.rejection_sampling`."""
    native.require("rejection_sampling")
    tokens, probs, logits, *others = arguments
    arguments = tokens, probs, logits.astype(jnp.float32), *others
    kernels = Kernels(
        statistics, amounts, race, excess, fan=16, probabilities=probabilities
    )
    if settings["axis_name"] is None:
        kernels = kernels._replace(draw=draw, find=search)
    return reference.rejection_sampling(
        *arguments, tile=tile, kernels=kernels, **settings
    )


def _distribution(distribution: Distribution) -> tuple[Array, ...]:
    """What weights follow from."""
    return distribution.temperature, distribution.maximum, distribution.threshold


def _row(logits: Array, kind: type) -> jax.ShapeDtypeStruct:
    """What has a number for each row."""
    dtype = {float: jnp.float32, int: jnp.int32}[kind]
    return jax.ShapeDtypeStruct(logits.shape[:1], dtype)


def _offset(part: Slice) -> Int[Array, "1"]:
    return jnp.asarray(part.offset, jnp.int32).reshape(1)


def _settings(part: Slice) -> dict[str, np.int64]:
    return {"vocab_size": np.int64(part.vocab_size)}
