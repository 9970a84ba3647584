"""Clients disconnect at any time, and nothing remains of their requests."""

import asyncio
import json
import random
import socket
import struct
import time
from typing import Any

import pytest

from tests.support.fake_engines import letters, said
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT,
    Site,
    events_of,
    site_of,
)

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
    return to_bytes(path, body)


def to_bytes(path: str, body: dict[str, Any]) -> bytes:
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
    reader, writer = await asyncio.open_connection(*site.address)
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    request = to_bytes(COMPLETIONS, body)
    writer.write(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
    answer = (await reader.read()).decode()
    writer.close()
    # Each HTTP chunk is preceded by a line with its length.
    lines = [line for line in answer.split("\r\n") if line.startswith("data: ")]
    chunks = events_of("".join(lines))
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == letters(said(30))


async def disconnect(site: Site, count: int) -> None:
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
        asyncio.run(disconnect(site, count))
        engine = site.engine.engine
        assert engine.scheduler.pool.num_free == ENGINE["num_pages"]
        assert not any(one.collectors for one in site.engine._drivers)
