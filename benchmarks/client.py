"""Clients of a server: single requests, and when the parts of streams come."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from jaxspec.bench.online.connection import data_of

PROMPTS = (
    "The dragon looked at the map and",
    "Once upon a time there was a small robot who",
    "def add(a, b):",
    "Dear diary, today",
)
PROMPT = PROMPTS[0]
# As many as the longest sequence has room for, nearly.
LONG_STREAM_TOKENS = 7500
LONGEST_ANSWER_S = 300.0
POLL_S = 0.05


class Chunks:
    """When the parts of one or several streams came, one stream after the other."""

    def __init__(self):
        self.times: list[float] = []
        self.totals: list[int] = []

    def add(self, then: float, num_tokens: int) -> None:
        """Take down a part with so many new tokens."""
        self.times.append(then)
        self.totals.append(num_tokens + (self.totals[-1] if self.totals else 0))

    def largest_gap(self, since: float, until: float) -> float:
        """Longest time between two parts, of those that reach into the given time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        gaps = [after - then for then, after in pairs if after > since and then < until]
        return max(gaps, default=until - since)

    def rate(self, since: float, until: float) -> float:
        """Tokens per second in between."""
        return (self._total(until) - self._total(since)) / (until - since)

    def _total(self, at: float) -> int:
        return max(
            (n for then, n in zip(self.times, self.totals, strict=True) if then <= at),
            default=0,
        )

    def whole(self) -> dict[str, float]:
        """Of a stream that ran to its end."""
        first, last = self.times[0], self.times[-1]
        return {
            "tokens": self.totals[-1],
            "tokens_per_s": round((self.totals[-1] - self.totals[0]) / (last - first)),
            "gap_s": round(self.largest_gap(first, last), 3),
        }


def read_stream(
    client: httpx.Client,
    chunks: Chunks,
    *,
    num_tokens: int,
    until: Callable[[], bool] = lambda: False,
) -> Chunks:
    """Ask for a greedy stream and take down its parts, to its end or to a condition."""
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    before = 0
    with client.stream(
        "POST", "/v1/completions", json=body, timeout=LONGEST_ANSWER_S
    ) as response:
        response.raise_for_status()
        for data in data_of(response):
            now = time.monotonic()
            if data == "[DONE]":
                continue
            now_tokens = json.loads(data)["usage"]["completion_tokens"]
            if now_tokens > before:
                chunks.add(now, now_tokens - before)
                before = now_tokens
            if until():
                break
    return chunks


class Neighbour:
    """A client that reads streams, one after the other, until it is left."""

    def __init__(self, client: httpx.Client):
        self.chunks = Chunks()
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._is_over.is_set():
            read_stream(
                self._client,
                self.chunks,
                num_tokens=LONG_STREAM_TOKENS,
                until=self._is_over.is_set,
            )

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_beyond(self, moment: float) -> None:
        """Wait until it has got something later than that."""
        limit = time.monotonic() + LONGEST_ANSWER_S
        while not self.chunks.times or self.chunks.times[-1] <= moment:
            assert self._thread.is_alive(), "the neighbour's stream has failed"
            assert time.monotonic() < limit, "the neighbour's stream stands still"
            time.sleep(POLL_S)


def complete(client: httpx.Client, **more: Any) -> str:
    """The text of one request."""
    body = {"prompt": PROMPT, **more}
    given = {"json": body, "timeout": LONGEST_ANSWER_S}
    response = client.post("/v1/completions", **given).raise_for_status()
    return response.json()["choices"][0]["text"]
