"""Streamed text equals decoding all ids at once, with and without stop strings.

The reference decodes the whole list after every token, without the stream's window of
context and without its search from the start of new text. Returned logprobs are those
that the program computed for the token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.detokenizer import LogprobStream, TextStream
from jaxspec.logprobs import FlatLogprobs, Logprob
from jaxspec.program.wire import TokenLogprobs
from jaxspec.sampling_params import SamplingParams
from tests.support.token_pieces import EXAMPLES, IDS, TOKENIZER, byte_tokens, split

BROKEN = "\ufffd"
VOCAB, NUM_RETURNED = 50, 8


@dataclass
class Outcome:
    """The final text, the stop string that ended it, and its number of ids."""

    text: str
    stop: str | None
    num_ids: int


def run_stream(
    rounds: list[list[int]], params: SamplingParams, reads: list[bool] | None = None
) -> Outcome:
    """Stream ids round by round; `reads` are the rounds after which text is read."""
    stream = TextStream(TOKENIZER, params)
    used = 0
    for index, ids in enumerate(rounds):
        matched = stream.push(ids)
        if reads is None or reads[index % len(reads)]:
            assert stream.text is not None
        if matched is not None:
            return Outcome(stream.text, matched[0], used + matched[1])
        used += len(ids)
    stop = stream.finish()
    return Outcome(stream.text, stop, used)


def reference(ids: list[int], params: SamplingParams) -> Outcome:
    """Decode all ids after every token, up to the first stop string."""
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
    reads=st.lists(st.booleans(), min_size=1),
)
@EXAMPLES
def test_text_equals_decoding_everything(ids, sizes, skip, reads):
    params = SamplingParams(skip_special_tokens=skip)
    outcome = run_stream(split(ids, sizes), params, reads)
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
def test_shown_text_is_never_changed(ids, data):
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


def test_character_appears_with_its_last_byte_token():
    stream = TextStream(TOKENIZER, SamplingParams())
    texts = []
    for token in byte_tokens("a🦉b".encode()):
        stream.push([token])
        texts.append(stream.text)
    assert texts == ["a", "a", "a", "a", "a🦉", "a🦉b"]


def test_only_possible_starts_of_stop_strings_are_held_back():
    stream = TextStream(TOKENIZER, SamplingParams(stop=["STOP", "TOE"]))
    for text, shown in (("x", "x"), ("S", "x"), ("T", "x"), ("O", "x"), ("E", "xS")):
        matched = stream.push(byte_tokens(text.encode()))
        assert stream.visible(is_finished=matched is not None) == shown
    assert matched == ("TOE", 1)


def test_long_stop_string_is_fast():
    # Comparing the stop string at every start would take days.
    params = SamplingParams(stop=["a" * 10**7 + "b", "ab" * 10**6])
    stream, shown = TextStream(TOKENIZER, params), ""
    for token in TOKENIZER.encode("a" * 40 + " and so on " * 40 + "ab", False):
        stream.push([token])
        shown = stream.visible(is_finished=False)
    assert shown == "a" * 40 + " and so on " * 40
    assert stream.visible(is_finished=True) == shown + "ab"


def random_table(length: int, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(length, VOCAB))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def logprobs_of(
    table: np.ndarray, tokens: list[int], chosen: tuple[int, ...] = ()
) -> TokenLogprobs:
    """Return logprobs as the program does, from a table of log-probabilities."""
    order = np.argsort(-table, axis=-1, kind="stable")[:, :NUM_RETURNED]
    own = table[np.arange(len(tokens)), tokens]
    return TokenLogprobs(
        own=own,
        rank=(table > own[:, None]).sum(-1).astype(np.int32) + 1,
        top_ids=order.astype(np.int32),
        top=np.take_along_axis(table, order, -1),
        # After the requested ids, the array has random values.
        chosen=table[:, [*chosen, 0, 0]],
    )


def expected(row: np.ndarray, token: int, count: int) -> dict[int, Logprob]:
    """Return the expected logprobs, computed by sorting the row."""
    ranked = sorted(range(VOCAB), key=lambda other: (-row[other], other))
    kept = dict.fromkeys([token, *ranked[:count]])
    return {
        other: Logprob(
            float(row[other]),
            ranked.index(other) + 1,
            TOKENIZER.decode([other], skip_special_tokens=False),
        )
        for other in kept
    }


def make_stream(prompt: list[int] | None = None, **fields: Any) -> LogprobStream:
    return LogprobStream(TOKENIZER, SamplingParams(**fields), prompt or [2])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, NUM_RETURNED, -1])
def test_logprobs_accumulate_over_rounds(count: int, flat: bool):
    table = random_table(9)
    tokens = [int(table[0].argmax()), *range(30, 38)]
    stream = make_stream(logprobs=count, flat_logprobs=flat)

    def since(position: int) -> list[Any]:
        found = stream.since(position)
        assert isinstance(found, FlatLogprobs if flat else list)
        return list(found)

    stream.push([], None)  # the launch of a prompt
    assert (since(0), stream.cumulative) == ([], 0.0)
    for start, stop in [(0, 1), (1, 4), (4, 4), (4, 9)]:
        part = tokens[start:stop]
        stream.push(part, logprobs_of(table[start:stop], part))
    found = since(0)
    num_top = NUM_RETURNED if count == -1 else count
    assert found == [
        expected(row, token, num_top) for row, token in zip(table, tokens, strict=True)
    ]
    assert since(7) == found[7:]
    assert [next(iter(entry)) for entry in found] == tokens
    own = table[np.arange(9), tokens].astype(float)
    assert stream.cumulative == pytest.approx(own.sum(), abs=1e-5)
    for _ in range(2):
        stream.keep(3)  # drops those of later tokens
        assert since(0) == found[:3]
        assert stream.cumulative == pytest.approx(own[:3].sum(), abs=1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_chosen_ids_replace_the_most_likely_ones(flat: bool):
    table = random_table(2)
    ranked = [int(token) for token in np.argsort(-table[1], kind="stable")]
    # The most likely id, an id without a rank, an id given twice, and the token itself.
    least, best, itself = ranked[-1], ranked[0], ranked[2]
    chosen = (least, best, least, itself)
    stream = make_stream(logprob_token_ids=list(chosen), flat_logprobs=flat)
    stream.push([5], logprobs_of(table[:1], [5], chosen))
    stream.push([itself], logprobs_of(table[1:], [itself], chosen))
    found: Any = list(stream.since(0) or ())
    assert list(found[0]) == list(dict.fromkeys((5, *chosen)))
    assert list(found[1]) == [itself, least, best]
    assert [one.rank for one in found[1].values()] == [3, None, 1]
    for row, entries in zip(table, found, strict=True):
        for token, entry in entries.items():
            assert entry.logprob == float(row[token])
            text = TOKENIZER.decode([token], skip_special_tokens=False)
            assert entry.decoded_token == text
    assert stream.cumulative == pytest.approx(table[0][5] + table[1][itself], abs=1e-5)


def test_no_logprobs_unless_requested():
    stream = make_stream([2, 3], prompt_logprobs=None)
    stream.push([4], None)
    stream.push_prompt(logprobs_of(random_table(1), [3]))
    assert stream.since(0) is None
    assert stream.cumulative is None
    assert stream.prompt is None
    assert make_stream([2], prompt_logprobs=0).prompt == [None], "nor of one token"


@pytest.mark.parametrize("flat", [False, True])
def test_prompt_logprobs_arrive_in_parts(flat: bool):
    prompt = [2, 11, 12, 13, 14, 15]
    table = random_table(5)
    stream = make_stream(prompt, prompt_logprobs=2, flat_logprobs=flat)
    assert stream.prompt is None
    stream.push_prompt(logprobs_of(table[:3], prompt[1:4]))
    assert stream.prompt is None, "half of the prompt"
    stream.push_prompt(logprobs_of(table[3:], prompt[4:]))
    rows = zip(table, prompt[1:], strict=True)
    assert list(stream.prompt or ()) == [
        None,
        *(expected(row, token, 2) for row, token in rows),
    ]
    assert stream.since(0) is None


def test_no_texts_without_detokenization():
    stream = TextStream(TOKENIZER, SamplingParams(detokenize=False))
    assert stream.push(byte_tokens(b"abc")) is None
    assert stream.finish() is None
    assert stream.text == ""
    logprobs = make_stream(logprobs=1, detokenize=False)
    logprobs.push([3], logprobs_of(random_table(1), [3]))
    entry: Any = (logprobs.since(0) or [])[0]
    assert {one.decoded_token for one in entry.values()} == {None}


def test_texts_of_tokens_join_to_the_text():
    """The bytes of a character have no text, and its last one has the character."""
    # "a", four bytes, three bytes, "b"
    tokens = TOKENIZER.encode("a\U0001f9a9\u20acb", add_special_tokens=False)
    texts = ["a", "", "", "", "\U0001f9a9", "", "", "\u20ac", "b"]
    table = np.zeros((1, TOKENIZER.vocab_size))

    def texts_of(tokens: list[int]) -> list[list[Any]]:
        """Return the texts of generated tokens, and of the same tokens in a prompt."""
        stream = make_stream(logprobs=0)
        in_prompt = make_stream([2, *tokens], prompt_logprobs=0)
        for token in tokens:
            values = logprobs_of(table, [token])
            stream.push([token], values)
            in_prompt.push_prompt(values)
        found = list(stream.since(0) or []), list(in_prompt.prompt or [])[1:]
        return [
            [one[token].decoded_token for one, token in zip(some, tokens, strict=True)]
            for some in found
        ]

    assert texts_of(tokens) == [texts, texts]
    # A character that does not end, and a byte that continues none.
    assert texts_of([*tokens[1:3], tokens[8], tokens[2]]) == [["", "", "b", BROKEN]] * 2
