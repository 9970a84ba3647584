"""Apply penalties, logit bias and token masks to logits.

The order is penalties, bias, masks; temperature and filters follow. Penalties and bad
words depend on the tokens before a position, and drafts before it count as tokens: row
i of a round uses the known tokens and drafts 1 to i, as plain decoding would.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.models.backend import Backend
from jaxspec.program import history
from jaxspec.program.plan import MAX_BAD_WORD_LEN, NO_TOKEN
from jaxspec.program.rows import Active, ControlRows

# (logits [seq, width, vocab], drafts [seq, draft]) -> logits; see `adjust`.
Adjust = Callable[..., Float[Array, "seq width vocab"]]

# Number of preceding tokens that decide whether a bad word's last token is allowed.
_TAIL = MAX_BAD_WORD_LEN - 1


class Spread(NamedTuple):
    """Values for each token of the vocabulary; split over devices as the logits are."""

    counts: Int[Array, "seq vocab"]  # occurrences in the output
    is_seen: Bool[Array, "seq vocab"]  # in prompt or output
    bias: Float[Array, "seq vocab"]  # -inf forbids


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Effects:
    """The controls of a launch's sequences, apart from their drafts.

    Sequences without controls have neutral values.
    """

    spread: Spread
    penalties: Float[Array, "seq 3"]
    bad_words: Int[Array, "seq bad_word token"]
    tail: Int[Array, "seq tail"]  # the output's last tokens, right-aligned
    stop_ids: Int[Array, "seq stop"]
    num_early: Int[Array, " seq"]  # next tokens that must not be stop ids


def unpack_bits(
    words: UInt32[Array, "*batch word"], first: Int[Array, ""] | int, size: int
) -> Bool[Array, "*batch vocab"]:
    """Unpack bits `first` to `first + size`; each word holds 32, the lowest first."""
    shift = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * words.ndim + (32,))
    bits = (words[..., None] >> shift) & 1
    bits = bits.reshape(*words.shape[:-1], -1)
    return jax.lax.dynamic_slice_in_dim(bits, first, size, axis=-1) > 0


def prepare(
    controls: ControlRows,
    token_pages: Int[Array, "page page_size"],
    active: Active,
    *,
    vocab_size: int,
    backend: Backend,
) -> Effects:
    """Gather the controls and the known tokens of a launch's sequences.

    Args:
        backend: Of the model whose logits are adjusted: its devices split the result.
    """
    axes = backend.vocab_axes(vocab_size)

    def take(leaf: Array) -> Array:
        return leaf.at[active.row].get(mode="clip")

    gathered = jax.tree.map(take, controls)
    known = history.whole(token_pages, active.page_table)
    whole, columns = PartitionSpec(), PartitionSpec(None, axes)

    def spread_slice(controls: ControlRows, known: Array, active: Active):
        return _spread(controls, known, active, _slice_of(vocab_size, axes))

    spread = backend.split(spread_slice, whole, columns)(gathered, known, active)
    is_controlled = active.is_active & gathered.is_controlled
    neutral = jnp.array([[0.0, 0.0, 1.0]], jnp.float32)
    place = active.num_tokens[:, None] + jnp.arange(-_TAIL, 0, dtype=jnp.int32)[None]
    tail = history.read(token_pages, active.page_table, jnp.maximum(place, 0))
    return Effects(
        spread=spread,
        penalties=jnp.where(is_controlled[:, None], gathered.penalties, neutral),
        bad_words=jnp.where(is_controlled[:, None, None], gathered.bad_words, NO_TOKEN),
        tail=jnp.where(place >= active.num_prompt[:, None], tail, NO_TOKEN),
        stop_ids=active.stop_ids,
        num_early=jnp.where(is_controlled, active.min_total - active.num_tokens, 0),
    )


def adjuster(
    controls: ControlRows,
    token_pages: Int[Array, "page page_size"],
    active: Active,
    *,
    vocab_size: int,
    backend: Backend,
) -> Adjust:
    """Return `adjust`, bound to a launch's sequences; see `prepare`."""
    effects = prepare(
        controls, token_pages, active, vocab_size=vocab_size, backend=backend
    )
    return functools.partial(adjust, effects=effects, backend=backend)


def _slice_of(
    vocab_size: int, axes: tuple[str, ...] | None
) -> tuple[Int[Array, ""] | int, int]:
    """Return the first token, and the number, of this device's part of the tokens."""
    if axes is None:
        return 0, vocab_size
    size = vocab_size // jax.lax.axis_size(axes)
    return jax.lax.axis_index(axes) * size, size


def _columns(tokens: Int[Array, "*batch"], vocab_slice: tuple) -> Int[Array, "*batch"]:
    """Return the tokens' indices in a part of the vocabulary.

    Tokens of other parts get an index past its end.
    """
    first, size = vocab_slice
    # Not just the difference: a negative index would count from the end.
    return jnp.where(tokens >= first, tokens - first, size)


def _spread(
    controls: ControlRows,
    known: Int[Array, "seq position"],
    active: Active,
    vocab_slice: tuple,
) -> Spread:
    """Spread the known tokens and the controls over a part of the vocabulary."""
    first, size = vocab_slice
    shape = known.shape[0], size
    row = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    is_controlled = (active.is_active & controls.is_controlled)[:, None]
    position = jnp.arange(known.shape[1], dtype=jnp.int32)[None]
    is_known = is_controlled & (position < active.num_tokens[:, None])
    is_output = is_known & (position >= active.num_prompt[:, None])
    place = _columns(jnp.where(is_output, known, NO_TOKEN), vocab_slice)
    counts = jnp.zeros(shape, jnp.int32).at[row, place].add(1, mode="drop")
    place = _columns(jnp.where(is_known, known, NO_TOKEN), vocab_slice)
    is_seen = jnp.zeros(shape, bool).at[row, place].set(True, mode="drop")
    place = _columns(jnp.where(is_controlled, controls.bias_ids, NO_TOKEN), vocab_slice)
    bias = jnp.zeros(shape, jnp.float32)
    bias = bias.at[row, place].add(controls.bias_values, mode="drop")
    is_allowed = unpack_bits(controls.allowed, first, size) | ~is_controlled
    return Spread(counts, is_seen, jnp.where(is_allowed, bias, -jnp.inf))


def adjust(
    logits: Float[Array, "seq width vocab"],
    drafts: Int[Array, "seq draft"],
    *,
    effects: Effects,
    backend: Backend,
    num_before: Int[Array, ""] | int = 0,
) -> Float[Array, "seq width vocab"]:
    """Apply penalties, bias and masks to rows of consecutive positions.

    Args:
        drafts: Tokens after the known ones; may have no columns.
        effects: Of those sequences.
        backend: As `effects` were made with.
        num_before: Number of drafts before the first row; each further row has one more
            before it.
    """
    vocab_size = logits.shape[-1]
    axes = backend.vocab_axes(vocab_size)
    whole, columns = PartitionSpec(), PartitionSpec(None, axes)
    rows = PartitionSpec(None, None, axes)

    def run(logits: Array, spread: Spread, whole: tuple) -> Array:
        effects, drafts, num_before = whole
        vocab_slice = _slice_of(vocab_size, axes)
        before = num_before + jnp.arange(logits.shape[1], dtype=jnp.int32)
        seen = _count_drafts(spread, drafts, before, vocab_slice[0])
        logits = _penalize(logits, *seen, effects.penalties)
        logits = logits + spread.bias[:, None]
        return _forbid_bad_words(logits, effects, drafts, before, (*vocab_slice, axes))

    split = backend.split(run, (rows, columns, whole), rows)
    small = dataclasses.replace(effects, spread=None)
    before = jnp.asarray(num_before, jnp.int32)
    return split(logits, effects.spread, (small, drafts, before))


def _count_drafts(
    spread: Spread,
    drafts: Int[Array, "seq draft"],
    before: Int[Array, " width"],
    first: Int[Array, ""] | int,
) -> tuple[Int[Array, "seq _ vocab"], Bool[Array, "seq _ vocab"]]:
    """Return `counts` and `is_seen` for each row, with the drafts before it."""
    token = first + jnp.arange(spread.counts.shape[1], dtype=jnp.int32)[None, None]
    counts = spread.counts[:, None]
    for index in range(drafts.shape[1]):
        is_before = (index < before)[None, :, None]
        is_token = drafts[:, index, None, None] == token
        counts = counts + (is_token & is_before).astype(jnp.int32)
    return counts, spread.is_seen[:, None] | (counts > 0)


def _penalize(
    logits: Float[Array, "seq width vocab"],
    counts: Int[Array, "seq _ vocab"],
    is_seen: Bool[Array, "seq _ vocab"],
    penalties: Float[Array, "seq 3"],
) -> Float[Array, "seq width vocab"]:
    presence, frequency, repetition = penalties.T[..., None, None]
    scale = jnp.where(is_seen, repetition, 1.0)
    logits = jnp.where(logits > 0, logits / scale, logits * scale)
    logits = logits - frequency * counts.astype(jnp.float32)
    return logits - presence * (counts > 0).astype(jnp.float32)


def _forbid_bad_words(
    logits: Float[Array, "seq width vocab"],
    effects: Effects,
    drafts: Int[Array, "seq draft"],
    before: Int[Array, " width"],
    vocab_slice: tuple,
) -> Float[Array, "seq width vocab"]:
    """Mask a word's last token if the tokens before it match the rest of the word.

    If no allowed token would remain, or only stop ids before `min_tokens`, bad words
    are not masked: the sampler would otherwise pick a token that is not allowed.
    """
    first, size, axes = vocab_slice
    seqs, width, _ = logits.shape
    tokens = jnp.concatenate([effects.tail, drafts], axis=1)
    window = before[:, None] + jnp.arange(_TAIL, dtype=jnp.int32)[None]
    newest = tokens[:, window][:, :, None]  # [seq, width, 1, tail]
    start, last = effects.bad_words[:, None, :, :-1], effects.bad_words[:, None, :, -1]
    is_match = ((start == newest) | (start == NO_TOKEN)).all(axis=-1)
    column = _columns(jnp.where(is_match, last, NO_TOKEN), (first, size))
    seq = jnp.arange(seqs, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(width, dtype=jnp.int32)[None, :, None]
    masked = logits.at[seq, row, column].set(-jnp.inf, mode="drop")
    # `forbid_early_stop` follows, and masks some of the remaining tokens.
    is_early = (before[None] < effects.num_early[:, None])[:, :, None]
    ends = jnp.where(is_early, effects.stop_ids[:, None], NO_TOKEN)
    ends = _columns(ends, (first, size))
    left = masked.at[seq, row, ends].set(-jnp.inf, mode="drop")
    is_left = (left > -jnp.inf).any(axis=2, keepdims=True)
    if axes is not None:
        is_left = jax.lax.pmax(is_left.astype(jnp.int32), axes) > 0
    return jnp.where(is_left, masked, logits)
