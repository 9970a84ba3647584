"""Arrival times and concurrency of requests."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.bench.client import Answer
from jaxspec.bench.data import Prompt

Ask = Callable[[Prompt], Awaitable[Answer]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Arrival rate and concurrency of requests.

    Attributes:
        request_rate: Requests/s; infinity sends all at once.
        max_concurrency: Maximum concurrent requests; None for no limit.
        burstiness: Shape parameter of the gamma distribution of the times between
            requests: 1 is a Poisson process, smaller values are burstier, larger ones
            more regular.
    """

    request_rate: float = float("inf")
    max_concurrency: int | None = None
    burstiness: float = 1.0
    seed: int = 0

    def starts(self, count: int) -> list[float]:
        """Return the start time of each request, in seconds."""
        if np.isinf(self.request_rate):
            return [0.0] * count
        draw = np.random.default_rng(self.seed)
        scale = 1 / (self.request_rate * self.burstiness)
        gaps = draw.gamma(self.burstiness, scale, count)
        starts = gaps.cumsum()
        # Scale the start times so that the last request starts at count / request_rate
        # seconds.
        return (starts * (count / self.request_rate / starts[-1])).tolist()


async def send(
    prompts: Sequence[Prompt],
    load: Load,
    ask: Ask,
    advance: Callable[[], object] = lambda: None,
) -> tuple[list[Answer], float]:
    """Send all prompts.

    Args:
        advance: Called after every answer, for a progress bar.

    Returns:
        Answers in the order of the prompts, and the seconds until the last.
    """
    limit: contextlib.AbstractAsyncContextManager = contextlib.nullcontext()
    if load.max_concurrency is not None:
        limit = asyncio.Semaphore(load.max_concurrency)
    begin = time.perf_counter()

    async def one(prompt: Prompt, start_s: float) -> Answer:
        await asyncio.sleep(max(begin + start_s - time.perf_counter(), 0))
        async with limit:
            answer = await ask(prompt)
        advance()
        return answer

    starts = load.starts(len(prompts))
    pairs = zip(prompts, starts, strict=True)
    answers = await asyncio.gather(*(one(*pair) for pair in pairs))
    return answers, time.perf_counter() - begin
