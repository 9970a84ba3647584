"""Rejection sampling for CPUs: passes over rows in C++, the rules in plain jnp.

XLA:CPU would compile each pass into loops that read a row once per sum.
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
    Statistics,
    VocabShard,
)
from jaxspec_kernels.rejection_sampling.reference import Kernels

# Columns per tile of the passes that remain in plain jnp, over one row per sequence:
# most vocabularies fit in one tile.
TILE = 2**18


def statistics(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    temperature: Float[Array, " row"],
    tokens: Int[Array, " row"],
    is_sampled: Bool[Array, " row"] | None,
) -> Statistics:
    """See `passes.statistics`."""
    has_sums = False if is_sampled is None else is_sampled.any()
    is_summed = jnp.broadcast_to(has_sums, logits.shape[:1])
    results = [_row(logits, kind) for kind in (float, int, float, float)]
    call = jax.ffi.ffi_call("jaxspec_statistics", results)
    operands = logits, temperature, tokens.astype(jnp.int32), is_summed, _offset(shard)
    return Statistics(*call(*operands, **_settings(shard)))


def mass_above(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    limits: Float[Array, "row tries"],
    *,
    counts: bool,
) -> Float[Array, "row tries"]:
    """See `passes.mass_above`."""
    result = jax.ShapeDtypeStruct(limits.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_mass_above", result)
    operands = logits, *_distribution(distribution), limits, _offset(shard)
    return call(*operands, counts=counts, **_settings(shard))


def gumbel_argmax(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    words: UInt32[Array, "row 2"],
) -> tuple[Float[Array, " row"], Int[Array, " row"]]:
    """See `passes.gumbel_argmax`."""
    results = [_row(logits, kind) for kind in (float, int)]
    call = jax.ffi.ffi_call("jaxspec_gumbel_argmax", results)
    score, best = call(
        logits, *_distribution(distribution), words, _offset(shard), **_settings(shard)
    )
    return score, best


def residual_mass(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    joint: Float[Array, "seq inner"],
) -> Float[Array, "seq inner"]:
    """See `passes.residual_mass`."""
    if draft.probs is None:
        return passes.residual_mass(shard, logits, distribution, draft, joint)
    result = jax.ShapeDtypeStruct(joint.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_residual_mass", result)
    probs = draft.probs.astype(jnp.float32)
    return call(
        logits,
        *_distribution(distribution),
        distribution.total,
        probs,
        joint,
        _offset(shard),
        **_settings(shard),
    )


def probabilities(
    shard: VocabShard, logits: Float[Array, "row vocab"], distribution: Distribution
) -> Float[Array, "row vocab"]:
    """See `passes.probabilities`."""
    result = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    call = jax.ffi.ffi_call("jaxspec_probabilities", result)
    return call(
        logits,
        *_distribution(distribution),
        distribution.total,
        _offset(shard),
        **_settings(shard),
    )


def search(
    shard: VocabShard,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    wanted: Float[Array, " row"],
    *,
    is_searched: Bool[Array, " row"],
    counts: bool,
) -> tuple[Float[Array, " row"], Float[Array, " row"]]:
    """See `search.search`; one call, for a vocabulary that is not split."""
    results = [_row(logits, kind) for kind in (float, float)]
    call = jax.ffi.ffi_call("jaxspec_search", results)
    operands = (
        logits,
        *_distribution(distribution),
        distribution.total,
        wanted,
        is_searched,
    )
    threshold, mass = call(*operands, counts=counts, **_settings(shard))
    return threshold, mass


def draw(
    shard: VocabShard,
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
    """See `draw.draw`; for a vocabulary that is not split."""
    seqs = row.shape[0]
    tokens, probs = jnp.zeros(seqs, jnp.int32), jnp.zeros((seqs, 0, 0), jnp.float32)
    if draft.tokens.shape[1]:
        tokens = jnp.take_along_axis(draft.tokens, index[:, None], axis=1)[:, 0]
        if draft.probs is not None:
            probs = draft.probs.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((seqs,), jnp.int32)
    call = jax.ffi.ffi_call("jaxspec_draw", result)
    operands = (
        logits,
        *_distribution(distribution),
        distribution.total,
        tokens,
        probs,
        row,
        index,
    )
    return call(*operands, is_rejected, joint, uniform, **_settings(shard))


def rejection_sampling(*arguments: Any, tile: int = TILE, **settings: Any) -> Any:
    """See `jaxspec_kernels.rejection_sampling`."""
    native.require("rejection_sampling")
    tokens, probs, logits, *others = arguments
    arguments = tokens, probs, logits.astype(jnp.float32), *others
    kernels = Kernels(
        statistics,
        mass_above,
        gumbel_argmax,
        residual_mass,
        fan=16,
        probabilities=probabilities,
    )
    if settings["axis_name"] is None:
        kernels = kernels._replace(draw=draw, find=search)
    return reference.rejection_sampling(
        *arguments, tile=tile, kernels=kernels, **settings
    )


def _distribution(distribution: Distribution) -> tuple[Array, ...]:
    """Return the values that unnormalised weights depend on."""
    return distribution.temperature, distribution.maximum, distribution.threshold


def _row(logits: Array, kind: type) -> jax.ShapeDtypeStruct:
    """Return the shape and type of a result with one number per row."""
    dtype = {float: jnp.float32, int: jnp.int32}[kind]
    return jax.ShapeDtypeStruct(logits.shape[:1], dtype)


def _offset(shard: VocabShard) -> Int[Array, "1"]:
    return jnp.asarray(shard.offset, jnp.int32).reshape(1)


def _settings(shard: VocabShard) -> dict[str, np.int64]:
    return {"vocab_size": np.int64(shard.vocab_size)}
