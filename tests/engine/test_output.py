"""Streamed text equals decoding all ids at once, and stop strings cut it alike.

The reference decodes the whole list after every token. It shares nothing with the
stream's window of context or its search from where the new text starts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec_checkpoints
from jaxspec.engine.output import TextStream
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer
from tests.engines import StubTokenizer

TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
BROKEN = "\ufffd"
BYTES = {
    int(TOKENIZER.id_to_piece(token)[3:5], 16): token
    for token in range(TOKENIZER.vocab_size)
    if TOKENIZER.is_byte(token)
}
EXAMPLES = settings(max_examples=150, deadline=None)


def byte_tokens(data: bytes) -> list[int]:
    return [BYTES[value] for value in data]


CHARACTER = st.characters(exclude_categories=["Cs"]).map(
    lambda character: byte_tokens(character.encode())
)
SPECIAL = st.sampled_from(TOKENIZER.all_special_ids).map(lambda token: [token])
PIECE = st.integers(0, TOKENIZER.vocab_size - 1).map(lambda token: [token])
STRAY_BYTE = st.integers(0, 255).map(lambda value: [BYTES[value]])
# Encoded here: SentencePiece calls `random`, which a strategy may not.
TEXT = st.sampled_from(
    [
        TOKENIZER.encode(text, add_special_tokens=False)
        for text in ("the quick", " the", "\n\nthat  ", "q  q", "th")
    ]
)
IDS = st.lists(st.one_of(CHARACTER, SPECIAL, PIECE, STRAY_BYTE, TEXT), max_size=14).map(
    lambda parts: [token for part in parts for token in part]
)


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut a list into rounds of the given sizes; the rest is the last round."""
    rounds = []
    for size in sizes:
        rounds.append(ids[:size])
        ids = ids[size:]
    return [*rounds, ids]


@dataclass
class Outcome:
    """Text shown at the end, the stop string that ended it, ids it took."""

    text: str
    stop: str | None
    num_ids: int


def run_stream(
    rounds: list[list[int]], params: SamplingParams, looks: list[bool] | None = None
) -> Outcome:
    """Push round by round; `looks` says after which of them somebody reads."""
    stream = TextStream(TOKENIZER, params)
    used = 0
    for index, ids in enumerate(rounds):
        matched = stream.push(ids)
        if looks is None or looks[index % len(looks)]:
            assert stream.text is not None
        if matched is not None:
            return Outcome(stream.text, matched[0], used + matched[1])
        used += len(ids)
    stop = stream.finish()
    return Outcome(stream.text, stop, used)


def reference(ids: list[int], params: SamplingParams) -> Outcome:
    """Decode everything after every token; the first match that is new ends it."""
    text = ""
    for count in range(1, len(ids) + 2):
        is_end = count > len(ids)
        skip = params.skip_special_tokens
        decoded = TOKENIZER.decode(ids[:count], skip_special_tokens=skip)
        before = len(text)
        if is_end or not decoded.endswith(BROKEN):
            text = decoded
        found = [
            (start, stop)
            for stop in params.stop or []
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if found and min(count, len(ids)) > params.min_tokens:
            position, stop = min(found)
            end = position + params.include_stop_str_in_output * len(stop)
            return Outcome(text[:end], stop, min(count, len(ids)))
    return Outcome(text, None, len(ids))


@given(
    ids=IDS,
    sizes=st.lists(st.integers(0, 7)),
    skip=st.booleans(),
    looks=st.lists(st.booleans(), min_size=1),
)
@EXAMPLES
def test_text_equals_decoding_everything(ids, sizes, skip, looks):
    params = SamplingParams(skip_special_tokens=skip)
    outcome = run_stream(split(ids, sizes), params, looks)
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert outcome == Outcome(whole, None, len(ids))


@given(ids=IDS, data=st.data())
@EXAMPLES
def test_stop_strings_equal_decoding_everything(ids, data):
    whole = TOKENIZER.decode(ids)
    stops = data.draw(st.lists(st.text("the q", min_size=1, max_size=3), max_size=2))
    for _ in range(data.draw(st.integers(0, 2)) if whole else 0):
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 9))])
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 2, 9])),
    )
    rounds = split(ids, data.draw(st.lists(st.integers(0, 7))))
    assert run_stream(rounds, params) == reference(ids, params)


@given(ids=IDS, data=st.data())
@EXAMPLES
def test_what_was_shown_is_never_taken_back(ids, data):
    whole = TOKENIZER.decode(ids)
    stops = []
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 9))])
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=data.draw(st.booleans())
    )
    stream = TextStream(TOKENIZER, params)
    shown = [""]
    for token in ids:
        if stream.push([token]) is not None:
            break
        shown.append(stream.visible(is_finished=False))
    else:
        stream.finish()
    shown.append(stream.visible(is_finished=True))
    assert shown[-1] == stream.text
    for earlier, later in zip(shown, shown[1:], strict=False):
        assert later.startswith(earlier)


def test_a_character_of_four_byte_tokens_appears_with_the_last():
    stream = TextStream(TOKENIZER, SamplingParams())
    texts = []
    for token in byte_tokens("a🦉b".encode()):
        stream.push([token])
        texts.append(stream.text)
    assert texts == ["a", "a", "a", "a", "a🦉", "a🦉b"]


def test_an_unfinished_character_is_shown_broken_at_the_end():
    stream = TextStream(TOKENIZER, SamplingParams())
    stream.push(byte_tokens("🦉".encode()[:3]))
    assert stream.text == ""
    assert stream.finish() is None
    assert stream.text == TOKENIZER.decode(byte_tokens("🦉".encode()[:3]))
    assert stream.text.startswith(BROKEN)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, SamplingParams(stop=["STOP", "TOE"]))
    for text, shown in (("x", "x"), ("S", "x"), ("T", "x"), ("O", "x"), ("E", "xS")):
        matched = stream.push(byte_tokens(text.encode()))
        assert stream.visible(is_finished=matched is not None) == shown
    assert matched == ("TOE", 1)


def test_ids_after_the_match_in_the_same_round_are_not_counted():
    stream = TextStream(TOKENIZER, SamplingParams(stop=["bc"]))
    assert stream.push(byte_tokens(b"a")) is None
    assert stream.push(byte_tokens(b"bcde")) == ("bc", 2)
    assert stream.text == "a"


def test_a_stop_string_within_the_first_tokens_stays_in_the_text():
    params = SamplingParams(stop=["bc", "never this"], min_tokens=3)
    stream = TextStream(TOKENIZER, params)
    assert stream.push(byte_tokens(b"abcde")) is None
    assert stream.push(byte_tokens(b"bcd")) == ("bc", 2)
    assert stream.text == "abcde"


def test_without_detokenizing_there_is_no_text():
    stream = TextStream(TOKENIZER, SamplingParams(detokenize=False))
    assert stream.push(byte_tokens(b"abc")) is None
    assert stream.finish() is None
    assert stream.text == ""


@pytest.mark.parametrize(
    ("stops", "expected"), [(["b", "bc"], "b"), (["bc", "b"], "b"), (["c", "bc"], "bc")]
)
def test_of_several_matches_the_first_in_the_text_wins(stops, expected):
    # One piece that brings "abc" at once: a character token for each would decide by
    # arrival instead.
    class OnePiece(StubTokenizer):
        def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
            return "abc" * len(list(ids))

    stream = TextStream(OnePiece(1), SamplingParams(stop=stops))
    assert stream.push([0]) == (expected, 1)
    assert stream.text == "a"


def test_a_stop_string_longer_than_any_text_costs_nothing():
    # Compared start by start, these would take days.
    params = SamplingParams(stop=["a" * 10**7 + "b", "ab" * 10**6])
    stream, shown = TextStream(TOKENIZER, params), ""
    for token in TOKENIZER.encode("a" * 40 + " and so on " * 40 + "ab", False):
        stream.push([token])
        shown = stream.visible(is_finished=False)
    assert shown == "a" * 40 + " and so on " * 40
    assert stream.visible(is_finished=True) == shown + "ab"
