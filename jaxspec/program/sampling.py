"""Draft sampling, and the parts that it shares with verification.

The filters and the draw itself are in `jaxspec_kernels.rejection_sampling`, which also
verifies drafts: one sampler for plain decoding, drafting and verification.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.rows import Active
from jaxspec_kernels.rejection_sampling import SamplingValues, sample


class Numbers(NamedTuple):
    """Random numbers of consecutive positions; None in a program without sampling."""

    uniform: Float[Array, "seq purpose"] | None = None
    noise_words: UInt32[Array, "seq width 2"] | None = None


def sampling_values_of(active: Active) -> SamplingValues | None:
    """Sampling parameters of each sequence; None in a program without sampling."""
    if active.all_greedy:
        return None
    temperature = jnp.where(active.is_sampled, active.temperature, 0.0)
    return SamplingValues(temperature, active.top_k, active.top_p, active.min_p)


def draw_numbers(
    active: Active,
    purposes: Int[Array, "_ purpose"],
    first: Int[Array, ""] | int,
    *,
    width: int,
) -> Numbers:
    """Draw the random numbers of sampled sequences; a greedy batch skips it.

    All words come from one call, since each call adds to the compile time.

    Args:
        purposes: `randomness.purpose` of each uniform; its key also contains the
            round's start.
        first: Distance from the round's start to the first position of the noise.
        width: Number of positions.
    """
    if active.all_greedy:
        return Numbers()
    seqs, count = active.num_tokens.shape[0], purposes.shape[1]
    start = active.num_tokens[:, None]
    position = start + first + jnp.arange(width, dtype=jnp.int32)[None]
    place = jnp.concatenate([jnp.broadcast_to(start, (seqs, count)), position], axis=1)
    noise = jnp.full((1, width), randomness.SAMPLE, jnp.int32)
    purposes = jnp.concatenate([purposes, noise], axis=1)
    purposes = jnp.broadcast_to(purposes, place.shape)
    seed = jnp.broadcast_to(active.seed[:, None], (*place.shape, 2))
    words = jax.lax.cond(
        active.is_sampled.any(),
        lambda: randomness.words(seed, place, purposes),
        lambda: jnp.zeros_like(seed),
    )
    return Numbers(randomness.to_uniform(words[:, :count]), words[:, count:])


def forbid_early_stop(
    logits: Float[Array, "token vocab"],
    position: Int[Array, " token"],
    active: Active,
    axes: tuple[str, ...] | None = None,
    *,
    has_branch: bool = True,
) -> Float[Array, "token vocab"]:
    """Mask stop ids at positions below the request's `min_tokens`.

    Args:
        active: One entry per row of `logits`.
        axes: Mesh axes that split the vocabulary, inside `shard_map`.
        has_branch: Skip the write, and its copy of the logits, if no position is below.
            The result is the same.
    """
    is_early = active.is_active & (position < active.min_total)
    vocab = logits.shape[1]
    first = 0 if axes is None else jax.lax.axis_index(axes) * vocab

    def forbid() -> Array:
        column = active.stop_ids - first
        column = jnp.where(is_early[:, None] & (column >= 0), column, vocab)
        row = jnp.arange(logits.shape[0])[:, None]
        return logits.at[row, column].set(-jnp.inf, mode="drop")

    if not has_branch:
        return forbid()
    return jax.lax.cond(is_early.any(), forbid, lambda: logits)


def sample_draft(
    logits: Float[Array, "seq vocab"],
    index: Int[Array, ""] | int,
    active: Active,
    backend: Backend,
    *,
    drafts_argmax: bool = False,
) -> tuple[Int[Array, " seq"], Float[Array, "seq vocab"] | None]:
    """Sample draft `index` of each sequence from the draft model's logits.

    A coupled sequence uses the noise that the target will use at this position.

    Args:
        backend: Of the draft model, whose devices split the vocabulary.
        drafts_argmax: Take the argmax, even if the request samples.

    Returns:
        The tokens, and their distributions: zeros in a batch without sampled
        sequences, None with `drafts_argmax`.
    """
    vocab_size = logits.shape[1]
    axes = backend.vocab_axes(vocab_size)
    sampling_values = None if drafts_argmax else sampling_values_of(active)
    numbers = Numbers()
    if sampling_values is not None:
        purpose = randomness.purpose(randomness.DRAFT, jnp.asarray(index))
        numbers = draw_numbers(active, purpose.reshape(1, 1), index, width=1)

    def draw(logits: Array, whole: tuple) -> tuple[Array, Array | None]:
        active, position, sampling_values, numbers = whole
        return sample(
            forbid_early_stop(
                logits, position, active, axes, has_branch=not backend.branches_wait
            ),
            sampling_values,
            rule=active.rule,
            uniform=None if sampling_values is None else numbers.uniform[:, 0],
            noise_words=None if sampling_values is None else numbers.noise_words[:, 0],
            vocab_size=vocab_size,
            axis_name=axes,
            implementation=backend.implementation,
            device_kind=backend.device_kind,
        )

    whole, rows = PartitionSpec(), PartitionSpec(None, axes)
    position = active.num_tokens + index
    split = backend.split(draw, (rows, whole), (whole, rows))
    return split(logits, (active, position, sampling_values, numbers))
