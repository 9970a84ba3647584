"""Beam search over random distributions finds what a search of all texts finds.

tests/e2e/test_beam_search.py tests it on models.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from jaxspec.beam_search import (
    BeamSearch,
    BeamSearchSequence,
    get_beam_search_score,
    step_params,
)
from jaxspec.errors import RequestError
from jaxspec.inputs import ParsedPrompt
from jaxspec.logprobs import Logprob, LogprobsOnePosition
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import BeamSearchParams, SamplingParams
from tests.support.engines import StubTokenizer

VOCAB, END = 4, 1
PROMPT = [2, 3]
TOKENIZER = StubTokenizer(16)

Text = tuple[list[int], float]  # generated tokens, and the text's log-probability


class Distribution:
    """A random next-token distribution for every text, used in place of a model."""

    def __init__(self, seed: int, sharpness: float = 1.0):
        self._seed, self._sharpness = seed, sharpness
        self.num_asked = 0

    def __call__(self, tokens: list[int]) -> np.ndarray:
        self.num_asked += 1
        random = np.random.default_rng([self._seed, *tokens])
        logits = self._sharpness * random.normal(size=VOCAB)
        return logits - np.log(np.exp(logits).sum())

    def position(self, tokens: list[int], count: int) -> LogprobsOnePosition:
        """Return logprobs in an engine's format: the most likely tokens, best first."""
        distribution = self(tokens)
        best = np.argsort(-distribution)[:count].tolist()
        return {
            token: Logprob(float(distribution[token]), rank, str(token))
            for rank, token in enumerate(best, 1)
        }


def output_of(position: LogprobsOnePosition, reason: str = "length") -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="", token_ids=[0], logprobs=[position], finish_reason=reason
    )
    return RequestOutput(
        request_id="x", prompt=None, prompt_token_ids=[], outputs=[completion]
    )


def search_of(params: BeamSearchParams, longest: int = 96) -> BeamSearch:
    prompt = ParsedPrompt(text=None, token_ids=PROMPT, cache_salt="s")
    return BeamSearch(prompt, params, end_ids=(END,), max_model_len=longest)


def run(distribution: Distribution, longest: int = 96, **given: Any) -> BeamSearch:
    params = BeamSearchParams(**given)
    search = search_of(params, longest)
    count = step_params(params, vocab_size=VOCAB, max_logprobs=VOCAB).logprobs
    assert count is not None
    while prompts := search.prompts():
        assert all(prompt.get("cache_salt") == "s" for prompt in prompts)
        positions = [
            distribution.position(one["prompt_token_ids"], count) for one in prompts
        ]
        search.advance(list(map(output_of, positions)))
    return search


def found(search: BeamSearch) -> list[Text]:
    sequences = search.output(TOKENIZER).sequences
    assert all(one.tokens[: len(PROMPT)] == PROMPT for one in sequences)
    return [(one.tokens[len(PROMPT) :], one.cum_logprob) for one in sequences]


def score(text: Text, penalty: float, ends: tuple[int, ...] = (END,)) -> float:
    tokens, total = text
    length = len(PROMPT) + len(tokens) - (tokens[-1] in ends)
    return total / length**penalty


def every_text(
    distribution: Distribution, most: int, ends: tuple[int, ...]
) -> list[Text]:
    texts: list[Text] = []
    for length in range(1, most + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            is_last = length == most or tokens[-1] in ends
            if is_last and not set(tokens[:-1]) & set(ends):
                total = sum(
                    distribution([*PROMPT, *tokens[:at]])[token]
                    for at, token in enumerate(tokens)
                )
                texts.append((list(tokens), float(total)))
    return texts


def check(first: list[Text], second: list[Text]) -> None:
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in second]
    for (_, ours), (_, theirs) in zip(first, second, strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-12)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_wide_beam_search_finds_the_best_texts(penalty: float, ignore_eos: bool):
    width, most = VOCAB**3, 4
    ends = () if ignore_eos else (END,)
    for seed in range(3):
        distribution = Distribution(seed)
        all_texts = every_text(distribution, most, ends)
        all_texts.sort(key=lambda one: score(one, penalty, ends), reverse=True)
        search = run(
            distribution,
            beam_width=width,
            max_tokens=most,
            length_penalty=penalty,
            ignore_eos=ignore_eos,
        )
        check(found(search), all_texts[:width])


def textbook(
    distribution: Distribution, width: int, most: int, penalty: float
) -> list[Text]:
    """Search by the textbook rules of beam search, without early termination."""
    texts: list[Text] = [([], 0.0)]
    ended: list[Text] = []
    for _ in range(most):
        longer: list[Text] = []
        for tokens, total in texts:
            one = distribution([*PROMPT, *tokens])
            for token in np.argsort(-one)[: 2 * width].tolist():
                longer.append(([*tokens, token], total + float(one[token])))
        ended += [text for text in longer if text[0][-1] == END]
        texts = [text for text in longer if text[0][-1] != END]
        texts.sort(key=lambda text: score(text, penalty), reverse=True)
        texts = texts[:width]
    return sorted(
        [*ended, *texts], key=lambda text: score(text, penalty), reverse=True
    )[:width]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_search_equals_textbook_beam_search(width: int, penalty: float):
    num_asked = 0
    for seed in range(10):
        distribution = Distribution(seed, sharpness=2.0)
        expected = textbook(distribution, width, 6, penalty)
        num_asked += distribution.num_asked
        distribution.num_asked = 0
        given = {"beam_width": width, "max_tokens": 6, "length_penalty": penalty}
        check(found(run(distribution, **given)), expected)
        num_asked -= distribution.num_asked
    # Early termination needs fewer distributions for the same result. With a strong
    # preference for long texts, the search cannot end early.
    assert (num_asked > 0) == (penalty < 2 or width == 1)


def test_texts_end_at_end_tokens_and_lengths():
    search = run(Distribution(0), beam_width=VOCAB**2, max_tokens=3)
    sequences = search.output(TOKENIZER).sequences
    assert {one.finish_reason for one in sequences} == {"stop", "length"}
    for one in sequences:
        has_ended = one.tokens[-1] == END
        why = ("stop", END) if has_ended else ("length", None)
        assert (one.finish_reason, one.stop_reason) == why
        assert len(one.logprobs) == len(one.tokens) - len(PROMPT)
        assert one.text == TOKENIZER.decode(one.tokens)
    # Texts also end at the maximum context length.
    given = {"beam_width": 2, "max_tokens": 9, "ignore_eos": True}
    search = run(Distribution(0), longest=4, **given)
    assert {len(tokens) for tokens, _ in found(search)} == {2}


def test_search_becomes_a_request_output():
    distribution = Distribution(1)
    search = run(distribution, beam_width=3, max_tokens=3)
    whole = search.output(TOKENIZER).sequences
    asked = SamplingParams(logprobs=1)
    output = search.request_output("y", TOKENIZER, asked)
    assert output.finished
    assert output.prompt_token_ids == PROMPT
    assert [one.index for one in output.outputs] == [0, 1, 2]
    for one, sequence in zip(output.outputs, whole, strict=True):
        tokens = sequence.tokens[len(PROMPT) :]
        assert list(one.token_ids) == tokens
        has_ended = one.finish_reason == "stop"
        assert one.text == TOKENIZER.decode(tokens[: len(tokens) - has_ended])
        assert one.cumulative_logprob == sequence.cum_logprob
        assert one.logprobs is not None
        pairs = list(zip(one.logprobs, tokens, strict=True))
        total = sum(position[token].logprob for position, token in pairs)
        assert math.isclose(total, sequence.cum_logprob)
        for position, token in pairs:
            assert next(iter(position)) == token
            assert len(position) == 1 + (position[token].rank != 1)
    none = search.request_output("y", TOKENIZER, SamplingParams())
    assert none.outputs[0].logprobs is None
    given = {"beam_width": 3, "max_tokens": 3, "include_stop_str_in_output": True}
    shown = run(distribution, **given)
    for one in shown.request_output("y", TOKENIZER, asked).outputs:
        assert one.text == TOKENIZER.decode(one.token_ids)


def test_abort_ends_a_search():
    search = search_of(BeamSearchParams(beam_width=2, max_tokens=5))
    distribution = Distribution(0)
    search.advance([output_of(distribution.position(PROMPT, VOCAB))])
    search.advance([output_of({}, "abort") for _ in search.prompts()])
    assert not search.prompts()
    reasons = [one.finish_reason for one in search.output(TOKENIZER).sequences]
    assert "abort" in reasons


def test_scores_are_normalized_by_length():
    assert get_beam_search_score([2, 3, 4], -6.0, END, 1.0) == -2.0
    assert get_beam_search_score([2, 3, END], -6.0, END, 1.0) == -3.0
    assert get_beam_search_score([2, 3, END], -6.0, (END, 5), 2.0) == -1.5
    assert get_beam_search_score([2, 3], -6.0, END, 0.0) == -6.0
    assert BeamSearchSequence(tokens=[1]).cum_logprob == 0.0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"max_tokens": None}, "max_tokens"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_invalid_beam_parameters_are_rejected(wrong: dict[str, Any], name: str):
    given: dict[str, Any] = {"beam_width": 2, "max_tokens": 3} | wrong
    with pytest.raises(RequestError) as refused:
        BeamSearchParams(**given)
    assert refused.value.parameter == name


def test_too_wide_search_is_rejected():
    params = BeamSearchParams(beam_width=11, max_tokens=3)
    with pytest.raises(RequestError, match="at most 10, got 11.*max_logprobs is 20"):
        step_params(params, vocab_size=256, max_logprobs=20)
    # With logprobs=-1, any width is possible.
    step = step_params(params, vocab_size=16, max_logprobs=20, num_logprobs=-1)
    assert step.logprobs == -1
    assert step_params(params, vocab_size=16, max_logprobs=20).logprobs == 16
