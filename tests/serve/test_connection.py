"""Work that ends when nobody waits for it, and events on the wire."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from jaxspec.serve.connection import (
    ClientGoneError,
    EventStream,
    event,
    while_connected,
)


async def never() -> Any:
    await asyncio.Event().wait()


async def gone() -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


def test_work_goes_on_while_the_client_is_there():
    async def work() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def fail() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        assert await while_connected(never, work()) == 7
        with pytest.raises(ZeroDivisionError):
            await while_connected(never, fail())

    asyncio.run(run())


def test_work_is_cancelled_when_the_client_leaves():
    ended = []

    async def work() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def run() -> None:
        with pytest.raises(ClientGoneError):
            await while_connected(gone, work())
        assert ended

    asyncio.run(run())


def test_an_event_is_one_line():
    assert event({"text": "a\n\n\u00e9"}) == 'data: {"text":"a\\n\\n\u00e9"}\n\n'


@pytest.mark.parametrize("receive", [never, gone])
def test_a_stream_is_closed_however_it_ends(receive: Any):
    sent: list[Any] = []
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield "data: 1\n\n"
            if receive is gone:
                await never()
            yield "data: 2\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await EventStream(events())({}, receive, send)

    asyncio.run(run())
    assert closed
    start, *bodies = sent
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    whole = b"data: 1\n\n" if receive is gone else b"data: 1\n\ndata: 2\n\n"
    assert b"".join(one["body"] for one in bodies) == whole
    assert bodies[-1]["more_body"] == (receive is gone)
