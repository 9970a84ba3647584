"""Answers of past requests, kept on the device: what came after which tokens.

A hash table of fixed size. An entry holds a few tokens and those that followed them in
an answer; it lies where the hash of its newest tokens says, once for each number of
`KEYS`. What is found is compared token for token, and its salt as well: a request finds
nothing that another salt has left. Nothing else is known of who has left it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxspec.program import history
from jaxspec.program.propose.ngram_match import Matches
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


# An entry: one more than the ids of the tokens before and after, 0 where there is none,
# and the salt's bits. One array, so that an entry is read and written at once.
_AT_SALT = BEFORE + AFTER
WORDS = _AT_SALT + 2
Corpus = Int[Array, "bucket slot word"]


def num_buckets(num_requests: int) -> int:
    """Buckets for as many answers: a power of two."""
    return 1 << (-(-num_requests * ENTRIES_PER_REQUEST // SLOTS) - 1).bit_length()


def corpus_forms(num_requests: int, sharding: jax.sharding.Sharding) -> Any:
    """Shape and placement of an empty table."""
    shape = num_buckets(num_requests), SLOTS, WORDS
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


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
    buckets = _buckets(newest, corpus.shape[0])
    entries = corpus.at[buckets].get(mode="clip")  # [seq, key, slot, word]
    before, after, salt = jnp.split(entries, (BEFORE, _AT_SALT), axis=3)
    own = _words(active.salt)[:, None, None]
    is_known = (salt == own).all(axis=3) & active.is_active[:, None, None]
    length = _match_lengths(before, newest[:, None, None], longest)
    # What more tokens find is not counted twice.
    fewest = np.maximum(KEYS, shortest)[None, :, None]
    more = np.array((*KEYS[1:], BEFORE + 1))[None, :, None]
    is_known &= (length >= fewest) & (length < more)
    seqs = length.shape[0]
    after = after.reshape(seqs, -1, AFTER)[:, :, :num_draft_tokens]
    return Matches(
        length=jnp.where(is_known, length, 0).reshape(seqs, -1),
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
    before = entries[:, :, :BEFORE]
    # Position of the newest token before the place: the prompt's last, or the answer's.
    place = active.num_tokens[:, None] - width + BEFORE - 1 + start[:, 0][None]
    is_answer = (place >= active.num_prompt[:, None] - 1) & (place >= 0)
    is_answer &= active.is_active[:, None]
    salt = jnp.broadcast_to(_words(active.salt)[:, None], (*place.shape, 2))
    # The same tokens of a salt take the same slot: what followed them last is known.
    slot = _hash(jnp.concatenate([salt, before], axis=2)) // SLOTS % SLOTS
    size = corpus.shape[0]
    buckets = jnp.where(is_answer[..., None], _buckets(before, size), size)
    shape = len(KEYS), *place.shape
    at = _once(
        jnp.moveaxis(buckets, -1, 0).reshape(-1),
        jnp.broadcast_to(slot, shape).reshape(-1),
        size,
    )
    entries = jnp.concatenate([entries, salt], axis=2)
    entries = jnp.broadcast_to(entries, (*shape, WORDS)).reshape(-1, WORDS)
    return corpus.at[at].set(entries, mode="drop")


def _once(
    bucket: UInt32[Array, " entry"], slot: UInt32[Array, " entry"], num_buckets: int
) -> tuple[UInt32[Array, " entry"], UInt32[Array, " entry"]]:
    """Places of entries, those that a later entry takes moved out of the table.

    Of several writes to one place a GPU keeps any, and of each word another: the tokens
    of one entry beside the salt of another.
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


def _words(salt: UInt32[Array, "seq 2"]) -> Int[Array, "seq 2"]:
    """A salt as entries have it."""
    return jax.lax.bitcast_convert_type(salt, jnp.int32)


def _buckets(
    tokens: Int[Array, "*entry before"], num_buckets: int
) -> UInt32[Array, "*entry key"]:
    """Where entries lie by each number of their newest tokens."""
    hashes = [_hash(tokens[..., -key:]) for key in KEYS]
    return jnp.stack(hashes, axis=-1) % jnp.uint32(num_buckets)


def _match_lengths(
    before: Int[Array, "*entry before"],
    newest: Int[Array, "*beside before"],
    most: int,
) -> Int[Array, "*entry"]:
    """How many tokens at the end of entries are a sequence's newest."""
    is_same = (before == newest) & (newest > 0)
    length = jnp.zeros(is_same.shape[:-1], jnp.int32)
    is_equal = jnp.ones(is_same.shape[:-1], bool)
    for back in range(min(most, BEFORE)):
        is_equal &= is_same[..., -1 - back]
        length += is_equal.astype(jnp.int32)
    return length


def _hash(tokens: Int[Array, "*entry key"]) -> UInt32[Array, "*entry"]:
    """A number for some tokens; how many they are is part of it."""
    number = jnp.full(tokens.shape[:-1], tokens.shape[-1], jnp.uint32)
    for index in range(tokens.shape[-1]):
        number = (number ^ tokens[..., index].astype(jnp.uint32)) * jnp.uint32(_PRIME)
        number ^= number >> 15
    return number
