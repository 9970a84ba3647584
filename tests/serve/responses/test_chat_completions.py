"""Fields of chat responses beside the text: role, echo, logprobs."""

from typing import Any

import pytest

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.responses.chat_completions import ChatWriter
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    MESSAGES,
    PROMPT,
    Client,
    StubServing,
    output,
    server,
)


def test_final_message_is_continued(http: Client):
    turns = [{"role": "user", "content": "!"}, {"role": "assistant", "content": PROMPT}]
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 5}
    asked |= {"continue_final_message": True, "add_generation_prompt": False}
    for echo in (False, True):
        expected = (PROMPT if echo else "") + letters(said(5))
        message = http.ask(CHAT, **asked, echo=echo)["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", expected)
        chunks = http.ask(CHAT, **asked, echo=echo, stream=True)
        deltas = [one["choices"][0]["delta"] for one in chunks]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta["content"] for delta in deltas) == expected


def test_every_text_begins_with_role(slow_http: Client):
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5}
    chunks = slow_http.ask(CHAT, **asked, n=3, stream=True)
    choices = [one["choices"][0] for one in chunks]
    begun = [one["index"] for one in choices if "role" in one["delta"]]
    assert sorted(begun) == [0, 1, 2]
    for index in range(3):
        own = [one["delta"] for one in choices if one["index"] == index]
        assert "role" in own[0]
        assert "".join(one["content"] for one in own) == letters(said(5))


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_and_token_ids_are_returned(is_stream: bool):
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "stream": is_stream}
    body = ChatBody(messages=MESSAGES, return_token_ids=True, **asked)
    writer = ChatWriter(StubServing(), body, SamplingParams(logprobs=1), "x")
    part = output([5, 6], is_first=True, is_last=True)
    (completion,) = part.outputs
    answer: dict[str, Any] = {}
    if is_stream:
        answer = writer.of_prompt(part)
        assert answer == {"prompt_token_ids": [2, 3, 4]}
        (choice,) = writer.deltas(0, completion, part)
    else:
        choice = writer.choice(0, completion, part)
        writer.finish(answer, part)
    assert answer["prompt_token_ids"] == [2, 3, 4]
    assert choice["token_ids"] == [5, 6]
    found = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    assert found == [(letters([5]), -5), (letters([6]), -6)]


def test_all_logprobs_and_role_are_returned():
    asked = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}
    asked |= {"top_logprobs": -1}
    with server({"max_logprobs": 16}, response_role="model") as http:
        (choice,) = http.ask(CHAT, **asked)["choices"]
        assert choice["message"]["role"] == "model"
        for one in choice["logprobs"]["content"]:
            values = [other["logprob"] for other in one["top_logprobs"]]
            assert len(values) == 16
            assert values == sorted(values, reverse=True)
    with server({"max_logprobs": 5}) as http:
        assert "at most 5" in http.refusal(CHAT, asked)["message"]
