"""HTTP against a server that says its bytes as a test wants them, in any pieces."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from jaxspec.bench.online.connection import Address, HttpError, fetch, request
from jaxspec.errors import ConfigError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def saying(
    answer: Sequence[bytes], asked: list[bytes] | None = None
) -> AsyncIterator[Address]:
    """A server that reads one request and then writes these pieces."""
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
            if asked is not None:
                asked.extend([head, body])
            for piece in answer:
                writer.write(piece)
                await asyncio.sleep(0.001)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(answer_one(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield Address(host=host, port=port, path="/base")
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)  # closed connections are let go


async def asked_of(answer: Sequence[bytes]) -> tuple[int, bytes]:
    async with saying(answer) as address:
        async with request(address, "/x") as response:
            return response.status_code, await response.aread()


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200 OK\r\n\r\nhe", b"llo"],
        [CHUNKED, b"2;x=y\r\nhe\r\n3\r\n", b"llo\r\n0\r\n\r\n"],
        [CHUNKED[:20], CHUNKED[20:] + b"5\r", b"\nhel", b"lo\r\n0\r\n\r\n"],
    ],
)
def test_bodies_in_all_forms(answer):
    assert asyncio.run(asked_of(answer)) == (200, b"hello")


def test_pieces_come_before_the_end():
    async def first_piece() -> bytes:
        # The stream stays open: whoever waits for its end waits for ever.
        pieces = [CHUNKED, b"3\r\none\r\n"] + [b""] * 10_000
        async with saying(pieces) as address:
            async with request(address, "/x") as response:
                async for piece in response.aiter_raw():
                    return piece
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(first_piece(), 5)) == b"one"


def test_a_body_is_sent_as_json():
    async def ask(asked: list[bytes]) -> None:
        answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
        async with saying(answer, asked) as address:
            headers = {"Authorization": "Bearer k"}
            asking = request(address, "/x", body={"a": "ä"}, headers=headers)
            async with asking as response:
                assert response.status_code == 200

    asked: list[bytes] = []
    asyncio.run(ask(asked))
    head, body = asked
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/x HTTP/1.1"
    assert "Authorization: Bearer k" in lines
    assert "Connection: close" in lines
    assert "Accept-Encoding: identity" in lines
    assert json.loads(body) == {"a": "ä"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "without sending a response"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "illegal status line"),
        ([b""], "without sending a response"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello"], "received 5 bytes"),
        ([CHUNKED, b"5\r\nhe"], "incomplete chunked read"),
        ([CHUNKED, b"five\r\n"], "illegal chunk header"),
    ],
)
def test_what_is_no_answer_is_an_error(answer, said):
    with pytest.raises(HttpError, match=said):
        asyncio.run(asked_of(answer))


def test_no_connection_is_an_error():
    async def ask() -> None:
        async with saying([]) as address:
            pass
        await fetch(address, "/x")

    with pytest.raises(HttpError, match="/x: ConnectError"):
        asyncio.run(ask())


def test_a_status_that_is_not_200_is_an_error_of_fetch():
    async def ask() -> str:
        answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno"
        async with saying([answer]) as address:
            return await fetch(address, "/x")

    with pytest.raises(HttpError, match="status 401: no") as caught:
        asyncio.run(ask())
    assert caught.value.status == 401


def test_addresses():
    assert Address.from_url("http://h:1/v/") == Address(host="h", port=1, path="/v")
    secure = Address.from_url("https://h")
    assert (secure.port, secure.is_secure) == (443, True)
    assert secure.url == "https://h:443"
    assert Address.from_url("http://[::1]:8000").netloc == "[::1]:8000"
    assert Address.from_url("http://[::1]:8000/v/").url == "http://[::1]:8000/v"
    for wrong in ("h:1", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(ConfigError, match="--base-url must be a URL"):
            Address.from_url(wrong)
