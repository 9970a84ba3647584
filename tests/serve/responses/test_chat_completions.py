"""Fields of chat responses beside the text: role, echo, logprobs."""

from typing import Any

import httpx
import pytest

from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.responses.chat_completions import ChatWriter
from tests.serve.responses.test_completions import output
from tests.serve.responses.test_usage import StubServing
from tests.support.fake_engines import letters, said
from tests.support.serving import CHAT, MESSAGES, PROMPT, error_of, post, serve_http


@pytest.mark.parametrize("is_stream", [False, True])
def test_continue_final_message(is_stream: bool):
    turns = [{"role": "user", "content": "!"}, {"role": "assistant", "content": PROMPT}]
    asked = {"messages": turns, "max_tokens": 5, "stream": is_stream}
    asked |= {"continue_final_message": True, "add_generation_prompt": False}

    async def ask(client: httpx.AsyncClient) -> None:
        for echo in (False, True):
            found = await post(client, CHAT, **asked, echo=echo)
            if is_stream:
                deltas = [one["choices"][0]["delta"] for one in found]
                assert deltas[0]["role"] == "assistant"
                text = "".join(delta["content"] for delta in deltas)
            else:
                message = found["choices"][0]["message"]
                assert message["role"] == "assistant"
                text = message["content"]
            assert text == (PROMPT if echo else "") + letters(said(5))

    serve_http(ask)


def test_response_role():
    async def ask(client: httpx.AsyncClient) -> None:
        answer = await post(client, CHAT, messages=MESSAGES, max_tokens=2)
        assert answer["choices"][0]["message"]["role"] == "model"

    serve_http(ask, settings={"response_role": "model"})


def test_every_text_begins_with_role():
    async def ask(client: httpx.AsyncClient) -> None:
        chunks = await post(
            client, CHAT, messages=MESSAGES, max_tokens=5, n=3, stream=True
        )
        choices = [one["choices"][0] for one in chunks]
        begun = [one["index"] for one in choices if "role" in one["delta"]]
        assert sorted(begun) == [0, 1, 2]
        for index in range(3):
            own = [one["delta"] for one in choices if one["index"] == index]
            assert "role" in own[0]
            assert "".join(one["content"] for one in own) == letters(said(5))

    serve_http(ask, delay_s=0.003)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_and_token_ids(is_stream: bool):
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "stream": is_stream}
    body = ChatBody(messages=MESSAGES, return_token_ids=True, **asked)
    writer = ChatWriter(StubServing(), body, SamplingParams(logprobs=1), "x")
    part = output([5, 6], is_first=True, is_last=True)
    (completion,) = part.outputs
    if is_stream:
        assert writer.of_prompt(part) == {"prompt_token_ids": [2, 3, 4]}
        (choice,) = writer.deltas(0, completion, part)
    else:
        choice = writer.choice(0, completion, part)
        answer: dict[str, Any] = {}
        writer.finish(answer, part)
        assert answer["prompt_token_ids"] == [2, 3, 4]
    assert choice["token_ids"] == [5, 6]
    found = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    assert found == [(letters([5]), -5), (letters([6]), -6)]


def test_all_logprobs():
    asked = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}

    async def ask(client: httpx.AsyncClient) -> None:
        answer = await post(client, CHAT, **asked, top_logprobs=-1)
        for one in answer["choices"][0]["logprobs"]["content"]:
            values = [other["logprob"] for other in one["top_logprobs"]]
            assert len(values) == 16
            assert values == sorted(values, reverse=True)

    async def refuse(client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, json=asked | {"top_logprobs": -1})
        assert "at most 5" in error_of(response, 400, "BadRequestError")["message"]

    serve_http(ask, max_logprobs=16)
    serve_http(refuse, max_logprobs=5)
