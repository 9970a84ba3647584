"""Requests are cancelled on disconnect, events serialized, slow streams merged."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from jaxspec.serve.streaming import (
    ClientGoneError,
    EventStream,
    encoded,
    event,
    merge,
    while_connected,
)


async def never() -> Any:
    await asyncio.Event().wait()


async def gone() -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("letter", ["\x85", "\u2028", "\u2029", "\v", "\x1c", "\r"])
def test_event_is_one_line_for_every_client(letter: str):
    """Clients with `httpx.iter_lines` split at the separators of `str.splitlines`."""
    content = {"text": f"é{letter}\N{FLAMINGO}", letter: [letter]}
    data, end = event(content).splitlines()
    assert end == ""
    assert json.loads(data.removeprefix("data: ")) == content
    assert "é" in data and "\N{FLAMINGO}" in data
    assert event({"text": "a\n\n\u00e9"}) == 'data: {"text":"a\\n\\n\u00e9"}\n\n'


def test_work_runs_while_client_is_connected():
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


def test_disconnection_cancels_work():
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


@pytest.mark.parametrize("receive", [never, gone])
def test_stream_is_closed_however_it_ends(receive: Any):
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
    start, *parts = sent
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    whole = b"data: 1\n\n" if receive is gone else b"data: 1\n\ndata: 2\n\n"
    assert b"".join(one["body"] for one in parts) == whole
    assert parts[-1]["more_body"] == (receive is gone)


async def count(
    number: int, *, fails: bool = False, log: list[str] | None = None
) -> AsyncGenerator[int, None]:
    try:
        for index in range(number):
            await asyncio.sleep(0.001 * index)
            yield index
        if fails:
            raise ZeroDivisionError
    finally:
        if log is not None:
            log.append(f"closed {number}")


def test_merge_yields_all():
    async def run() -> None:
        found = [pair async for pair in merge([count(3), count(0), count(5)])]
        assert [index for number, index in found if number == 0] == [0, 1, 2]
        assert [index for number, index in found if number == 2] == list(range(5))
        assert len(found) == 8

    asyncio.run(run())


def test_merge_does_not_run_ahead():
    made: list[int] = []

    async def eager() -> AsyncGenerator[int, None]:
        for index in range(100):
            made.append(index)
            yield index

    async def run() -> None:
        seen = 0
        async for _ in merge([eager(), count(2)]):
            seen += 1
            await asyncio.sleep(0.001)
            assert len(made) <= seen + 1

    asyncio.run(run())


def test_end_of_merge_closes_all():
    log: list[str] = []

    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            async for _ in merge([count(2, fails=True), count(90, log=log)]):
                pass
        assert log == ["closed 90"]
        merged = merge([count(8, log=log), count(9, log=log)])
        await anext(merged)
        await merged.aclose()
        assert sorted(log) == ["closed 8", "closed 9", "closed 90"]

    asyncio.run(run())


def test_write_in_parts_equals_json_dumps():
    content = {"id": "\u00e9\u2028", "choices": [{"a": [1.5, None]}, "x"], "usage": {}}
    assert json.loads(encoded(content)) == content
    assert encoded(content) == JSONResponse(content).body
    with pytest.raises(ValueError, match="JSON compliant"):
        encoded({"choices": [float("nan")]})
