"""Every failure returns an error response in vLLM's JSON format."""

import json
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest

from jaxspec.errors import (
    EngineDeadError,
    EngineGenerateError,
    RequestError,
)
from jaxspec.serve.errors import (
    MAX_MESSAGE,
    status_and_body,
)
from jaxspec.serve.middleware import MAX_MARKS
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    PROMPT,
    Client,
    Site,
    error_of,
    server,
    site_of,
)


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


BODY = {"prompt": PROMPT, "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n"


def test_api_keys_protect_v1():
    statuses = {
        None: 401,
        "Bearer": 401,
        "Bearer first": 200,
        "bearer second": 200,
        "Bearer firs": 401,
        "Basic first": 401,
        "first": 401,
        "Bearer f\u00fcrst": 401,
    }
    with server(api_keys=("first", "second")) as http:
        for key, status in statuses.items():
            headers: Any = (
                {} if key is None else {"Authorization": key.encode("latin-1")}
            )
            response = http.post(COMPLETIONS, json=BODY, headers=headers)
            assert response.status_code == status, key
            if status == 401:
                assert response.json() == {"error": "Unauthorized"}
        for path in ("/v1/models", "/v1/nowhere", "/invocations"):
            assert http.get(path).status_code == 401
        for name in ("add", "remove", "list"):
            for method in ("GET", "POST"):
                path = f"/{name}_external_{'corpora' if name == 'list' else 'corpus'}"
                assert http.request(method, path).status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert http.get(path).status_code == 200


def test_too_long_body_is_refused():
    short = b'{"prompt":"#","max_tokens":1}'

    def pieces(text: bytes) -> Iterator[bytes]:
        for start in range(0, len(text), 16):
            yield text[start : start + 16]

    with server(max_body_bytes=64) as http:
        # The body is sent with and without a Content-Length.
        for make in (bytes, pieces):
            content = make(short.ljust(64))
            response = http.post(COMPLETIONS, content=content, headers=JSON)
            assert response.status_code == 200
            content = make(short.ljust(65))
            response = http.post(COMPLETIONS, content=content, headers=JSON)
            error = error_of(response, 413, HTTPStatus(413).phrase)
            assert "64 bytes" in error["message"]


def test_body_with_too_many_values_is_refused(http: Client):
    # The limit also counts separators inside strings, because the body is not parsed
    # yet.
    longest = b'{"prompt":"' + b"," * (MAX_MARKS - 2)
    for body, status in ((longest + b'"}', 400), (longest + b',"}', 413)):
        response = http.post(COMPLETIONS, content=body, headers=JSON)
        assert response.status_code == status, response.text


def test_body_time_limit_holds_with_any_protocol():
    # The limit also holds if another program handles the connections, like the proxy of
    # Ray Serve.
    with site_of(timeout_read_body=0.3) as site:
        with socket.create_connection(site.address, 10) as client:
            client.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{".encode())
            assert client.recv(2**16).startswith(b"HTTP/1.1 408")
        assert site.app.state.serving.admission.num_timeouts["body"] == 1


def test_expect_100_continue_is_refused_first(site: Site):
    head = f"{HEAD}Expect: 100-continue\r\nContent-Length: {10**9}\r\n\r\n"
    with socket.create_connection(site.address, 10) as client:
        client.sendall(head.encode())
        assert client.recv(2**16).startswith(b"HTTP/1.1 413")


def test_cors_allows_only_named_origins(http: Client):
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    name = "access-control-allow-origin"
    assert name not in http.options(COMPLETIONS, headers=preflight).headers
    with server(allowed_origins=("http://page",), api_keys=("k",)) as opened:
        response = opened.options(COMPLETIONS, headers=preflight)
        assert (response.status_code, response.headers[name]) == (200, "http://page")
        # Error responses must have the header too, or browsers cannot read them.
        origin = {"Origin": "http://page"}
        response = opened.post(COMPLETIONS, json=BODY, headers=origin)
        assert (response.status_code, response.headers[name]) == (401, "http://page")


def test_responses_have_request_id(http: Client):
    assert "x-request-id" not in http.get("/health").headers
    assert http.ask(COMPLETIONS, **BODY)["id"]
    with server(enable_request_id_headers=True) as tracing:
        for given in ("mine", "x" * 5000):
            response = tracing.get("/health", headers={"X-Request-Id": given})
            assert response.headers["x-request-id"] == given[:256]
        response = tracing.post(COMPLETIONS, json=BODY)
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
