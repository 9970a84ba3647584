"""Every failure returns an error response in vLLM's JSON format."""

import json
from typing import Any

import httpx
import pytest

from jaxspec.errors import EngineDeadError, RequestError, UnsupportedError
from jaxspec.serve.errors import (
    MAX_MESSAGE,
    ModelNotFoundError,
    OverloadedError,
    status_and_body,
)
from tests.support.serving import CHAT, COMPLETIONS, PROMPT, error_of, post, serve_http


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", parameter="n"), 400, "BadRequestError"),
        (UnsupportedError("x", parameter="n"), 400, "BadRequestError"),
        (ModelNotFoundError("x"), 404, "NotFoundError"),
        (OverloadedError("x", 3), 503, "ServiceUnavailableError"),
        (EngineDeadError("x"), 500, "InternalServerError"),
    ],
)
def test_every_error_has_a_status(error: Exception, status: int, kind: str):
    found, body = status_and_body(error)
    assert (found, body["error"]["code"]) == (status, status)
    assert (body["error"]["type"], body["error"]["message"]) == (kind, "x")


def test_internal_details_are_not_returned():
    _, body = status_and_body(KeyError("/secret/path"))
    assert "secret" not in json.dumps(body)


def test_long_messages_are_cut():
    _, body = status_and_body(RequestError("x" * 10**6, parameter="y" * 10**6))
    for text in (body["error"]["message"], body["error"]["param"]):
        assert len(text) == MAX_MESSAGE + len("...")


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b"\xff\xfe", None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": 7}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": ""}', "prompt"),
        (b'{"prompt": {}}', "prompt"),
        (b'{"prompt": "#", "temperature": NaN}', "temperature"),
        (b'{"prompt": "#", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "#", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "#", "max_tokens": -1}', "max_tokens"),
        (b'{"prompt": "#", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "#", "max_tokens": 1' + b"0" * 400 + b"}", "max_tokens"),
        (b'{"prompt": "#", "n": 0}', "n"),
        (b'{"prompt": "#", "n": 1000000000}', "n"),
        (b'{"prompt": "#", "stop": [""]}', "stop"),
        (b'{"prompt": "#", "stop": ["\\ud800"]}', None),
        (b'{"prompt": "#", "logit_bias": {"\\ud800": 1}}', None),
        (b'{"prompt": "#", "seed": 1' + b"0" * 40 + b"}", "seed"),
        (b'{"prompt": [["a"]]}', "prompt"),
        (b'{"prompt": [-1]}', "prompt"),
        (b'{"prompt": "#", "suffix": "#"}', "suffix"),
        (b'{"prompt": "#", "stream_options": {}}', "stream_options"),
        (b'{"prompt": "#", "response_format": {"type": "xml"}}', "response_format"),
        (b'{"prompt": "#", "guided_regex": "("}', "guided_regex"),
        (b'{"prompt": "#", "structured_outputs": {}}', "structured_outputs"),
        (b'{"prompt": "#", "structured_outputs": {"x": 1}}', "structured_outputs"),
        (b'{"prompt": "#", "vllm_xargs": {"x": 1}}', "vllm_xargs"),
        (b'{"prompt": "#", "num_speculative_tokens": 9}', "num_speculative_tokens"),
        (b'{"prompt": "#", "request_id": 7}', "request_id"),
        (b'{"prompt": "#", "cache_salt": ""}', "cache_salt"),
        (b'{"x":' + b"[" * 200 + b"]" * 200 + b"}", None),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_bad_completion_is_400(body: bytes, parameter: str | None):
    async def ask(client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/json"}
        response = await client.post(COMPLETIONS, content=body, headers=headers)
        error = error_of(response, 400, "BadRequestError")
        assert error["message"]
        if parameter is not None:
            assert parameter in str(error["param"]), error
        assert (await post(client, COMPLETIONS, prompt=PROMPT))["choices"]

    serve_http(ask)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": "#"}], "tools": []},
        {"messages": [{"role": "user", "content": "#"}], "tools": [{}]},
        {"messages": [{"role": "user", "content": "#"}], "top_logprobs": 1},
        {"messages": [{"role": "user", "content": "#"}], "top_logprobs": -2},
        {"messages": [{"role": "user", "content": "#"}], "chat_template": "{{ 1 }}"},
        {
            "messages": [{"role": "user", "content": "#"}],
            "add_generation_prompt": True,
            "continue_final_message": True,
        },
    ],
)
def test_bad_chat_is_400(body: dict[str, Any]):
    async def ask(client: httpx.AsyncClient) -> None:
        response = await client.post(CHAT, json=body)
        error_of(response, 400, "BadRequestError")

    serve_http(ask)


def test_unknown_routes_and_methods():
    async def ask(client: httpx.AsyncClient) -> None:
        error_of(await client.get("/nowhere"), 404, "NotFoundError")
        response = await client.get(COMPLETIONS)
        error_of(response, 405, "Method Not Allowed")
        assert response.headers["allow"] == "POST"
        response = await client.post(COMPLETIONS, content=b"prompt=x")
        error_of(response, 415, "Unsupported Media Type")

    serve_http(ask)


def test_unexpected_error_is_500(caplog: pytest.LogCaptureFixture):
    async def ask(client: httpx.AsyncClient) -> None:
        app: Any = client._transport.app  # pyright: ignore
        app.state.serving.prompts = None
        response = await client.post(COMPLETIONS, json={"prompt": "#"})
        error = error_of(response, 500, "InternalServerError")
        assert "NoneType" not in error["message"]

    serve_http(ask)
