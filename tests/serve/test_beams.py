"""Beam search by the server, on a fake device with equally likely tokens.

tests/test_beam_search.py tests the search itself. These tests cover requests for it,
and the fields that they can contain.
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from jaxspec.beam_search import BeamSearch, step_params
from jaxspec.inputs import ParsedPrompt
from jaxspec.logprobs import Logprob
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import BeamSearchParams
from jaxspec.serve.serving import _gather
from tests.support.fake_engines import EOS, TEXT, letters
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, Client, server

SEARCH: Any = {"prompt": PROMPT, "use_beam_search": True, "n": 3}
LONG = SEARCH | {"max_tokens": 60, "ignore_eos": True}
VOCAB = 16
EACH = float(np.float32(-np.log(VOCAB)))


def next_output(tokens: list[int], count: int) -> RequestOutput:
    """Return the device's output after some tokens: its token first, then others."""
    position = {TEXT[len(tokens) % len(TEXT)]: Logprob(EACH, 1)}
    for rank, token in enumerate(range(count), 1):
        position.setdefault(token, Logprob(EACH, rank))
    completion = CompletionOutput(index=0, text="", token_ids=[], logprobs=[position])
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=[], outputs=[completion]
    )


def expected(width: int, max_tokens: int, **given: Any) -> list[list[int]]:
    """Return the tokens of the texts that a direct search returns."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given)
    count = step_params(params, vocab_size=VOCAB, max_logprobs=20).logprobs
    assert count is not None
    prompt = ParsedPrompt(text=None, token_ids=[2, 3, 4])
    search = BeamSearch(prompt, params, end_ids=(EOS,), max_model_len=96)
    while prompts := search.prompts():
        search.advance([next_output(one["prompt_token_ids"], count) for one in prompts])
    return [one.tokens[3:] for one in search._ended]


def shown(tokens: list[int]) -> str:
    return letters(tokens[:-1] if tokens[-1] == EOS else tokens)


@pytest.mark.parametrize(
    ("penalty", "is_stream"),
    [
        *((0.0, False), (4.0, True), (1.0, False)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((0.0, True), (1.0, True), (4.0, False))
        ),
    ],
)
def test_beam_search_returns_best_texts(http: Client, is_stream: bool, penalty: float):
    texts = expected(3, 5, length_penalty=penalty)
    asked = {"n": 3, "length_penalty": penalty, "max_tokens": 5, "temperature": 0}
    asked |= {"use_beam_search": True, "stream": is_stream, "return_token_ids": True}
    for path, given, wanted in (
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT]}, texts * 2),
        (CHAT, {"messages": MESSAGES}, texts),
    ):
        answer = http.ask(path, **given, **asked)
        events = answer if is_stream else [answer]
        choices = [choice for event in events for choice in event["choices"]]
        ended = [one for one in choices if one["finish_reason"] is not None]
        # The searches of several prompts may end in any order.
        ended.sort(key=lambda one: one["index"])
        assert [one["index"] for one in ended] == list(range(len(wanted)))
        assert [one["token_ids"] for one in ended] == wanted
        for one, tokens in zip(ended, wanted, strict=True):
            reason = "stop" if tokens[-1] == EOS else "length"
            assert one["finish_reason"] == reason
            message = one.get("delta", one.get("message", {}))
            assert one.get("text", message.get("content")) == shown(tokens)
        if not is_stream:
            assert answer["usage"]["completion_tokens"] == sum(map(len, wanted))


def test_fields_that_combine_with_beam_search(http: Client):
    asked = SEARCH | {"n": 2, "max_tokens": 3}
    answer = http.ask(COMPLETIONS, logprobs=1, ignore_eos=True, **asked)
    for choice, tokens in zip(
        answer["choices"], expected(2, 3, ignore_eos=True), strict=True
    ):
        assert choice["text"] == letters(tokens)
        assert choice["logprobs"]["tokens"] == list(letters(tokens))
        assert len(choice["logprobs"]["token_logprobs"]) == 3
        # The token itself, and the most likely one.
        assert all(len(one) <= 3 for one in choice["logprobs"]["top_logprobs"])
    for more, count, prompt in (
        ({"echo": True}, 2, PROMPT),
        ({"n": None, "top_p": 0.5}, 1, ""),
    ):
        texts = [
            one["text"] for one in http.ask(COMPLETIONS, **asked | more)["choices"]
        ]
        assert texts == [prompt + shown(tokens) for tokens in expected(count, 3)]
    neutral = {"stop": [], "presence_penalty": 0, "logit_bias": {}, "min_tokens": 0}
    http.ask(COMPLETIONS, **asked, **neutral)
    # The text continues to the end of the context.
    chat = {"messages": MESSAGES, "use_beam_search": True, "ignore_eos": True}
    answer = http.ask(CHAT, **chat)
    assert answer["usage"]["completion_tokens"] == 93
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": "x"},
        {"stop_token_ids": [5]},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"5": 1}},
        {"min_tokens": 1},
        {"guided_regex": "a"},
        {"prompt_logprobs": 1},
        {"return_token_origins": True},
        {"length_penalty": "x"},
        {"length_penalty": 11},
        {"temperature": -1},
        {"n": 0},
        {"thinking_token_budget": 3},
    ],
    ids=str,
)
def test_refuses_fields_that_do_not_combine(http: Client, wrong: dict[str, Any]):
    (name,) = wrong
    assert http.refusal(COMPLETIONS, SEARCH | wrong)["param"] == name


def test_refuses_too_large_beam_width():
    with server({"max_logprobs": 5}) as http:
        error = http.refusal(COMPLETIONS, SEARCH)
    assert error["param"] == "beam_width"
    assert "max_logprobs is 5" in error["message"]


def test_slow_search_times_out():
    with server(max_request_s=0.2, delay_s=0.02) as http:
        http.refusal(COMPLETIONS, LONG, 504, "Gateway Timeout")


def test_failed_step_fails_search():
    with server(break_at=8, delay_s=0.005) as http:
        http.refusal(COMPLETIONS, LONG, 500, "InternalServerError")


def test_gather_cancels_others_on_error():
    has_ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            has_ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("boom")

    async def run() -> None:
        with pytest.raises(ValueError, match="boom"):
            await _gather([waits(), fails()])
        assert has_ended.is_set()

    asyncio.run(asyncio.wait_for(run(), 10))
