"""An oracle of rejection sampling: the rules on whole arrays of probabilities.

Each rule is written in float32 as its paper states it, without the operation's passes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.program import randomness
from jaxspec.program.plan import BLOCK
from jaxspec.program.propose import Proposal
from jaxspec.program.rows import Active
from jaxspec_kernels.rejection_sampling import SamplingValues, Verdict
from tests.kernels import dense


def decide(
    proposal: Proposal,
    logits: Float[Array, "token vocab"],
    num_draft_tokens: Int[Array, " seq"],
    active: Active,
) -> Verdict:
    """Decide a round by the rules as the papers state them.

    Args:
        logits: Target rows, sequence-major. Row i of a sequence predicts the token in
            the place of draft i (from 0).
        num_draft_tokens: Valid drafts of each sequence.
    """
    seqs, draft = proposal.tokens.shape
    width = draft + 1
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    position = (active.num_tokens[:, None] + offset).reshape(-1)
    per_token = active.repeat(width)
    choices = dense.argmax(logits)

    def with_sampling() -> Verdict:
        probs = dense.distribution(
            logits,
            SamplingValues(
                per_token.temperature,
                per_token.top_k,
                per_token.top_p,
                per_token.min_p,
            ),
        )
        made = jax.lax.cond(
            active.is_coupled.any(),
            lambda: jnp.where(
                per_token.is_coupled,
                _gumbel_argmax(probs, position, per_token),
                choices,
            ),
            lambda: choices,
        )
        chosen = verify_choices(
            proposal.tokens, made.reshape(seqs, width), num_draft_tokens
        )
        target_probs = probs.reshape(seqs, width, -1)
        drawn = _verify_sampled(proposal, target_probs, num_draft_tokens, active)
        is_drawn = active.is_sampled & ~active.is_coupled
        return jax.tree.map(
            lambda left, right: jnp.where(is_drawn, left, right), drawn, chosen
        )

    def without_sampling() -> Verdict:
        return verify_choices(
            proposal.tokens, choices.reshape(seqs, width), num_draft_tokens
        )

    return jax.lax.cond(active.is_sampled.any(), with_sampling, without_sampling)


def _gumbel_argmax(probs: Array, position: Array, per_token: Active) -> Array:
    noise = dense.exponential(
        per_token.seed, position, randomness.SAMPLE, probs.shape[1]
    )
    return dense.gumbel_argmax(probs, noise)


def _verify_sampled(
    proposal: Proposal,
    target_probs: Float[Array, "seq width vocab"],
    num_draft_tokens: Int[Array, " seq"],
    active: Active,
) -> Verdict:
    """Standard and block verification with the sequences' own uniforms."""
    seqs, draft = proposal.tokens.shape
    index = jnp.broadcast_to(jnp.arange(draft, dtype=jnp.int32)[None], (seqs, draft))
    start = jnp.broadcast_to(active.num_tokens[:, None], (seqs, draft))
    seed = jnp.broadcast_to(active.seed[:, None], (seqs, draft, 2))
    accept_uniform = randomness.uniform(seed, start, randomness.ACCEPT, index)
    sample_uniform = randomness.uniform(
        active.seed, active.num_tokens, randomness.SAMPLE
    )

    def run(rule) -> Verdict:
        return rule(
            proposal.tokens,
            proposal.probs,
            target_probs,
            num_draft_tokens,
            accept_uniform=accept_uniform,
            sample_uniform=sample_uniform,
        )

    is_block = active.rule == BLOCK
    standard = run(verify_standard)
    return jax.lax.cond(
        (is_block & active.is_sampled).any(),
        lambda: jax.tree.map(
            lambda left, right: jnp.where(is_block, left, right),
            run(verify_block),
            standard,
        ),
        lambda: standard,
    )


def verify_choices(
    draft_tokens: Int[Array, "seq draft"],
    target_choices: Int[Array, "seq draft+1"],
    num_draft_tokens: Int[Array, " seq"],
) -> Verdict:
    """Accept drafts while they equal the target's own choices.

    This is the rule of greedy decoding (a choice is the argmax) and of coupled
    sampling (a choice is the target's own sample, with noise that the draft model
    shares): the text equals that of plain decoding, token for token.

    Args:
        num_draft_tokens: Valid drafts of each sequence.
    References: coupling: Daliri et al. 2024, arXiv:2408.07978.
    """
    is_equal = draft_tokens == target_choices[:, :-1]
    num_accepted = _prefix_length(is_equal, num_draft_tokens)
    return Verdict(num_accepted, _pick(target_choices, num_accepted))


def verify_standard(
    draft_tokens: Int[Array, "seq draft"],
    draft_probs: Float[Array, "seq draft vocab"],
    target_probs: Float[Array, "seq draft+1 vocab"],
    num_draft_tokens: Int[Array, " seq"],
    *,
    accept_uniform: Float[Array, "seq draft"],
    sample_uniform: Float[Array, " seq"],
) -> Verdict:
    """Accept a prefix of `draft_tokens`, then draw one token from the target.

    Token i is accepted when u * draft(i) < target(i), strictly: u can be 0, and a
    token that the target excludes must not pass. The first rejected position draws
    from max(target - draft, 0); if none is rejected the bonus token is drawn from the
    row after the last draft. Emitted tokens follow the target exactly.

    Args:
        draft_probs: Distributions that `draft_tokens` were drawn from, after all
            filters.
        num_draft_tokens: Valid drafts of each sequence.
    References: Leviathan et al. 2023, arXiv:2211.17192, Alg. 1.
        Chen et al. 2023, arXiv:2302.01318, Alg. 2.
    """
    draft_token_probs = _chosen(draft_probs, draft_tokens)
    target_token_probs = _chosen(target_probs[:, :-1], draft_tokens)
    is_accepted = accept_uniform * draft_token_probs < target_token_probs
    num_accepted = _prefix_length(is_accepted, num_draft_tokens)
    scale = jnp.ones_like(sample_uniform)
    residual = residual_weights(
        draft_probs, target_probs, num_draft_tokens, num_accepted, scale
    )
    return Verdict(num_accepted, dense.draw(residual, sample_uniform))


def verify_block(
    draft_tokens: Int[Array, "seq draft"],
    draft_probs: Float[Array, "seq draft vocab"],
    target_probs: Float[Array, "seq draft+1 vocab"],
    num_draft_tokens: Int[Array, " seq"],
    *,
    accept_uniform: Float[Array, "seq draft"],
    sample_uniform: Float[Array, " seq"],
) -> Verdict:
    """Accept the longest prefix that passes its own test, then draw one token.

    Block verification: a draft that would be rejected alone may be accepted with its
    successors; no rule accepts more on average. Emitted tokens follow the target
    exactly.

    Args:
        draft_probs: Distributions that `draft_tokens` were drawn from, after all
            filters.
        num_draft_tokens: Valid drafts of each sequence.
    References: Sun et al. 2024, arXiv:2403.10444, Alg. 2.
    """
    draft_token_probs = _chosen(draft_probs, draft_tokens)
    target_token_probs = _chosen(target_probs[:, :-1], draft_tokens)
    # Tokens past num_draft_tokens are arbitrary: their draft probability may be 0.
    is_possible = draft_token_probs > 0
    ratio = target_token_probs / jnp.where(is_possible, draft_token_probs, 1.0)
    num_tokens = draft_tokens.shape[1]
    joint = [jnp.ones_like(sample_uniform)]
    passes = []
    for index in range(num_tokens):
        joint.append(jnp.minimum(1.0, joint[-1] * ratio[:, index]))
        here = joint[-1]
        if index + 1 < num_tokens:
            # The row after draft `index` verifies draft `index + 1`.
            above = here[:, None] * target_probs[:, index + 1]
            mass = jnp.maximum(above - draft_probs[:, index + 1], 0.0).sum(axis=-1)
            room = mass + 1.0 - here
            inner = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
        else:
            inner = here
        acceptance = jnp.where(num_draft_tokens == index + 1, here, inner)
        passes.append(accept_uniform[:, index] < acceptance)
    is_passed = jnp.stack(passes, axis=1)
    index = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)[None]
    is_passed &= index <= num_draft_tokens[:, None]
    num_accepted = jnp.where(is_passed, index, 0).max(axis=1)
    scale = _pick(jnp.stack(joint, axis=1), num_accepted)
    residual = residual_weights(
        draft_probs, target_probs, num_draft_tokens, num_accepted, scale
    )
    return Verdict(num_accepted, dense.draw(residual, sample_uniform))


def residual_weights(
    draft_probs: Float[Array, "seq draft vocab"],
    target_probs: Float[Array, "seq draft+1 vocab"],
    num_draft_tokens: Int[Array, " seq"],
    num_accepted: Int[Array, " seq"],
    scale: Float[Array, " seq"],
) -> Float[Array, "seq vocab"]:
    """Weights of the token after the accepted prefix (they do not sum to 1).

    max(scale * target - draft, 0) after a rejection, else the target itself. If
    rounding makes the residual 0 (target equals draft, yet rejected), the target.
    """
    target = _pick_row(target_probs, num_accepted)
    last = draft_probs.shape[1] - 1
    draft = _pick_row(draft_probs, jnp.minimum(num_accepted, last))
    is_rejected = (num_accepted < num_draft_tokens)[:, None]
    residual = jnp.maximum(scale[:, None] * target - draft, 0.0)
    has_residual = residual.sum(axis=-1, keepdims=True) > 0
    return jnp.where(is_rejected & has_residual, residual, target)


def _prefix_length(
    is_accepted: Bool[Array, "seq draft"], num_draft_tokens: Int[Array, " seq"]
) -> Int[Array, " seq"]:
    index = jnp.arange(is_accepted.shape[1], dtype=jnp.int32)[None]
    is_accepted &= index < num_draft_tokens[:, None]
    # in [1,1,0,1] -> [1,1,0,0] -> 2
    return jnp.cumprod(is_accepted.astype(jnp.int32), axis=1).sum(axis=1)


def _chosen(
    probs: Float[Array, "seq draft vocab"], tokens: Int[Array, "seq draft"]
) -> Float[Array, "seq draft"]:
    return jnp.take_along_axis(probs, tokens[:, :, None], axis=2)[:, :, 0]


def _pick(values: Array, index: Int[Array, " seq"]) -> Array:
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _pick_row(
    values: Float[Array, "seq rows vocab"], index: Int[Array, " seq"]
) -> Float[Array, "seq vocab"]:
    return jnp.take_along_axis(values, index[:, None, None], axis=1)[:, 0]
