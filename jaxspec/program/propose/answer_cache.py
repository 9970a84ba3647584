"""Tables on the device of the tokens that followed other tokens in earlier texts.

A hash table of fixed size. An entry holds a few tokens and those that followed them in
a text, stored under the hash of its last tokens, once for each length in `KEYS`. Past
answers are stored by the rounds that make them; texts of corpora by the host.
Lookups compare token by token, and the salt as well: a request finds no entry of
another salt. Entries hold nothing else about the request that stored them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxspec.program import history
from jaxspec.program.propose.ngram_match import Matches
from jaxspec.program.rows import Active

# Tokens of an entry: before the place that is looked up, and after it.
BEFORE, AFTER = 12, 16
# Numbers of newest tokens that are hashed: six tell apart answers that start alike; two
# find a match again soon after a new word.
KEYS = (2, 6)
# Entries of one bucket.
SLOTS = 8
# Entries that a request of usual length stores; sets the size of the table.
ENTRIES_PER_REQUEST = 256 * len(KEYS)
# Smallest number of slots per entry of a corpus: with fewer, more than 3 % of the
# entries would find their bucket full.
SLOTS_PER_ENTRY = 1.3
_PRIME = 0x9E3779B1  # 2^32 by the golden ratio


# An entry: the token ids before and after, plus one (0 for no token), and the salt's
# bits. One array, so that an entry is read and written at once.
_AT_SALT = BEFORE + AFTER
WORDS = _AT_SALT + 2
AnswerCache = Int[Array, "bucket slot word"]


def num_buckets(num_requests: int) -> int:
    """Return the number of buckets for `num_requests` answers: a power of two."""
    return 1 << (-(-num_requests * ENTRIES_PER_REQUEST // SLOTS) - 1).bit_length()


def corpus_buckets(num_tokens: int) -> int:
    """Return the number of buckets for corpora of `num_tokens`: a power of two."""
    num_slots = math.ceil(num_tokens * len(KEYS) * SLOTS_PER_ENTRY)
    return 1 << (-(-num_slots // SLOTS) - 1).bit_length()


def table_forms(num_buckets: int, sharding: jax.sharding.Sharding) -> Any:
    """Return the shape and placement of a table."""
    shape = num_buckets, SLOTS, WORDS
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)


def answer_cache_forms(num_requests: int, sharding: jax.sharding.Sharding) -> Any:
    """Return the shape and placement of an empty table of past answers."""
    return table_forms(num_buckets(num_requests), sharding)


def fill_table(
    num_buckets: int, texts: Sequence[tuple[tuple[int, int], np.ndarray]]
) -> Int[np.ndarray, "bucket slot word"]:
    """Make a table with every place of some texts, on the host.

    Unlike rounds, the host chooses the slots: a bucket keeps the last entries that fit.

    Args:
        texts: The salt and the token ids of each text.
    """
    table = np.zeros((num_buckets, SLOTS, WORDS), np.int32)
    entries = np.concatenate(
        [np.zeros((0, WORDS), np.int32), *(_entries(*text) for text in texts)]
    )
    buckets = _buckets(entries[:, :BEFORE], num_buckets, np).T.reshape(-1)
    # Entries by bucket, and in each bucket in the order of the texts.
    order = np.argsort(buckets, kind="stable")
    ranked = buckets[order]
    slot = np.searchsorted(ranked, ranked, side="right") - 1 - np.arange(len(ranked))
    fits = slot < SLOTS
    table[ranked[fits], slot[fits]] = entries[order[fits] % len(entries)]
    return table


def _entries(
    salt: tuple[int, int], tokens: np.ndarray
) -> Int[np.ndarray, "entry word"]:
    """Return the entries of all places of a text, on the host."""
    padded = np.zeros(BEFORE + len(tokens) + AFTER, np.int32)
    padded[BEFORE : BEFORE + len(tokens)] = tokens + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, BEFORE + AFTER)
    windows = windows[1 : len(tokens)]  # with tokens before and after
    salts = np.broadcast_to(np.array(salt, np.uint32).view(np.int32), (len(windows), 2))
    return np.concatenate([windows, salts], axis=1)


def find_answers(
    cache: AnswerCache,
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    longest: int,
    shortest: int,
    num_levels: int,
) -> Matches:
    """Find entries whose tokens equal a sequence's newest; in no particular order.

    Args:
        longest: Largest number of tokens compared.
        shortest: Smallest number that must be equal.
    """
    assert num_levels <= AFTER, "an entry ends sooner"
    newest = _newest_tokens(token_pages, active, BEFORE)
    buckets = _buckets(newest, cache.shape[0])
    entries = cache.at[buckets].get(mode="clip")  # [seq, key, slot, word]
    before, after, salt = jnp.split(entries, (BEFORE, _AT_SALT), axis=3)
    own = _salt_bits(active.salt)[:, None, None]
    is_known = (salt == own).all(axis=3) & active.is_active[:, None, None]
    length = _match_lengths(before, newest[:, None, None], longest)
    # An entry is counted once, even if a longer key finds it as well.
    fewest = np.maximum(KEYS, shortest)[None, :, None]
    more = np.array((*KEYS[1:], BEFORE + 1))[None, :, None]
    is_known &= (length >= fewest) & (length < more)
    seqs = length.shape[0]
    after = after.reshape(seqs, -1, AFTER)[:, :, :num_levels]
    return Matches(
        length=jnp.where(is_known, length, 0).reshape(seqs, -1),
        following=jnp.maximum(after - 1, 0),
        num_following=(after > 0).sum(axis=2),
    )


def store_answers(
    cache: AnswerCache,
    active: Active,
    token_pages: Int[Array, "page page_size"],
    *,
    num_new: int,
) -> AnswerCache:
    """Store the answers so far.

    Entries near the end of the text lack some of the tokens after their place; they are
    stored again when those are known.

    Args:
        num_new: Largest number of tokens that a round adds.
    """
    count = AFTER + num_new - 1
    # The last place has one token after it; the others come before.
    width = BEFORE + count
    tokens = _newest_tokens(token_pages, active, width)
    tokens = jnp.pad(tokens, ((0, 0), (0, AFTER - 1)))
    start = jnp.arange(count, dtype=jnp.int32)[:, None]
    index = start + jnp.arange(BEFORE + AFTER, dtype=jnp.int32)[None]
    entries = tokens[:, index]  # [seq, entry, before+after]
    before = entries[:, :, :BEFORE]
    # Position of the newest token before the place: the prompt's last, or the answer's.
    place = active.num_tokens[:, None] - width + BEFORE - 1 + start[:, 0][None]
    is_answer = (place >= active.num_prompt[:, None] - 1) & (place >= 0)
    is_answer &= active.is_active[:, None]
    salt = jnp.broadcast_to(_salt_bits(active.salt)[:, None], (*place.shape, 2))
    # Equal tokens with an equal salt share a slot: the latest continuation is stored.
    slot = _hash(jnp.concatenate([salt, before], axis=2)) // SLOTS % SLOTS
    size = cache.shape[0]
    buckets = jnp.where(is_answer[..., None], _buckets(before, size), size)
    shape = len(KEYS), *place.shape
    at = _keep_last_writes(
        jnp.moveaxis(buckets, -1, 0).reshape(-1),
        jnp.broadcast_to(slot, shape).reshape(-1),
        size,
    )
    entries = jnp.concatenate([entries, salt], axis=2)
    entries = jnp.broadcast_to(entries, (*shape, WORDS)).reshape(-1, WORDS)
    return cache.at[at].set(entries, mode="drop")


def _keep_last_writes(
    bucket: UInt32[Array, " entry"], slot: UInt32[Array, " entry"], num_buckets: int
) -> tuple[UInt32[Array, " entry"], UInt32[Array, " entry"]]:
    """Move entries that a later entry overwrites out of the table.

    With several writes to one place a GPU may store each word of a different one: the
    tokens of one entry with the salt of another.
    """
    place = bucket * SLOTS + slot
    order = jnp.argsort(place, stable=True)
    ranked = place[order]
    ends = jnp.append(ranked[1:] != ranked[:-1], True)
    is_last = jnp.zeros_like(ends).at[order].set(ends)
    return jnp.where(is_last, bucket, num_buckets), slot


def _newest_tokens(
    token_pages: Int[Array, "page page_size"], active: Active, count: int
) -> Int[Array, "seq token"]:
    """Return the newest token ids plus one; 0 in places before the first token."""
    offset = jnp.arange(count, dtype=jnp.int32)[None] - count
    position = active.num_tokens[:, None] + offset
    tokens = history.read(token_pages, active.page_table, jnp.maximum(position, 0))
    return jnp.where(position >= 0, tokens + 1, 0)


def _salt_bits(salt: UInt32[Array, "seq 2"]) -> Int[Array, "seq 2"]:
    """Return a salt in the format of entries."""
    return jax.lax.bitcast_convert_type(salt, jnp.int32)


def _buckets(tokens: Any, num_buckets: int, xp: Any = jnp) -> Any:
    """Return the buckets of entries, one for each length in `KEYS`.

    Args:
        tokens: Int[Array, "*entry before"], of `xp`: `jnp`, or `np` on the host.

    Returns:
        UInt32[Array, "*entry key"].
    """
    hashes = [_hash(tokens[..., -key:], xp) for key in KEYS]
    return xp.stack(hashes, axis=-1) % xp.uint32(num_buckets)


def _match_lengths(
    before: Int[Array, "*entry before"],
    newest: Int[Array, "*broadcast before"],
    longest: int,
) -> Int[Array, "*entry"]:
    """Return how many last tokens of each entry equal a sequence's newest tokens."""
    is_same = (before == newest) & (newest > 0)
    length = jnp.zeros(is_same.shape[:-1], jnp.int32)
    is_equal = jnp.ones(is_same.shape[:-1], bool)
    for back in range(min(longest, BEFORE)):
        is_equal &= is_same[..., -1 - back]
        length += is_equal.astype(jnp.int32)
    return length


def _hash(tokens: Any, xp: Any = jnp) -> Any:
    """Hash some tokens and their number; see `_buckets`."""
    number = xp.full(tokens.shape[:-1], tokens.shape[-1], xp.uint32)
    for index in range(tokens.shape[-1]):
        number = (number ^ tokens[..., index].astype(xp.uint32)) * xp.uint32(_PRIME)
        number ^= number >> 15
    return number
