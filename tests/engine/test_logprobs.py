"""Arrays of launches become vLLM's dicts; cuts and parts do not change them."""

from typing import Any

import numpy as np
import pytest

import jaxspec_checkpoints
from jaxspec.engine.logprobs import LogprobStream
from jaxspec.logprobs import FlatLogprobs, Logprob
from jaxspec.program.wire import TokenLogprobs
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())
VOCAB, NUM_TOLD = 50, 8


def random_table(length: int, seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(length, VOCAB))
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def tell(table: np.ndarray, tokens: list[int]) -> TokenLogprobs:
    """What the program tells of tokens whose log-probabilities are in a table."""
    order = np.argsort(-table, axis=-1, kind="stable")[:, :NUM_TOLD]
    own = table[np.arange(len(tokens)), tokens]
    return TokenLogprobs(
        own=own,
        rank=(table > own[:, None]).sum(-1).astype(np.int32) + 1,
        top_ids=order.astype(np.int32),
        top=np.take_along_axis(table, order, -1),
    )


def expected(row: np.ndarray, token: int, count: int) -> dict[int, Logprob]:
    """From a sorted row, without the arrays that the program makes."""
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


@pytest.mark.parametrize("count", [0, 1, 3, NUM_TOLD])
def test_a_text_told_in_rounds(count: int):
    table = random_table(9)
    tokens = [int(table[0].argmax()), *range(30, 38)]
    stream = make_stream(logprobs=count)
    for start, stop in [(0, 1), (1, 4), (4, 4), (4, 9)]:
        stream.push(tokens[start:stop], tell(table[start:stop], tokens[start:stop]))
    told: list[Any] = list(stream.since(0) or [])
    assert told == [
        expected(row, token, count) for row, token in zip(table, tokens, strict=True)
    ]
    assert stream.since(7) == told[7:]
    assert [next(iter(entry)) for entry in told if entry] == tokens
    own = [float(row[token]) for row, token in zip(table, tokens, strict=True)]
    assert stream.cumulative == pytest.approx(sum(own), abs=1e-5)


def test_a_launch_that_only_fed_a_prompt_tells_of_no_tokens():
    stream = make_stream(logprobs=1)
    stream.push([], None)
    assert stream.since(0) == []
    assert stream.cumulative == 0.0


def test_the_whole_vocabulary():
    table = random_table(1)
    stream = make_stream(logprobs=-1)
    stream.push([3], tell(table, [3]))
    (entry,) = stream.since(0) or []
    assert entry == expected(table[0], 3, NUM_TOLD)


def test_tokens_that_are_cut_off_do_not_count():
    table, tokens = random_table(5), [9, 8, 7, 6, 5]
    whole, cut = make_stream(logprobs=2), make_stream(logprobs=2)
    cut.push(tokens, tell(table, tokens))
    cut.keep(3)
    whole.push(tokens[:3], tell(table[:3], tokens[:3]))
    assert cut.since(0) == whole.since(0)
    assert cut.cumulative == pytest.approx(whole.cumulative)
    cut.keep(3)
    assert len(cut.since(0) or ()) == 3


def test_nothing_is_told_that_nobody_asked_for():
    stream = make_stream([2, 3], prompt_logprobs=None)
    stream.push([4], None)
    stream.push_prompt(tell(random_table(1), [3]))
    assert stream.since(0) is None
    assert stream.cumulative is None
    assert stream.prompt is None


def test_a_prompt_told_in_parts():
    prompt = [2, 11, 12, 13, 14, 15]
    table = random_table(5)
    stream = make_stream(prompt, prompt_logprobs=2)
    assert stream.prompt is None
    stream.push_prompt(tell(table[:3], prompt[1:4]))
    assert stream.prompt is None, "told by half"
    stream.push_prompt(tell(table[3:], prompt[4:]))
    assert stream.prompt == [
        None,
        *(
            expected(row, token, 2)
            for row, token in zip(table, prompt[1:], strict=True)
        ),
    ]
    assert stream.since(0) is None


def test_a_prompt_of_one_token_has_nothing_to_tell():
    assert make_stream([2], prompt_logprobs=0).prompt == [None]


def test_texts_of_tokens_only_where_there_is_text():
    stream = make_stream(logprobs=1, detokenize=False)
    stream.push([3], tell(random_table(1), [3]))
    (entry,) = stream.since(0) or []
    assert entry is not None
    assert {one.decoded_token for one in entry.values()} == {None}


def test_flat_logprobs_hold_the_same():
    table, tokens = random_table(4), [9, 8, 7, 6]
    flat = make_stream([2, 5], logprobs=2, prompt_logprobs=1, flat_logprobs=True)
    listed = make_stream([2, 5], logprobs=2, prompt_logprobs=1)
    for stream in (flat, listed):
        stream.push(tokens, tell(table, tokens))
        stream.push_prompt(tell(table[:1], [5]))
        stream.keep(3)
    assert isinstance(flat.since(0), FlatLogprobs)
    assert list(flat.since(0) or []) == listed.since(0)
    assert list(flat.since(1) or []) == listed.since(1)
    assert list(flat.prompt or []) == listed.prompt
