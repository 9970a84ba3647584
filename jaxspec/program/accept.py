"""Apply every sequence's acceptance rule to one round: logits in, verdict out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.active import Active
from jaxspec.program.choose import forbid_early_stop
from jaxspec.program.propose import Proposal
from jaxspec_kernels.rejection_sampling import Controls, Verdict, rejection_sampling


class _Numbers(NamedTuple):
    """The random numbers of a round; None in a program without sampling."""

    accept_uniform: Float[Array, "seq draft"] | None = None
    sample_uniform: Float[Array, " seq"] | None = None
    noise_words: UInt32[Array, "seq width 2"] | None = None
    num_forced: Int[Array, " seq"] | None = None


def accept(
    proposal: Proposal,
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    forced_acceptance: Float[Array, " chance"] | None = None,
) -> Verdict:
    """Decide a round; greedy, coupled, standard and block sequences side by side.

    Args:
        logits: Target rows, sequence-major: row i of a sequence follows its i-th draft.
        num_draft: Drafts of each sequence that count.
        forced_acceptance: As for `force`, at least one per draft; None forces nothing.
    """
    seqs, draft = proposal.tokens.shape
    width = draft + 1
    vocab_size = logits.shape[1]
    axes = backend.vocab_axes(vocab_size)
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    position = active.num_tokens[:, None] + offset

    def decide(logits: Array, probs: Array | None, whole: tuple) -> Verdict:
        tokens, num_draft, active, position, numbers = whole
        logits = forbid_early_stop(
            logits, position.reshape(-1), active.repeat(width), axes
        )
        return rejection_sampling(
            tokens,
            probs,
            logits.reshape(seqs, width, -1),
            num_draft,
            _controls(active),
            rule=active.rule,
            accept_uniform=numbers.accept_uniform,
            sample_uniform=numbers.sample_uniform,
            noise_words=numbers.noise_words,
            num_forced=numbers.num_forced,
            vocab_size=vocab_size,
            axis_name=axes,
            implementation=backend.implementation,
            device_kind=backend.device_kind,
        )

    whole = PartitionSpec()
    rows = PartitionSpec(None, axes)
    probs = PartitionSpec(None, None, axes)
    numbers = _draw_numbers(active, position)
    if forced_acceptance is not None:
        num_forced = force(forced_acceptance[:draft], num_draft, active)
        numbers = numbers._replace(num_forced=num_forced)
    return backend.split(decide, (rows, probs, whole), whole)(
        logits, proposal.probs, (proposal.tokens, num_draft, active, position, numbers)
    )


def force(
    chances: Float[Array, " draft"], num_draft: Int[Array, " seq"], active: Active
) -> Int[Array, " seq"]:
    """How many drafts of each sequence stay, whatever the models say.

    Draft i does with chance i, if those before it do. The numbers are those that the
    rules would compare with, by the request's seed and where the round starts.
    """
    shape = num_draft.shape[0], chances.shape[0]
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)
    seed = jnp.broadcast_to(active.seed[:, None], (*shape, 2))
    start = jnp.broadcast_to(active.num_tokens[:, None], shape)
    uniform = randomness.uniform(seed, start, randomness.ACCEPT, index)
    is_kept = (uniform < chances[None]) & (index < num_draft[:, None])
    return jnp.cumprod(is_kept.astype(jnp.int32), axis=1).sum(axis=1)


def _controls(active: Active) -> Controls | None:
    if active.is_greedy:
        return None
    temperature = jnp.where(active.is_sampled, active.temperature, 0.0)
    return Controls(temperature, active.top_k, active.top_p, active.min_p)


def _draw_numbers(active: Active, position: Int[Array, "seq width"]) -> _Numbers:
    """Numbers for the sequences that need some; a greedy batch pays for none.

    All words of a round come from one call, since each call is as much to compile.
    """
    if active.is_greedy:
        return _Numbers()
    seqs, width = position.shape
    index = jnp.arange(width, dtype=jnp.int32)[None]
    start = jnp.broadcast_to(active.num_tokens[:, None], (seqs, width))
    # At the round's start one uniform for each draft, and one for what follows them.
    purposes = randomness.ACCEPT + randomness.NUM_ROLES * index
    purposes = purposes.at[:, -1].set(randomness.SAMPLE)
    noise = jnp.full_like(index, randomness.SAMPLE)
    purposes = jnp.concatenate([purposes, noise], axis=1)
    purposes = jnp.broadcast_to(purposes, (seqs, 2 * width))
    place = jnp.concatenate([start, position], axis=1)
    seed = jnp.broadcast_to(active.seed[:, None], (*place.shape, 2))
    words = jax.lax.cond(
        active.is_sampled.any(),
        lambda: randomness.words(seed, place, purposes),
        lambda: jnp.zeros_like(seed),
    )
    uniform = randomness.to_uniform(words[:, :width])
    return _Numbers(uniform[:, :-1], uniform[:, -1], words[:, width:])
