"""Rejection sampling in plain jnp: the specification, and what runs on CPU without C++.

Passes over the logits: one for statistics, a few per filter (`search`), one more for
top-k and for min-p, one if a sequence is coupled, one if a sequence follows the block
rule; then one over a single row of each sequence to draw. A pass that no sequence needs
is not run. An implementation may bring its own `Kernels` for the passes over all rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec_kernels.rejection_sampling import passes
from jaxspec_kernels.rejection_sampling.draw import draw
from jaxspec_kernels.rejection_sampling.passes import (
    Distribution,
    Draft,
    Statistics,
    VocabShard,
)
from jaxspec_kernels.rejection_sampling.search import search

STANDARD, BLOCK, COUPLED = 0, 1, 2


class SamplingValues(NamedTuple):
    """Sampling values per sequence; temperature 0 is greedy."""

    temperature: Float[Array, " seq"]
    top_k: Int[Array, " seq"]  # 0 keeps everything
    top_p: Float[Array, " seq"]
    min_p: Float[Array, " seq"]


class Verdict(NamedTuple):
    """Outcome of one round, per sequence."""

    num_accepted: Int[Array, " seq"]
    next_token: Int[Array, " seq"]


class Kernels(NamedTuple):
    """Passes over one device's slice, which an implementation may replace.

    Attributes:
        fan: Number of parts into which one pass of the search divides its range. On a
            CPU, each part costs a sum.
        find: Replaces `search`, without its last two arguments.
    """

    statistics: Callable[..., Statistics] = passes.statistics
    mass_above: Callable[..., Float[Array, "row tries"]] = passes.mass_above
    gumbel_argmax: Callable[..., tuple[Float[Array, " row"], Int[Array, " row"]]] = (
        passes.gumbel_argmax
    )
    residual_mass: Callable[..., Float[Array, "seq inner"]] = passes.residual_mass
    fan: int = 8
    probabilities: Callable[..., Float[Array, "row vocab"]] = passes.probabilities
    draw: Callable[..., Int[Array, " seq"]] = draw
    find: Callable[..., tuple[Float[Array, " row"], Float[Array, " row"]]] | None = None

    @property
    def search(
        self,
    ) -> Callable[..., tuple[Float[Array, " row"], Float[Array, " row"]]]:
        """Finds the cutoffs of top-k and top-p."""
        return self.find or partial(search, mass_above=self.mass_above, fan=self.fan)


def rejection_sampling(
    draft_tokens: Int[Array, "seq draft"],
    draft_probs: Float[Array, "seq draft vocab"] | None,
    target_logits: Float[Array, "seq draft+1 vocab"],
    num_valid_drafts: Int[Array, " seq"],
    sampling_values: SamplingValues | None,
    *,
    rule: Int[Array, " seq"] | None,
    accept_uniform: Float[Array, "seq draft"] | None,
    sample_uniform: Float[Array, " seq"] | None,
    noise_words: UInt32[Array, "seq draft+1 2"] | None,
    num_forced: Int[Array, " seq"] | None = None,
    has_probs: bool = False,
    vocab_size: int,
    axis_name: str | tuple[str, ...] | None,
    tile: int = passes.TILE,
    kernels: Kernels = Kernels(),  # noqa: B008 immutable
) -> Any:
    """See `jaxspec_kernels.rejection_sampling`.

    Args:
        has_probs: Without drafts: also return the distributions that tokens were drawn
            from, this device's slice of them, zeros if no sequence samples.
        kernels: Passes over one device's slice.

    Returns:
        The verdict; with `has_probs`, it and the probabilities.
    """
    assert not (has_probs and draft_tokens.shape[1]), "probabilities of which row?"
    seqs, width, columns = target_logits.shape
    shard = VocabShard(
        columns=columns,
        tile=min(tile, columns),
        vocab_size=vocab_size,
        axis_name=axis_name,
    )
    logits = target_logits.reshape(seqs * width, columns)
    # The last row of a sequence verifies no draft, so its token is ignored.
    tokens = jnp.pad(draft_tokens, ((0, 0), (0, 1))).reshape(-1)
    if sampling_values is None:
        temperature = jnp.ones(seqs * width, jnp.float32)
        local = kernels.statistics(shard, logits, temperature, tokens, None)
        statistics = passes.combine(shard, local, temperature)
        choices = statistics.best.reshape(seqs, width)
        return _verify_exact(draft_tokens, choices, num_valid_drafts, num_forced)
    assert rule is not None, "sampled sequences have a rule"
    assert accept_uniform is not None, "sampled sequences need uniforms"
    assert sample_uniform is not None, "sampled sequences need uniforms"
    row_values = SamplingValues(
        *(jnp.repeat(values, width) for values in sampling_values)
    )
    is_sampled = sampling_values.temperature > 0
    is_sampled_row = row_values.temperature > 0
    temperature = jnp.where(is_sampled_row, row_values.temperature, 1.0)
    local = kernels.statistics(shard, logits, temperature, tokens, is_sampled_row)
    statistics = passes.combine(shard, local, temperature)
    best = statistics.best.reshape(seqs, width)

    def with_sampling() -> tuple[Verdict, Array | None]:
        no_threshold = jnp.full_like(statistics.maximum, -jnp.inf)
        distribution = _filter(
            shard,
            kernels,
            logits,
            Distribution(
                temperature, statistics.maximum, no_threshold, statistics.total
            ),
            row_values,
            is_sampled=is_sampled_row,
        )
        is_coupled = jnp.zeros_like(is_sampled)
        choices = best
        if noise_words is not None:
            is_coupled = is_sampled & (rule == COUPLED)
            gumbel_choices = _gumbel_argmax(
                shard,
                kernels,
                logits,
                distribution,
                noise_words=noise_words,
                is_coupled=is_coupled,
            )
            choices = jnp.where(is_coupled[:, None], gumbel_choices, best)
        weights = passes.to_weights(statistics.draft_logit[:, None], distribution)[:, 0]
        probs = passes.normalise(weights, distribution.total)
        chosen = _verify_exact(draft_tokens, choices, num_valid_drafts, num_forced)
        is_drawn = is_sampled & ~is_coupled

        def sampled_verdict() -> Verdict:
            return _verify_sampled(
                shard,
                kernels,
                logits,
                distribution,
                Draft(draft_tokens, draft_probs),
                target_token_probs=probs.reshape(seqs, width)[:, :-1],
                num_valid_drafts=num_valid_drafts,
                is_block=is_sampled & (rule == BLOCK),
                accept_uniform=accept_uniform,
                sample_uniform=sample_uniform,
                num_forced=num_forced,
            )

        drawn = jax.lax.cond(is_drawn.any(), sampled_verdict, lambda: chosen)
        verdict = jax.tree.map(
            lambda left, right: jnp.where(is_drawn, left, right), drawn, chosen
        )
        return verdict, kernels.probabilities(
            shard, logits, distribution
        ) if has_probs else None

    def without_sampling() -> tuple[Verdict, Array | None]:
        verdict = _verify_exact(draft_tokens, best, num_valid_drafts, num_forced)
        return verdict, jnp.zeros(logits.shape, jnp.float32) if has_probs else None

    decided = jax.lax.cond(is_sampled.any(), with_sampling, without_sampling)
    return decided if has_probs else decided[0]


def _gumbel_argmax(
    shard: VocabShard,
    kernels: Kernels,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    *,
    noise_words: UInt32[Array, "seq width 2"],
    is_coupled: Bool[Array, " seq"],
) -> Int[Array, "seq width"]:
    """Return the coupled choice of every row; zeros if no sequence is coupled."""
    words = noise_words.reshape(-1, 2)

    def gumbel_choices() -> Array:
        score, best = kernels.gumbel_argmax(shard, logits, distribution, words)
        return shard.pmin(jnp.where(score == shard.pmax(score), best, passes.NO_ID))

    choices = jax.lax.cond(
        is_coupled.any(), gumbel_choices, lambda: jnp.zeros(logits.shape[0], jnp.int32)
    )
    return choices.reshape(noise_words.shape[:2])


def _filter(
    shard: VocabShard,
    kernels: Kernels,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    sampling_values: SamplingValues,
    *,
    is_sampled: Bool[Array, " row"],
) -> Distribution:
    """Raise the thresholds to the cutoffs of top-k, top-p and min-p, in that order."""
    by_k = (
        is_sampled
        & (sampling_values.top_k > 0)
        & (sampling_values.top_k < shard.vocab_size)
    )
    by_p = is_sampled & (sampling_values.top_p < 1)
    by_min = is_sampled & (sampling_values.min_p > 0)

    def total(distribution: Distribution) -> Float[Array, " row"]:
        limits = distribution.threshold[:, None]
        masses = kernels.mass_above(shard, logits, distribution, limits, counts=False)
        return shard.psum(masses)[:, 0]

    def narrowed(
        distribution: Distribution, threshold: Array, is_filtered: Array
    ) -> Distribution:
        distribution = distribution._replace(
            threshold=jnp.maximum(distribution.threshold, threshold)
        )
        # Rows without this filter keep their sum, which must not depend on other rows.
        mass = jax.lax.cond(
            is_filtered.any(),
            lambda: total(distribution),
            lambda: distribution.total,
        )
        return distribution._replace(
            total=jnp.where(is_filtered, mass, distribution.total)
        )

    find = partial(kernels.search, shard, logits)
    wanted = sampling_values.top_k.astype(jnp.float32)
    threshold, _ = find(distribution, wanted, is_searched=by_k, counts=True)
    distribution = narrowed(distribution, threshold, by_k)
    wanted = sampling_values.top_p * distribution.total
    threshold, mass = find(distribution, wanted, is_searched=by_p, counts=False)
    distribution = distribution._replace(
        threshold=jnp.maximum(distribution.threshold, threshold),
        total=jnp.where(by_p, mass, distribution.total),
    )
    # log(1) is 0, so min_p = 1 keeps the maximum in spite of rounding.
    room = distribution.temperature * jnp.log(
        jnp.where(by_min, sampling_values.min_p, 1.0)
    )
    above = jnp.minimum(distribution.maximum + room, distribution.maximum)
    return narrowed(distribution, jnp.where(by_min, above, -jnp.inf), by_min)


def _verify_exact(
    draft_tokens: Int[Array, "seq draft"],
    choices: Int[Array, "seq draft+1"],
    num_valid_drafts: Int[Array, " seq"],
    num_forced: Int[Array, " seq"] | None,
) -> Verdict:
    """Accept drafts while they equal the target's own choices."""
    num_accepted = _prefix_length(draft_tokens == choices[:, :-1], num_valid_drafts)
    if num_forced is not None:
        num_accepted = num_forced
    return Verdict(num_accepted, _pick(choices, num_accepted))


def _verify_sampled(
    shard: VocabShard,
    kernels: Kernels,
    logits: Float[Array, "row vocab"],
    distribution: Distribution,
    draft: Draft,
    *,
    target_token_probs: Float[Array, "seq draft"],
    num_valid_drafts: Int[Array, " seq"],
    is_block: Bool[Array, " seq"],
    accept_uniform: Float[Array, "seq draft"],
    sample_uniform: Float[Array, " seq"],
    num_forced: Int[Array, " seq"] | None,
) -> Verdict:
    """Accept by the standard or the block rule, then draw from one row.

    References: Leviathan et al. 2023, arXiv:2211.17192, Alg. 1. Sun et al. 2024,
        arXiv:2403.10444, Alg. 2.
    """
    seqs, width = draft.tokens.shape[0], draft.tokens.shape[1] + 1
    draft_token_probs = draft.token_probs(shard)
    is_accepted = accept_uniform * draft_token_probs < target_token_probs
    num_accepted = _prefix_length(is_accepted, num_valid_drafts)
    joint = jnp.ones((seqs, width), jnp.float32)
    if width > 1:

        def by_block() -> tuple[Array, Array]:
            joint = _joint(draft_token_probs, target_token_probs)
            inner = joint[:, 1:-1]
            masses = inner
            if inner.shape[1]:
                masses = shard.psum(
                    kernels.residual_mass(shard, logits, distribution, draft, inner)
                )
            return _longest(accept_uniform, num_valid_drafts, joint, masses), joint

        by_rule = jax.lax.cond(is_block.any(), by_block, lambda: (num_accepted, joint))
        num_accepted = jnp.where(is_block, by_rule[0], num_accepted)
        joint = jnp.where(is_block[:, None], by_rule[1], joint)
    if num_forced is not None:
        # Continue as if no more drafts had been proposed: the next token is sampled
        # from the target.
        num_accepted = num_valid_drafts = num_forced
    token = kernels.draw(
        shard,
        logits,
        distribution,
        draft,
        row=jnp.arange(seqs, dtype=jnp.int32) * width + num_accepted,
        index=jnp.minimum(num_accepted, max(width - 2, 0)),
        is_rejected=num_accepted < num_valid_drafts,
        joint=_pick(joint, num_accepted),
        uniform=sample_uniform,
    )
    return Verdict(num_accepted, token)


def _joint(
    draft_token_probs: Float[Array, "seq draft"],
    target_token_probs: Float[Array, "seq draft"],
) -> Float[Array, "seq draft+1"]:
    """Return p_i = min(1, p_(i-1) * target / draft) for each prefix; p_0 = 1."""
    # Tokens past num_valid_drafts are arbitrary, so their draft probability may be 0.
    is_possible = draft_token_probs > 0
    ratio = target_token_probs / jnp.where(is_possible, draft_token_probs, 1.0)
    joint = [jnp.ones_like(ratio[:, 0])]
    for column in ratio.T:
        joint.append(jnp.minimum(1.0, joint[-1] * column))
    return jnp.stack(joint, axis=1)


def _longest(
    uniform: Float[Array, "seq draft"],
    num_valid_drafts: Int[Array, " seq"],
    joint: Float[Array, "seq draft+1"],
    residual_mass: Float[Array, "seq draft-1"],
) -> Int[Array, " seq"]:
    """Return the length of the longest prefix of drafts that the block rule accepts."""
    prefix_joint = joint[:, 1:]
    room = residual_mass + 1.0 - prefix_joint[:, :-1]
    inner = jnp.where(room > 0, residual_mass / jnp.where(room > 0, room, 1.0), 1.0)
    inner = jnp.concatenate([inner, prefix_joint[:, -1:]], axis=1)
    length = jnp.arange(1, prefix_joint.shape[1] + 1, dtype=jnp.int32)[None]
    acceptance = jnp.where(length == num_valid_drafts[:, None], prefix_joint, inner)
    is_passed = (uniform < acceptance) & (length <= num_valid_drafts[:, None])
    return jnp.where(is_passed, length, 0).max(axis=1)


def _prefix_length(
    is_accepted: Bool[Array, "seq draft"], num_valid_drafts: Int[Array, " seq"]
) -> Int[Array, " seq"]:
    index = jnp.arange(is_accepted.shape[1], dtype=jnp.int32)[None]
    is_accepted &= index < num_valid_drafts[:, None]
    # in [1,1,0,1] -> [1,1,0,0] -> 2
    return jnp.cumprod(is_accepted.astype(jnp.int32), axis=1).sum(axis=1)


def _pick(values: Array, index: Int[Array, " seq"]) -> Array:
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
