"""Answers of past requests, kept on the device: what came after which tokens.

A hash table of fixed size. An entry holds a few tokens and those that followed them in
an answer; it lies where the hash of its newest tokens says, once for each number of
`KEYS`. What is found is compared token for token, and its salt as well: a request finds
nothing that another salt has left. Nothing else is known of who has left it.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxspec.program import history
from jaxspec.program.propose.matches import Matches
from jaxspec.program.rows import Active

# Tokens of an entry: before the place that is looked for, and after it.
BEFORE, AFTER = 12, 16
# How many of the newest tokens an entry is found by: many tell answers apart that begin
# alike, few find the way back after a word that is new.
KEYS = (2, 6)
# Entries under one hash.
SLOTS = 8
# Entries that a request of usual length leaves, to say how large a table is.
ENTRIES_PER_REQUEST = 256 * len(KEYS)
_PRIME = 0x9E3779B1  # 2^32 by the golden ratio


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Entries; of tokens one more than the id, 0 where there is none."""

    before: Int[Array, "bucket slot before"]
    after: Int[Array, "bucket slot after"]
    salt: UInt32[Array, "bucket slot 2"]


def num_buckets(num_requests: int) -> int:
    """Buckets for as many answers: a power of two."""
    return 1 << (-(-num_requests * ENTRIES_PER_REQUEST // SLOTS) - 1).bit_length()


def corpus_forms(num_requests: int, sharding: jax.sharding.Sharding) -> Corpus:
    """Shapes and placement of an empty table."""
    buckets = num_buckets(num_requests)

    def form(width: int, dtype: type) -> Any:
        shape = buckets, SLOTS, width
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Corpus(
        before=form(BEFORE, jnp.int32),
        after=form(AFTER, jnp.int32),
        salt=form(2, jnp.uint32),
    )


def find_in_corpus(
    corpus: Corpus,
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    longest: int,
    shortest: int,
    num_draft_tokens: int,
) -> Matches:
    """Entries whose tokens are the newest of a sequence, in no order.

    Args:
        longest: Most tokens that are compared.
        shortest: Fewest that must be the same.
    """
    assert num_draft_tokens <= AFTER, "an entry ends sooner"
    newest = _read(token_pages, active, BEFORE)
    lengths, found = [], []
    for index, key in enumerate(KEYS):
        bucket = _hash(newest[:, -key:]) % corpus.before.shape[0]
        before, after, salt = (
            part.at[bucket].get(mode="clip")
            for part in (corpus.before, corpus.after, corpus.salt)
        )
        is_known = (salt == active.salt[:, None]).all(axis=2)
        is_known &= active.is_active[:, None]
        length = _match_lengths(before, newest[:, None], longest)
        # What more tokens find is not counted twice.
        more = KEYS[index + 1] if index + 1 < len(KEYS) else BEFORE + 1
        is_known &= (length >= max(key, shortest)) & (length < more)
        lengths.append(jnp.where(is_known, length, 0))
        found.append(after)
    after = jnp.concatenate(found, axis=1)[:, :, :num_draft_tokens]
    return Matches(
        length=jnp.concatenate(lengths, axis=1),
        following=jnp.maximum(after - 1, 0),
        num_following=(after > 0).sum(axis=2),
    )


def note(
    corpus: Corpus,
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    num_new: int,
) -> Corpus:
    """Enter what is known of answers so far.

    Entries whose place is among the newest tokens lack some of those after it: they are
    entered again, when these are known.

    Args:
        num_new: Most tokens that a round adds.
    """
    count = AFTER + num_new - 1
    # The last place has one token after it; the others come before.
    width = BEFORE + count
    tokens = _read(token_pages, active, width)
    tokens = jnp.pad(tokens, ((0, 0), (0, AFTER - 1)))
    start = jnp.arange(count, dtype=jnp.int32)[:, None]
    index = start + jnp.arange(BEFORE + AFTER, dtype=jnp.int32)[None]
    entries = tokens[:, index]  # [seq, entry, before+after]
    before, after = entries[:, :, :BEFORE], entries[:, :, BEFORE:]
    # Position of the newest token before the place: the prompt's last, or the answer's.
    place = active.num_tokens[:, None] - width + BEFORE - 1 + start[:, 0][None]
    is_answer = (place >= active.num_prompt[:, None] - 1) & (place >= 0)
    is_answer &= active.is_active[:, None]
    salt = jnp.broadcast_to(active.salt[:, None], (*place.shape, 2))
    # The same tokens of a salt take the same slot: what followed them last is known.
    words = jax.lax.bitcast_convert_type(salt, jnp.int32)
    slot = _hash(jnp.concatenate([words, before], axis=2)) // SLOTS % SLOTS
    size = corpus.before.shape[0]
    table = corpus
    for key in KEYS:
        bucket = jnp.where(is_answer, _hash(before[:, :, -key:]) % size, size)
        at = _once(bucket.reshape(-1), slot.reshape(-1), size)
        table = Corpus(
            before=table.before.at[at].set(before.reshape(-1, BEFORE), mode="drop"),
            after=table.after.at[at].set(after.reshape(-1, AFTER), mode="drop"),
            salt=table.salt.at[at].set(salt.reshape(-1, 2), mode="drop"),
        )
    return table


def _once(
    bucket: UInt32[Array, " entry"], slot: UInt32[Array, " entry"], num_buckets: int
) -> tuple[UInt32[Array, " entry"], UInt32[Array, " entry"]]:
    """Places of entries, those that a later entry takes moved out of the table.

    Of several writes to one place a GPU keeps any, and of each array another: the
    tokens of one entry beside the salt of another.
    """
    place = bucket * SLOTS + slot
    order = jnp.argsort(place, stable=True)
    ranked = place[order]
    ends = jnp.append(ranked[1:] != ranked[:-1], True)
    is_last = jnp.zeros_like(ends).at[order].set(ends)
    return jnp.where(is_last, bucket, num_buckets), slot


def _read(
    token_pages: Int[Array, "page page_size"], active: Active, count: int
) -> Int[Array, "seq token"]:
    """The newest tokens, one more than each; 0 before the first."""
    offset = jnp.arange(count, dtype=jnp.int32)[None] - count
    position = active.num_tokens[:, None] + offset
    tokens = history.read(token_pages, active.page_table, jnp.maximum(position, 0))
    return jnp.where(position >= 0, tokens + 1, 0)


def _match_lengths(
    before: Int[Array, "seq slot before"], newest: Int[Array, "seq 1 before"], most: int
) -> Int[Array, "seq slot"]:
    """How many tokens at the end of entries are a sequence's newest."""
    is_same = (before == newest) & (newest > 0)
    length = jnp.zeros(is_same.shape[:2], jnp.int32)
    is_equal = jnp.ones(is_same.shape[:2], bool)
    for back in range(min(most, BEFORE)):
        is_equal &= is_same[:, :, -1 - back]
        length += is_equal.astype(jnp.int32)
    return length


def _hash(tokens: Int[Array, "*entry key"]) -> UInt32[Array, "*entry"]:
    """A number for some tokens; how many they are is part of it."""
    number = jnp.full(tokens.shape[:-1], tokens.shape[-1], jnp.uint32)
    for index in range(tokens.shape[-1]):
        number = (number ^ tokens[..., index].astype(jnp.uint32)) * jnp.uint32(_PRIME)
        number ^= number >> 15
    return number
