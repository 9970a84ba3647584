"""Apply every sequence's acceptance rule to one round: logits in, verdict out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.program import randomness, sampling, verify
from jaxspec.program.active import Active
from jaxspec.program.choose import forbid_early_stop, race
from jaxspec.program.plan import BLOCK
from jaxspec.program.propose import Proposal
from jaxspec.program.verify import Verdict


def accept(
    proposal: Proposal,
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
) -> Verdict:
    """Decide a round; greedy, coupled, standard and block sequences side by side.

    Args:
        logits: Target rows, sequence-major: row i of a sequence follows its i-th draft.
        num_draft: Drafts of each sequence that count.
    """
    seqs, draft = proposal.tokens.shape
    width = draft + 1
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    position = (active.num_tokens[:, None] + offset).reshape(-1)
    per_token = active.repeat(width)
    logits = forbid_early_stop(logits, position, per_token)
    choices = sampling.argmax(logits)

    def with_sampling() -> Verdict:
        probs = sampling.distribution(logits, per_token.controls)
        made = jax.lax.cond(
            active.is_coupled.any(),
            lambda: jnp.where(
                per_token.is_coupled, race(probs, position, per_token), choices
            ),
            lambda: choices,
        )
        chosen = verify.verify_choices(
            proposal.tokens, made.reshape(seqs, width), num_draft
        )
        target_probs = probs.reshape(seqs, width, -1)
        drawn = _reject(proposal, target_probs, num_draft, active)
        is_drawn = active.is_sampled & ~active.is_coupled
        return jax.tree.map(
            lambda left, right: jnp.where(is_drawn, left, right), drawn, chosen
        )

    def without_sampling() -> Verdict:
        return verify.verify_choices(
            proposal.tokens, choices.reshape(seqs, width), num_draft
        )

    return jax.lax.cond(active.is_sampled.any(), with_sampling, without_sampling)


def _reject(
    proposal: Proposal,
    target_probs: Float[Array, "seq width vocab"],
    num_draft: Int[Array, " seq"],
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
            num_draft,
            accept_uniform=accept_uniform,
            sample_uniform=sample_uniform,
        )

    is_block = active.rule == BLOCK
    standard = run(verify.verify_standard)
    return jax.lax.cond(
        (is_block & active.is_sampled).any(),
        lambda: jax.tree.map(
            lambda left, right: jnp.where(is_block, left, right),
            run(verify.verify_block),
            standard,
        ),
        lambda: standard,
    )
