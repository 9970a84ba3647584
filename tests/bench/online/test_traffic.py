"""When requests start, and how many are at work."""

import asyncio

import numpy as np
import pytest

from jaxspec.bench.data import Prompt
from jaxspec.bench.online.client import Answer
from jaxspec.bench.online.traffic import Load, send


def test_without_a_rate_all_start_at_once():
    assert Load().starts(3) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_times_between_requests_follow_the_law(burstiness):
    load = Load(request_rate=20.0, burstiness=burstiness, seed=3)
    starts = load.starts(20_000)
    assert starts == load.starts(20_000)
    gaps = np.diff(starts)
    assert starts[-1] == pytest.approx(1000)
    # A gamma law of this shape has the deviation mean / sqrt(shape).
    assert gaps.std() * 20 == pytest.approx(burstiness**-0.5, rel=0.05)
    assert Load(request_rate=20.0, seed=4).starts(9) != starts[:9]


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_no_more_at_a_time_than_allowed(limit):
    now = most = 0

    async def ask(prompt: Prompt) -> Answer:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return Answer(text=prompt.text)

    prompts = [Prompt(text=str(i)) for i in range(8)]
    done: list[int] = []
    answers, seconds = asyncio.run(
        send(prompts, Load(max_concurrency=limit), ask, lambda: done.append(1))
    )
    assert [answer.text for answer in answers] == [str(i) for i in range(8)]
    assert most == (limit or 8)
    assert seconds >= 0.001 * 8 / most
    assert len(done) == 8


def test_a_rate_is_kept():
    async def ask(_: Prompt) -> Answer:
        return Answer()

    load = Load(request_rate=100.0)
    _, seconds = asyncio.run(send([Prompt(text="x")] * 20, load, ask))
    assert seconds == pytest.approx(0.2, abs=0.15)
    assert seconds >= 0.2
