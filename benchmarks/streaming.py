"""What the server adds to a stream: 64 clients of an engine that takes fixed rounds.

    python -m benchmarks.streaming

The server's process has one core. Its engine runs over a device that only waits (see
`host_overhead`), so that every stream gets `TOKENS_PER_S`; the clients, in another
process, read each event and look at the clock. Added latency is from when the round's
result was there to when a client had read its tokens: the host's part of the round, the
texts, the queue between engine and server, JSON, HTTP.
Writes benchmarks/results/streaming.json.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from bisect import bisect_left
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.host_overhead import NUM_DRAFT_TOKENS, make_engine
from jaxspec.bench.report import num_cores, record
from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.serve.app import make_app
from jaxspec.serve.launcher import freeze_heap
from jaxspec.serve.settings import ServerSettings

RESULT = Path(__file__).with_name("results") / "streaming.json"
NUM_SEQS = 64
TOKENS_PER_S = 100.0
# Any number of drafts is accepted, none as often as all.
TOKENS_PER_ROUND = 1 + NUM_DRAFT_TOKENS / 2
GOAL_S = 0.010
WARM_UP_S = 3.0

# Of one stream: when, and how many tokens it had then.
Counts = list[tuple[float, int]]


def serve(bound: socket.socket, seconds: float, report: Connection) -> None:
    """The server's process: serves until it is told to end, then tells what it saw."""
    if num_cores() > 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokens = int(2 * TOKENS_PER_S * (seconds + WARM_UP_S))
    engine, runner = make_engine(
        NUM_SEQS, 1024 + tokens, TOKENS_PER_ROUND / TOKENS_PER_S
    )
    counts: dict[str, Counts] = {}
    step = engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        for output in outputs:
            mine = counts.setdefault(output.request_id, [])
            before = mine[-1][1] if mine else 0
            num_tokens = before + len(output.outputs[0].token_ids)
            mine.append((runner.fetched_ts, num_tokens))
        return outputs

    engine.step = watched
    serving = AsyncLLMEngine(engine)
    app = make_app(serving, ServerSettings())
    server = uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="error"))

    freeze_heap()

    async def run() -> None:
        running = asyncio.create_task(server.serve(sockets=[bound]))
        used = time.process_time()
        await asyncio.to_thread(report.recv)
        report.send((counts, time.process_time() - used))
        server.should_exit = server.force_exit = True
        await running

    asyncio.run(run())
    serving.shutdown(1.0)


async def read_stream(port: int, number: int, until: float) -> list[tuple[float, str]]:
    """Ask for a stream and read it to a time; its lines, and when they were there."""
    body = json.dumps(
        {
            "prompt": [400 + number] * 16,
            "max_tokens": None,
            "ignore_eos": True,
            "stream": True,
            "request_id": f"stream{number}",
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    lines = []
    while time.monotonic() < until:
        line = await reader.readline()
        assert line, "the server closed a stream"
        if line.startswith(b"data: "):
            lines.append((time.monotonic(), line.decode()))
    writer.close()
    return lines


async def read_all(port: int, seconds: float) -> list[list[tuple[float, str]]]:
    until = time.monotonic() + WARM_UP_S + seconds
    streams = [read_stream(port, number, until) for number in range(NUM_SEQS)]
    return await asyncio.gather(*streams)


def delays(made: Counts, lines: list[tuple[float, str]], start: float) -> list[float]:
    """Seconds from each round to the event with its last token."""
    totals = [num_tokens for _, num_tokens in made]
    found = []
    for then, line in lines:
        usage = json.loads(line.removeprefix("data: "))["usage"]
        num_tokens = usage["completion_tokens"]
        if then < start or not num_tokens:
            continue
        ready, _ = made[bisect_left(totals, num_tokens)]
        found.append(then - ready)
    return found


def measure(seconds: float) -> dict[str, Any]:
    """Serve and read for a time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_SEQS) as bound:
        port = bound.getsockname()[1]
        process = context.Process(target=serve, args=(bound, seconds, theirs))
        process.start()
    start = time.monotonic() + WARM_UP_S
    lines = asyncio.run(read_all(port, seconds))
    ours.send("end")
    counts, cpu_s = ours.recv()
    process.join(30)
    by_number = {name.split("-")[1]: made for name, made in counts.items()}
    start = max(start, min(stream[0][0] for stream in lines) + WARM_UP_S)
    end = min(stream[-1][0] for stream in lines)
    found = sorted(
        delay
        for number, stream in enumerate(lines)
        for delay in delays(by_number[f"stream{number}"], stream, start)
    )
    made = sum(
        num_tokens if then <= end else 0
        for stream in by_number.values()
        for (then, _), num_tokens in zip(stream, _steps(stream), strict=True)
        if then >= start
    )
    return {
        "streams": NUM_SEQS,
        "tokens_per_s": round(made / (end - start)),
        "wanted_tokens_per_s": NUM_SEQS * TOKENS_PER_S,
        "events": len(found),
        "added_ms": {
            name: round(1e3 * found[int(share * (len(found) - 1))], 2)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "mean_added_ms": round(1e3 * statistics.mean(found), 2),
        "server_cores": round(cpu_s / (end - start + WARM_UP_S), 2),
    }


def _steps(stream: Counts) -> list[int]:
    """Tokens of each round."""
    totals = [0, *(num_tokens for _, num_tokens in stream)]
    return [after - before for before, after in zip(totals, totals[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the server adds to a stream.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = measure(options.seconds) | {"goal_p99_ms": 1e3 * GOAL_S}
    command = "python -m benchmarks.streaming"
    print(json.dumps(record(result, options.out, command=command)))


if __name__ == "__main__":
    main()
