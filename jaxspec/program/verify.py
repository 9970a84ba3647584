"""What the target's logits decide: which drafts stay, and which token follows.

Plain decoding is the verification of zero drafts.
"""

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
from jaxspec.program.sampling import controls_of, draw_numbers, forbid_early_stop
from jaxspec.program.tree import Tree
from jaxspec_kernels.rejection_sampling import Verdict, rejection_sampling


def verify(
    proposal: Proposal | None,
    logits: Float[Array, "token vocab"],
    num_draft: Int[Array, " seq"],
    active: Active,
    backend: Backend,
    *,
    tree: Tree,
    adjust: Adjust | None,
    forced_acceptance: Float[Array, " chance"] | None = None,
) -> Verdict:
    """Decide a round; greedy, coupled, standard and block sequences side by side.

    Args:
        proposal: None for no drafts.
        logits: The model's own, sequence-major: row i of a sequence follows its i-th
            draft.
        num_draft: Drafts of each sequence that count.
        tree: What drafts are to each other.
        adjust: What requests ask of single tokens; None where none asks anything.
        forced_acceptance: As for `force`, at least one per draft; None forces nothing.
    """
    vocab_size, seqs = logits.shape[1], num_draft.shape[0]
    axes = backend.vocab_axes(vocab_size)
    tokens, probs = jnp.zeros((seqs, 0), jnp.int32), None
    if proposal is not None:
        tokens, probs = proposal.tokens, proposal.probs
    assert tree.is_chain, "the rules judge a chain"
    draft, width = tree.num_nodes, tree.num_rows
    assert tokens.shape == (seqs, draft), (tokens.shape, tree)
    rows = logits.reshape(seqs, width, vocab_size)
    if adjust is not None:
        rows = adjust(rows, tokens)
    # At the round's start one uniform for each draft, and one for what follows them.
    purposes = jnp.arange(width, dtype=jnp.int32)[None] * randomness.NUM_ROLES
    purposes = (purposes + randomness.ACCEPT).at[:, -1].set(randomness.SAMPLE)
    numbers = draw_numbers(active, purposes, 0, width=width)
    num_forced = None
    if forced_acceptance is not None and draft:
        num_forced = force(forced_acceptance[:draft], num_draft, active)

    def decide_all(logits: Array, probs: Array | None, whole: tuple) -> Verdict:
        tokens, num_draft, active, controls, numbers, num_forced = whole
        offset = jnp.array([tree.depths], jnp.int32)
        position = (active.num_tokens[:, None] + offset).reshape(-1)
        count = len(num_draft)
        logits = forbid_early_stop(
            logits.reshape(count * width, -1), position, active.repeat(width), axes
        )
        logits = logits.reshape(count, width, -1)
        is_sampled = controls is not None
        return rejection_sampling(
            tokens,
            probs,
            logits,
            num_draft,
            controls,
            rule=active.rule,
            accept_uniform=numbers.uniform[:, :-1] if is_sampled else None,
            sample_uniform=numbers.uniform[:, -1] if is_sampled else None,
            noise_words=numbers.noise_words,
            num_forced=num_forced,
            vocab_size=vocab_size,
            axis_name=axes,
            implementation=backend.implementation,
            device_kind=backend.device_kind,
        )

    def decide(logits: Array, probs: Array | None, whole: tuple) -> Verdict:
        size = _group_size(logits.shape)
        if size == seqs:
            return decide_all(logits, probs, whole)
        groups = jax.tree.map(
            lambda part: part.reshape(seqs // size, size, *part.shape[1:]),
            (logits, whole),
        )
        # Rows as they were made, by draft: all of them in another order are a copy.
        laws = None
        if probs is not None:
            laws = probs.swapaxes(0, 1).reshape(-1, probs.shape[2])

        def decide_group(item: tuple[Array, tuple[Array, tuple]]) -> Verdict:
            start, (logits, whole) = item
            own = None
            if laws is not None:
                starts = (start + index * seqs for index in range(draft))
                own = jnp.stack(
                    [jax.lax.dynamic_slice_in_dim(laws, one, size) for one in starts],
                    axis=1,
                )
            return decide_all(logits, own, whole)

        starts = jnp.arange(0, seqs, size, dtype=jnp.int32)
        verdicts = jax.lax.map(decide_group, (starts, groups))
        return jax.tree.map(lambda part: part.reshape(seqs, *part.shape[2:]), verdicts)

    whole, columns = PartitionSpec(), PartitionSpec(None, None, axes)
    return backend.split(decide, (columns, columns, whole), whole)(
        rows,
        probs,
        (tokens, num_draft, active, controls_of(active), numbers, num_forced),
    )


def _group_size(shape: tuple[int, ...]) -> int:
    """How many sequences are decided at a time, of logits [seq, width, vocab].

    A power of two, as their number is, or all of them.
    """
    seqs, width, vocab = shape
    size = seqs
    while size > 1 and size % 2 == 0 and 4 * size * width * vocab > MAX_GROUP_BYTES:
        size //= 2
    return size


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


def force_one(chances: Float[Array, " draft"], active: Active) -> Bool[Array, " seq"]:
    """Whether a first draft of each sequence would stay, as `force` decides."""
    start = active.num_tokens
    return randomness.uniform(active.seed, start, randomness.ACCEPT) < chances[0]


def place_next(
    drafts: Int[Array, "seq draft"], verdict: Verdict
) -> Int[Array, "seq draft+1"]:
    """Accepted drafts, then the target's token."""
    seqs = drafts.shape[0]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    row = jnp.arange(seqs, dtype=jnp.int32)
    return padded.at[row, verdict.num_accepted].set(verdict.next_token)
