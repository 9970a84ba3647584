"""Every failure returns an error response in vLLM's JSON format."""

import json

import pytest

from jaxspec.errors import (
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    RetryableRequestError,
    UnsupportedError,
)
from jaxspec.serve.errors import (
    MAX_MESSAGE,
    ModelNotFoundError,
    OverloadedError,
    status_and_body,
)
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.serving import CHAT, COMPLETIONS, Client, error_of, server


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", parameter="n"), 400, "BadRequestError"),
        (UnsupportedError("x", parameter="n"), 400, "BadRequestError"),
        (ModelNotFoundError("x"), 404, "NotFoundError"),
        (OverloadedError("x", 3), 503, "ServiceUnavailableError"),
        (RetryableRequestError("x"), 503, "ServiceUnavailableError"),
        (EngineDeadError("x"), 500, "InternalServerError"),
    ],
)
def test_every_error_has_a_status(error: Exception, status: int, kind: str):
    found, body = status_and_body(error)
    assert (found, body["error"]["code"]) == (status, status)
    assert (body["error"]["type"], body["error"]["message"]) == (kind, "x")


def test_messages_are_short_and_have_no_internal_details():
    _, body = status_and_body(KeyError("/secret/path"))
    assert "secret" not in json.dumps(body)
    _, body = status_and_body(RequestError("x" * 10**6, parameter="y" * 10**6))
    for text in (body["error"]["message"], body["error"]["param"]):
        assert len(text) == MAX_MESSAGE + len("...")


@pytest.mark.parametrize("kind", [RequestError, EngineGenerateError, EngineDeadError])
def test_messages_have_no_folders_of_the_server(kind: type[Exception]):
    text = "{0}/secret/my.folder/~x/file.json: {0}/a/b"
    for start, end in (("", ""), ("'", "'"), ("(", ")"), ("a in ", " b")):
        _, body = status_and_body(kind(start + text.format("") + end))
        assert body["error"]["message"] == f"{start}file.json: b{end}"
    # Other texts with slashes remain.
    for kept in ("/v1/chat/completions", "http://a.b:80/c/d", "#/$defs/a", "1/2/3"):
        _, body = status_and_body(kind(f"Use {kept}, /tokenize or application/json."))
        assert kept in body["error"]["message"]
        assert body["error"]["message"].endswith(", /tokenize or application/json.")


def test_refused_role_shows_no_folder():
    """The bundled model's own template refuses the role, and names its file."""
    with server(tokenizer=Tokenizer.from_folder(bundled_target())) as http:
        chat = {"messages": [{"role": "robot", "content": "#"}]}
        message = http.refusal(CHAT, chat)["message"]
    assert "tokenizer_config.json" in message
    assert "/" not in message


def test_unknown_routes_and_methods_are_errors(http: Client):
    error_of(http.get("/nowhere"), 404, "NotFoundError")
    response = http.get(COMPLETIONS)
    error_of(response, 405, "Method Not Allowed")
    assert response.headers["allow"] == "POST"
    response = http.post(COMPLETIONS, content=b"prompt=x")
    error_of(response, 415, "Unsupported Media Type")


def test_unexpected_error_is_500():
    with server() as http:
        http.site.app.state.serving.prompts = None
        error = http.refusal(COMPLETIONS, {"prompt": "#"}, 500, "InternalServerError")
    assert "NoneType" not in error["message"]
