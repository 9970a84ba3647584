"""The answer cache finds what a search of the stored texts in Python finds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.program.propose import answer_cache
from jaxspec.program.propose.answer_cache import AFTER, BEFORE, KEYS, AnswerCache
from jaxspec.program.propose.ngram_match import Matches
from jaxspec.program.rows import Active
from tests.kernels.oracle import UNOPTIMISED
from tests.support.lookups import in_pages

NUM_NEW = 5
PROMPT = 4
SALT, OTHER = (1, 2), (1, 3)


def empty(num_requests: int = 64) -> AnswerCache:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = answer_cache.answer_cache_forms(num_requests, device)
    return jnp.zeros(form.shape, form.dtype)


def sequences(
    texts: list[list[int]], salt: tuple[int, int] = SALT, num_prompt: int = PROMPT
) -> tuple[Active, np.ndarray]:
    active, pages = in_pages(texts, np.random.default_rng(1))
    salts = np.broadcast_to(np.array(salt, np.uint32), (len(texts), 2))
    prompts = jnp.full(len(texts), num_prompt, jnp.int32)
    active = dataclasses.replace(active, salt=jnp.asarray(salts), num_prompt=prompts)
    return active, pages


# `mutation` clears compiled functions, so a mutant is traced again.
@functools.partial(jax.jit, compiler_options=UNOPTIMISED)
def note(table: AnswerCache, active: Active, pages: jax.Array) -> AnswerCache:
    return answer_cache.store_answers(table, active, pages, num_new=NUM_NEW)


@functools.partial(jax.jit, compiler_options=UNOPTIMISED)
def find(table: AnswerCache, active: Active, pages: jax.Array) -> Matches:
    return answer_cache.find_answers(
        table, active, pages, longest=BEFORE, shortest=1, num_levels=AFTER
    )


def enter(
    table: AnswerCache, text: list[int], salt: tuple[int, int] = SALT
) -> AnswerCache:
    """Store a text as an engine does, a random number of tokens in each round."""
    random, length = np.random.default_rng(len(text)), PROMPT + 1
    while length <= len(text):
        active, pages = sequences([text[:length]], salt)
        table = note(table, active, jnp.asarray(pages))
        length += int(random.integers(1, NUM_NEW + 1))
    active, pages = sequences([text], salt)
    return note(table, active, jnp.asarray(pages))


def found_by(
    table: AnswerCache, tokens: list[int], salt: tuple[int, int] = SALT
) -> list[tuple[int, list[int]]]:
    """Return lengths of matches and the tokens after them, longest match first."""
    active, pages = sequences([tokens], salt)
    matches = find(table, active, jnp.asarray(pages))
    (length,), (following,), (count,) = map(np.asarray, matches)
    listed = zip(length.tolist(), following.tolist(), count.tolist(), strict=True)
    return sorted(((n, text[:c]) for n, text, c in listed if n), reverse=True)


def texts_of(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, 60).tolist() for _ in range(count)]


def check_every_place() -> None:
    (text,) = texts_of(1, 1000)
    # The table is so large that no entry replaces another.
    table = enter(empty(512), text)
    for place in range(PROMPT - 1, len(text) - 1):
        # These texts end with the same tokens, after different ones.
        same = min(place + 1, 9)
        asked = [1001, 1002, *text[place + 1 - same : place + 1]]
        if same < KEYS[0]:
            continue
        expected = text[place + 1 :][:AFTER]
        assert found_by(table, asked) == [(same, expected)], place


def check_not_stored() -> None:
    (text,) = texts_of(1, 1000)
    assert found_by(empty(), text) == []
    assert found_by(empty(), [0] * 20) == []
    table = enter(empty(), text)
    # There is no match with tokens of the prompt, or with too few tokens.
    assert found_by(table, text[: PROMPT - 1]) == []
    assert found_by(table, [1001, text[20]]) == []
    assert found_by(table, [1001, *text[20:22]]) == [(2, text[22:][:AFTER])]


def check_other_salts() -> None:
    (text,) = texts_of(1, 1000)
    asked = text[:30]
    table = enter(empty(), text, SALT)
    assert found_by(table, asked, SALT)
    for salt in (OTHER, (2, 1), (0, 0)):
        assert found_by(table, asked, salt) == []
    # Requests without a salt share their entries.
    table = enter(empty(), text, (0, 0))
    assert found_by(table, asked, (0, 0))
    assert found_by(table, asked, SALT) == []


def test_every_place_of_a_corpus_is_found():
    """The host's hashes, entries and salts are those of the device."""
    first, second = texts_of(2, 1000)
    num_buckets = answer_cache.corpus_buckets(len(first) + len(second))
    texts = [(SALT, np.array(first)), (OTHER, np.array(second)), (SALT, np.array([7]))]
    table = jnp.asarray(answer_cache.fill_table(num_buckets, texts))
    form = answer_cache.table_forms(num_buckets, table.sharding)
    assert (form.shape, form.dtype) == (table.shape, table.dtype)
    for text, salt, other in ((first, SALT, OTHER), (second, OTHER, SALT)):
        for place in range(1, len(text) - 1):
            same = min(place + 1, 9)
            asked = [1001, 1002, *text[place + 1 - same : place + 1]]
            expected = [(same, text[place + 1 :][:AFTER])]
            assert found_by(table, asked, salt) == expected, place
            assert found_by(table, asked, other) == []
    nothing = answer_cache.fill_table(num_buckets, [])
    assert not nothing.any()


def test_full_bucket_keeps_the_last_places():
    text = [1, 2, *(value for at in range(30) for value in (3, 4, 50 + at))]
    table = jnp.asarray(answer_cache.fill_table(4096, [(SALT, np.array(text))]))
    found = [after[0] for _, after in found_by(table, [9, 3, 4])]
    assert sorted(found) == list(range(80 - answer_cache.SLOTS, 80))


def test_every_place_of_an_answer_is_found():
    check_every_place()


def test_empty_cache_finds_nothing():
    check_not_stored()


def test_requests_of_another_salt_find_nothing():
    check_other_salts()


@pytest.mark.parametrize("num_requests", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_every_match_occurs_in_a_stored_text(num_requests):
    """With few tokens and many texts, a full table loses entries but mixes none."""
    texts = texts_of(20, 5)
    table = empty(num_requests)
    for text in texts:
        table = enter(table, text)
    num_found = 0
    for asked in (text[:stop] for text in texts for stop in (9, 25, 59)):
        for length, following in found_by(table, asked):
            num_found += 1
            assert length >= KEYS[0]
            said = asked[-length:] + following
            assert any(
                text[start : start + len(said)] == said
                for text in texts
                for start in range(len(text))
            )
    assert num_found > 60


def test_no_slot_is_written_twice(monkeypatch):
    """A GPU could mix two writes to one place, which a CPU would not show."""
    # Both sequences repeat the same tokens, so they want to write to the same places.
    active, pages = sequences([[7, 8] * 20, [7, 8] * 20])
    table, places = empty(), list[np.ndarray]()
    size, once = len(table), answer_cache._keep_last_writes

    def seen(*given: Any) -> tuple[jax.Array, jax.Array]:
        found = once(*given)
        places.append(np.stack(found, axis=1))
        return found

    monkeypatch.setattr(answer_cache, "_keep_last_writes", seen)
    after = answer_cache.store_answers(
        table, active, jnp.asarray(pages), num_new=NUM_NEW
    )
    [listed] = places
    written = listed[listed[:, 0] < size]
    assert 2 <= len(written) == len(np.unique(written, axis=0))
    # No place changes that is not in the list.
    changed = np.argwhere((np.asarray(after) != 0).any(axis=2))
    assert {*map(tuple, changed)} == {*map(tuple, written)}


def test_last_write_to_a_slot_wins():
    bucket, slot = jnp.array([[3, 3, 3, 3, 0], [1, 1, 2, 1, 1]], jnp.uint32)
    kept, same = answer_cache._keep_last_writes(bucket, slot, 4)
    assert kept.tolist() == [4, 4, 3, 3, 0]
    assert same.tolist() == slot.tolist()


def test_table_has_room_for_its_requests():
    for count in (1, 7, 1000):
        buckets = answer_cache.num_buckets(count)
        assert buckets & (buckets - 1) == 0
        room = buckets * answer_cache.SLOTS
        assert count * answer_cache.ENTRIES_PER_REQUEST <= room
        assert room < 2 * count * answer_cache.ENTRIES_PER_REQUEST + answer_cache.SLOTS
