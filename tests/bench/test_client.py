"""The HTTP client and event streams, with a server that sends given bytes in pieces."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from jaxspec.bench import client as module
from jaxspec.bench.client import Answer, Client, HttpError, fetch, request
from jaxspec.bench.data import Prompt

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}


@contextlib.asynccontextmanager
async def sending(
    pieces: Sequence[bytes], received: list[bytes] | None = None
) -> AsyncIterator[str]:
    """Run a server that reads one request and writes these pieces; yield its URL."""
    handlers: list[asyncio.Task[None]] = []

    async def answer_one(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.decode().lower().splitlines():
                if line.startswith("content-length: "):
                    length = int(line.rpartition(" ")[2])
            body = await reader.readexactly(length)
            if received is not None:
                received.extend([head, body])
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.001)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(answer_one(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield f"http://{host}:{port}/base"
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)  # lets the event loop finish closed connections


async def answer_to(pieces: Sequence[bytes]) -> tuple[int, bytes]:
    async with sending(pieces) as url, request(f"{url}/x") as response:
        return response.status_code, await response.aread()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\n\r\nhe", b"llo"],
        [CHUNKED[:20], CHUNKED[20:] + b"5\r", b"\nhel", b"lo\r\n0\r\n\r\n"],
    ],
)
def test_reads_a_body_in_any_form(pieces):
    assert asyncio.run(answer_to(pieces)) == (200, b"hello")


def test_pieces_arrive_before_the_end():
    """The server keeps the stream open: waiting for its end would block forever."""

    async def first_piece() -> bytes:
        pieces = [CHUNKED, b"3\r\none\r\n"] + [b""] * 10_000
        async with sending(pieces) as url, request(f"{url}/x") as response:
            return await anext(response.aiter_raw())

    assert asyncio.run(asyncio.wait_for(first_piece(), 5)) == b"one"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "illegal status line"),
        ([b""], "without sending a response"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"], "received 5 bytes"),
        ([CHUNKED, b"5\r\nhe"], "incomplete chunked read"),
    ],
)
def test_broken_http_is_an_error(pieces, message):
    with pytest.raises(HttpError, match=message):
        asyncio.run(answer_to(pieces))


def test_request_is_json_without_compression():
    async def post(received: list[bytes]) -> None:
        answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
        async with sending(answer, received) as url:
            headers = {"Authorization": "Bearer k"}
            async with request(f"{url}/x", body={"a": "ä"}, headers=headers) as one:
                assert one.status_code == 200

    received: list[bytes] = []
    asyncio.run(post(received))
    head, body = received
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/x HTTP/1.1"
    assert {
        "Authorization: Bearer k",
        "Connection: close",
        "Accept-Encoding: identity",
    } <= set(lines)
    assert json.loads(body) == {"a": "ä"}


def client_of(url: str = "http://h", endpoint: str = "/v1/completions") -> Client:
    return Client(url=url, endpoint=endpoint, fields={"model": "m"}, headers={})


def events(*items: Any) -> bytes:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in items]
    return "".join(f"data: {line}\r\n\r\n" for line in lines).encode()


def text(said: str) -> dict[str, Any]:
    return {"choices": [{"text": said}]}


def delta(said: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": said}}]}


def answer_from(*pieces: bytes, status: str = "200 OK") -> Answer:
    """Return the client's answer from a server with this status and these pieces."""

    async def ask() -> Answer:
        head = CHUNKED.replace(b"200 OK", status.encode())
        chunks = [f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in pieces]
        async with sending([head, *chunks, b"0\r\n\r\n"]) as url:
            return await client_of(url).ask(Prompt(text="hi"))

    return asyncio.run(ask())


def test_requests_are_streams_with_usage():
    body = client_of().body(Prompt(text="hi"))
    own = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"prompt": "hi", "model": "m", **own}
    chat = client_of(endpoint="/v1/chat/completions").body(Prompt(text="hi"))
    messages = [{"role": "user", "content": "hi"}]
    assert chat == {"messages": messages, "model": "m", **own}


@pytest.mark.parametrize("form", [text, delta])
def test_answer_has_text_and_times(form, monkeypatch):
    ticks = itertools.count(100.0)
    monkeypatch.setattr(module, "now", lambda: next(ticks))
    # Neither the role before the text nor a comment counts as a token.
    sent = [form(""), form("ab"), form("cd"), form("ef"), USAGE, "[DONE]"]
    found = answer_from(events(*sent[:2]) + b": ping\r\n\r\n", events(*sent[2:]))
    assert (found.error, found.text) == ("", "abcdef")
    assert (found.num_prompt_tokens, found.num_output_tokens) == (3, 6)
    # The request is sent at 100; events arrive at 101 to 106, with text at 102 to 104.
    assert (found.ttft_s, found.inter_token_s, found.latency_s) == (2, [1, 1], 4)
    assert found.tpot_s == (4 - 2) / 5
    assert found.times() == [102, 103, 104]


def test_events_may_be_cut_anywhere():
    # U+2028 and U+0085 are text, not line ends.
    said = json.dumps(text("a\u2028b\u0085ä"), ensure_ascii=False)
    body = events(said, text("€b"), USAGE, "[DONE]")
    for cut in range(1, len(body), 7):
        assert answer_from(body[:cut], body[cut:]).text == "a\u2028b\u0085ä€b"
    # Pieces are counted if the server reports no usage.
    found = answer_from(events(text("a"), text("b"), "[DONE]"))
    assert (found.error, found.num_output_tokens) == ("", 2)
    one = answer_from(events(text("a"), "[DONE]"))
    assert (one.num_output_tokens, one.tpot_s) == (1, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (events(text("a")), "broke off"),
        (events(text("a"), {"error": {"message": "boom"}}), "boom"),
        (events(USAGE, "[DONE]"), "no text"),
        (events("{"), "JSONDecodeError"),
        (events("[1]"), "not a response"),
    ],
)
def test_failure_is_in_the_answer(body, message):
    assert message in answer_from(body).error


def test_refusal_and_missing_server_are_errors():
    async def get() -> None:
        refusal = [b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno"]
        async with sending(refusal) as url:
            with pytest.raises(HttpError, match="status 401: no") as caught:
                await fetch(f"{url}/x")
            assert caught.value.status == 401
        with pytest.raises(HttpError, match="/x: ConnectError"):
            await fetch(f"{url}/x")

    asyncio.run(get())
    found = answer_from(b'{"error": "no such model"}', status="404 Not Found")
    assert found.status == 404
    assert found.error == 'status 404: {"error": "no such model"}'
    found = asyncio.run(client_of("http://127.0.0.1:1").ask(Prompt(text="x")))
    assert "127.0.0.1:1/v1/completions" in found.error
