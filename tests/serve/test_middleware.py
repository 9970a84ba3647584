"""Checks that every request must pass before it reaches an endpoint."""

import socket
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
import pytest

from jaxspec.serve.middleware import MAX_MARKS
from tests.support.serving import (
    COMPLETIONS,
    PROMPT,
    error_of,
    post,
    serve_http,
    site_of,
)

BODY = {"prompt": PROMPT, "max_tokens": 2}


def test_api_keys_protect_v1():
    async def ask(client: httpx.AsyncClient) -> None:
        for key, status in {
            None: 401,
            "Bearer ": 401,
            "Bearer first": 200,
            "bearer second": 200,
            "Bearer firs": 401,
            "Basic first": 401,
            "first": 401,
            "Bearer f\u00fcrst": 401,
        }.items():
            headers = {} if key is None else {"Authorization": key.encode("latin-1")}
            response = await client.post(COMPLETIONS, json=BODY, headers=headers)
            assert response.status_code == status, key
            if status == 401:
                assert response.json() == {"error": "Unauthorized"}
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/nowhere")).status_code == 401
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200

    serve_http(ask, settings={"api_keys": ("first", "second")})


def test_body_length_limit():
    async def ask(client: httpx.AsyncClient) -> None:
        short = b'{"prompt":"#","max_tokens":1}'
        headers = {"Content-Type": "application/json"}

        async def pieces(text: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(text), 16):
                yield text[start : start + 16]

        for body in (short.ljust(64), pieces(short.ljust(64))):
            response = await client.post(COMPLETIONS, content=body, headers=headers)
            assert response.status_code == 200
        # The body is sent with and without a Content-Length.
        for body in (short.ljust(65), pieces(short.ljust(65))):
            response = await client.post(COMPLETIONS, content=body, headers=headers)
            error = error_of(response, 413, HTTPStatus(413).phrase)
            assert "64 bytes" in error["message"]

    serve_http(ask, settings={"max_body_bytes": 64})


def test_body_value_limit():
    # The limit also counts separators inside strings, because the body is not parsed
    # yet.
    longest = b'{"prompt":"' + b"," * (MAX_MARKS - 2)

    async def ask(client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/json"}
        for body, status in ((longest + b'"}', 400), (longest + b',"}', 413)):
            response = await client.post(COMPLETIONS, content=body, headers=headers)
            assert response.status_code == status, response.text

    serve_http(ask)


@pytest.mark.parametrize("has_length", [False, True])
def test_client_reads_refusal_of_long_body(has_length: bool):
    long = b" " * (10 * 2**20)
    length = (
        f"Content-Length: {len(long)}" if has_length else "Transfer-Encoding: chunked"
    )
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
    with site_of() as site, socket.create_connection(site.address, 10) as client:
        # The client writes everything before it reads, as many clients do.
        client.sendall(head)
        if has_length:
            client.sendall(long)
        else:
            client.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(long), long))
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"4194304 bytes" in answer


def test_body_time_limit_with_any_protocol():
    # The limit also holds if another program handles the connections, like the proxy of
    # Ray Serve.
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{"
    with (
        site_of(timeout_read_body=0.3) as site,
        socket.create_connection(site.address, 10) as client,
    ):
        client.sendall(head.encode())
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert site.app.state.serving.admission.num_timeouts["body"] == 1


def test_expect_100_continue_is_refused_first():
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    head += f"Content-Length: {10**9}\r\n\r\n"
    with site_of() as site, socket.create_connection(site.address, 10) as client:
        client.sendall(head.encode())
        assert client.recv(2**16).startswith(b"HTTP/1.1 413")


def test_cors():
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}

    async def closed(client: httpx.AsyncClient) -> None:
        response = await client.options(COMPLETIONS, headers=preflight)
        assert "access-control-allow-origin" not in response.headers

    async def opened(client: httpx.AsyncClient) -> None:
        response = await client.options(COMPLETIONS, headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        # Error responses must have the header too, or browsers cannot read them.
        response = await client.post(
            COMPLETIONS, json=BODY, headers={"Origin": "http://page"}
        )
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://page"

    serve_http(closed)
    settings = {"allowed_origins": ("http://page",), "api_keys": ("k",)}
    serve_http(opened, settings=settings)


def test_responses_have_request_id():
    async def ask(client: httpx.AsyncClient) -> None:
        response = await client.get("/health", headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        response = await client.post(COMPLETIONS, json=BODY)
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
        long = {"X-Request-Id": "x" * 5000}
        response = await client.get("/health", headers=long)
        assert response.headers["x-request-id"] == "x" * 256

    async def without(client: httpx.AsyncClient) -> None:
        assert "x-request-id" not in (await client.get("/health")).headers
        assert (await post(client, COMPLETIONS, **BODY))["id"]

    serve_http(ask, settings={"enable_request_id_headers": True})
    serve_http(without)
