"""Requests are cancelled on disconnect, events serialized, slow streams merged.

Clients disconnect at any time, and nothing remains of their requests.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
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
from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Site,
    post,
    site_of,
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


def test_stream_is_closed_if_the_client_leaves_during_a_send():
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield "data: 1\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    async def run() -> None:
        stream = events()  # a reference: garbage collection would also close it
        await EventStream(stream)({}, gone, send)
        assert closed

    asyncio.run(run())


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


def test_merge_yields_all_and_does_not_run_ahead():
    made: list[int] = []

    async def eager() -> AsyncGenerator[int, None]:
        for index in range(100):
            made.append(index)
            yield index

    async def run() -> None:
        found: dict[int, list[int]] = {0: [], 2: []}
        async for number, index in merge([eager(), count(0), count(3)]):
            found[number].append(index)
            await asyncio.sleep(0.001)
            assert len(made) <= sum(map(len, found.values())) + 1
        assert found == {0: list(range(100)), 2: [0, 1, 2]}

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


# There are too few rows and pages for all requests: some wait, some are preempted.
ENGINE = {"max_num_seqs": 6, "num_pages": 60, "max_num_batched_tokens": 64}
AT_ONCE = 24
LIMIT_S = 1.0
RESET = struct.pack("ii", 1, 0)


def make_request(choose: random.Random) -> bytes:
    """Make a request of a random kind; all take longer than their client stays."""
    path = choose.choice((COMPLETIONS, CHAT, "/v1/responses"))
    body: dict[str, Any] = {"stream": choose.random() < 0.7, "ignore_eos": True}
    if path == COMPLETIONS:
        prompts = [PROMPT * choose.randint(1, 8) for _ in range(choose.randint(1, 3))]
        body |= {"prompt": prompts, "max_tokens": 60, "n": choose.randint(1, 3)}
    elif path == CHAT:
        body |= {"messages": MESSAGES, "max_tokens": 80}
    else:
        body |= {"input": PROMPT, "max_output_tokens": 80}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def disconnect_early(site: Site, choose: random.Random) -> None:
    """Send all or part of a request, read for a while, and disconnect."""
    reader, writer = await asyncio.open_connection(*site.address)
    request = make_request(choose)
    is_whole = choose.random() < 0.9
    writer.write(request if is_whole else request[: choose.randrange(len(request))])
    read_s = choose.choice((0.0, 0.001, 0.01, 0.05)) * choose.random()
    try:
        async with asyncio.timeout(read_s):
            await reader.read()
    except TimeoutError:
        pass
    if choose.random() < 0.5:  # resets the connection instead of closing it
        bound = writer.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    writer.close()


async def read_stream(site: Site) -> None:
    """Request a stream while others disconnect, and read all of it."""
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
        chunks = await post(client, COMPLETIONS, **body)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == letters(said(30))


async def disconnect_many(site: Site, count: int) -> None:
    choose = random.Random(count)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await (
                read_stream(site)
                if number % 20 == 0
                else disconnect_early(site, choose)
            )

    await asyncio.gather(*(one(number) for number in range(count + count // 19)))
    start, worked = time.monotonic(), time.process_time()
    while (
        site.app.state.serving.admission.num_requests
        or await site.engine.get_num_unfinished_requests()
    ):
        await asyncio.sleep(0.01)
        took_s = time.monotonic() - start
        # The wait is in CPU time: on a busy machine, a second may have none.
        is_busy = time.process_time() - worked < LIMIT_S and took_s < 30 * LIMIT_S
        assert took_s < LIMIT_S or is_busy, "requests are left"


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_disconnected_clients_leave_nothing(count: int):
    with site_of(ENGINE) as site:
        site.delay_s = 0.002
        asyncio.run(disconnect_many(site, count))
        engine = site.engine.engine
        assert engine.scheduler.pool.num_free == ENGINE["num_pages"]
        assert not any(one.collectors for one in site.engine._drivers)
