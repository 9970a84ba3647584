"""The verdict on drafts in a row: which are accepted, and which token follows.

Plain decoding is the verification of zero drafts.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.backend import Backend
from jaxspec.program import randomness
from jaxspec.program.controls import Adjust
from jaxspec.program.plan import MAX_GROUP_BYTES
from jaxspec.program.propose.proposal import Proposal
from jaxspec.program.rows import Active
from jaxspec.program.sampling import (
    Numbers,
    draw_numbers,
    forbid_early_stop,
    sampling_values_of,
)
from jaxspec.program.tree.tree import Tree
from jaxspec.sharding import num_parts
from jaxspec_kernels.rejection_sampling import (
    SamplingValues,
    Verdict,
    rejection_sampling,
)


class _Inputs(NamedTuple):
    """The inputs of a verdict besides logits and probabilities, per sequence."""

    tokens: Int[Array, "seq draft"]
    num_valid_drafts: Int[Array, " seq"]
    active: Active
    sampling_values: SamplingValues | None
    numbers: Numbers
    num_forced: Int[Array, " seq"] | None


def verify(
    proposal: Proposal | None,
    logits: Float[Array, "token vocab"],
    num_valid_drafts: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    tree: Tree,
    adjust: Adjust | None,
    forced_acceptance: Float[Array, " probability"] | None = None,
) -> Verdict:
    """Decide which drafts of the main chain are accepted; sample the token after them.

    Greedy, coupled, standard and block sequences may share a batch. For the side
    branches of a tree, see `follow_branches`.

    Args:
        proposal: None for no drafts.
        logits: The model's own, sequence-major, of all rows of the tree. In a chain,
            row i predicts the token in the place of draft i (from 0); the last row, the
            token after all drafts.
        num_valid_drafts: Valid levels of drafts of each sequence: deeper ones are
            padding.
        tree: Has a node for each draft.
        adjust: Applies the requests' controls to logits; None without controls, and for
            a tree with side branches.
        forced_acceptance: As for `force`, at least one per draft; None forces nothing,
            as for a tree with side branches.
    """
    vocab_size, seqs = logits.shape[1], num_valid_drafts.shape[0]
    tokens, probs = jnp.zeros((seqs, 0), jnp.int32), None
    if proposal is not None:
        tokens, probs = proposal.tokens, proposal.probs
    assert tokens.shape == (seqs, tree.num_nodes), (tokens.shape, tree)
    rows = logits.reshape(seqs, tree.num_rows, vocab_size)
    draft, width = tree.main_chain.num_nodes, tree.main_chain.num_rows
    if not tree.is_chain:
        assert adjust is None, "controls are computed for one path only"
        assert forced_acceptance is None, "forced acceptance needs a chain"
        tokens, rows = tokens[:, :draft], rows[:, :width]
        probs = None if probs is None else probs[:, :draft]
        num_valid_drafts = jnp.minimum(num_valid_drafts, draft)
    if adjust is not None:
        rows = adjust(rows, tokens)
    # One uniform for each draft and one for the token after them, keyed by the position
    # where the round starts.
    index = jnp.arange(width, dtype=jnp.int32)[None]
    purposes = randomness.purpose(randomness.ACCEPT, index)
    purposes = purposes.at[:, -1].set(randomness.SAMPLE)
    numbers = draw_numbers(active, purposes, 0, width=width)
    num_forced = None
    if forced_acceptance is not None and draft:
        num_forced = force(forced_acceptance[:draft], num_valid_drafts, active)

    axes, local_vocab = backend.vocab_axes(vocab_size), vocab_size
    if axes is not None:
        assert backend.mesh is not None
        local_vocab //= num_parts(backend.mesh, axes)
    run = functools.partial(verify_group, vocab_size=vocab_size, backend=backend)
    size = _group_size((seqs, width, local_vocab))
    if size < seqs:
        run = functools.partial(verify_groups, run, size)
    whole, columns = PartitionSpec(), PartitionSpec(None, None, axes)
    return backend.split(run, (columns, columns, whole), whole)(
        rows,
        probs,
        _Inputs(
            tokens,
            num_valid_drafts,
            active,
            sampling_values_of(active),
            numbers,
            num_forced,
        ),
    )


def verify_group(
    logits: Float[Array, "seq width vocab"],
    probs: Float[Array, "seq draft vocab"] | None,
    inputs: _Inputs,
    *,
    vocab_size: int,
    backend: Backend,
) -> Verdict:
    """Decide some sequences at once, on each device's part of the vocabulary.

    Args:
        probs: Distributions of the drafts; None if each draft is a point mass.
        vocab_size: Of the whole vocabulary.
    """
    count, width, _ = logits.shape
    active, uniform = inputs.active, inputs.numbers.uniform
    axes = backend.vocab_axes(vocab_size)
    offset = jnp.array([tuple(range(width))], jnp.int32)
    position = (active.num_tokens[:, None] + offset).reshape(-1)
    logits = forbid_early_stop(
        logits.reshape(count * width, -1),
        position,
        active.repeat(width),
        axes,
        has_branch=not backend.branches_wait,
    )
    logits = logits.reshape(count, width, -1)
    return rejection_sampling(
        inputs.tokens,
        probs,
        logits,
        inputs.num_valid_drafts,
        inputs.sampling_values,
        rule=active.rule,
        accept_uniform=None if uniform is None else uniform[:, :-1],
        sample_uniform=None if uniform is None else uniform[:, -1],
        noise_words=inputs.numbers.noise_words,
        num_forced=inputs.num_forced,
        vocab_size=vocab_size,
        axis_name=axes,
        implementation=backend.implementation,
        device_kind=backend.device_kind,
    )


def verify_groups(
    verify_one: Callable[..., Verdict],
    size: int,
    logits: Float[Array, "seq width vocab"],
    probs: Float[Array, "seq draft vocab"] | None,
    inputs: _Inputs,
) -> Verdict:
    """Decide the sequences of a batch group by group, which bounds the memory.

    Args:
        verify_one: `verify_group` of this batch.
        size: Number of sequences per group; it divides the number of all sequences.
    """
    seqs = logits.shape[0]
    groups = jax.tree.map(
        lambda part: part.reshape(seqs // size, size, *part.shape[1:]),
        (logits, inputs),
    )
    # The probabilities are draft-major, as they were made: reordering them would make a
    # copy.
    num_levels, rows = 0, None
    if probs is not None:
        num_levels = probs.shape[1]
        rows = probs.swapaxes(0, 1).reshape(-1, probs.shape[2])

    def verify_slice(item: tuple[Array, tuple[Array, _Inputs]]) -> Verdict:
        start, (logits, inputs) = item
        group_probs = None
        if rows is not None:
            starts = (start + index * seqs for index in range(num_levels))
            group_probs = jnp.stack(
                [jax.lax.dynamic_slice_in_dim(rows, first, size) for first in starts],
                axis=1,
            )
        return verify_one(logits, group_probs, inputs)

    starts = jnp.arange(0, seqs, size, dtype=jnp.int32)
    verdicts = jax.lax.map(verify_slice, (starts, groups))
    return jax.tree.map(lambda part: part.reshape(seqs, *part.shape[2:]), verdicts)


def _group_size(shape: tuple[int, ...]) -> int:
    """Return the sequences per group, for logits [seq, width, vocab] on one device.

    It is the number of all sequences, halved until their logits fit `MAX_GROUP_BYTES`.
    """
    seqs, width, vocab = shape
    size = seqs
    while size > 1 and size % 2 == 0 and 4 * size * width * vocab > MAX_GROUP_BYTES:
        size //= 2
    return size


def force(
    probabilities: Float[Array, " draft"],
    num_valid_drafts: Int[Array, " seq"],
    active: Active,
) -> Int[Array, " seq"]:
    """Return the number of drafts to accept, whatever the models compute.

    If the drafts before it are accepted, draft i is accepted with probability
    `probabilities[i]`. The uniforms are those of the rules, keyed by the request's seed
    and where the round starts.
    """
    shape = num_valid_drafts.shape[0], probabilities.shape[0]
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)
    seed = jnp.broadcast_to(active.seed[:, None], (*shape, 2))
    start = jnp.broadcast_to(active.num_tokens[:, None], shape)
    uniform = randomness.uniform(seed, start, randomness.ACCEPT, index)
    is_accepted = (uniform < probabilities[None]) & (index < num_valid_drafts[:, None])
    return jnp.cumprod(is_accepted.astype(jnp.int32), axis=1).sum(axis=1)


def force_one(
    probabilities: Float[Array, " draft"], active: Active
) -> Bool[Array, " seq"]:
    """Return whether `force` would accept a first draft of each sequence."""
    start = active.num_tokens
    return randomness.uniform(active.seed, start, randomness.ACCEPT) < probabilities[0]
