"""Limits on the number of waiting requests, beyond which others are refused.

Under overload, admitted requests get correct answers and others are refused.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from jaxspec.serve.admission import MAX_RETRY_S, Admission
from jaxspec.serve.errors import OverloadedError
from jaxspec.serve.settings import ServerSettings
from tests.support.fake_engines import letters, said
from tests.support.serving import COMPLETIONS, PROMPT, error_of, serve_http, site_of


def admission(**limits: Any) -> Admission:
    return Admission(ServerSettings(**limits), max_num_seqs=2)


def test_refuses_texts_over_queue_limit():
    door = admission(max_num_queued_reqs=1)
    with door.admit(["a"], [5], 2), door.admit(["b"], [5], 1):
        assert set(door.request_ids) == {"a", "b"}
        with pytest.raises(
            OverloadedError, match="2 texts would wait, but at most 1 are allowed"
        ):
            door.admit(["c"], [5], 1).__enter__()
        assert door.num_requests == 2
    with pytest.raises(ZeroDivisionError), door.admit(["c"], [5], 3):
        raise ZeroDivisionError  # an error also releases the places
    with door.admit(["c"], [5], 3):
        assert door.num_requests == 1
    with pytest.raises(OverloadedError), door.admit(["d"], [5], 4):
        pass
    assert door.num_refused == {"queued_reqs": 2, "queued_tokens": 0, "connections": 0}
    assert door.num_requests == 0


def test_refuses_tokens_over_queue_limit():
    door = admission(max_num_queued_tokens=10, max_num_queued_reqs=None)
    with door.admit(["a", "b"], [500, 500], 1), door.admit(["c"], [10], 1):
        with pytest.raises(OverloadedError, match="11 prompt tokens"):
            door.admit(["d"], [1], 1).__enter__()
    with door.admit(["d"], [10**6], 1):
        pass  # a request that need not wait is admitted at any length
    assert door.num_refused == {"queued_reqs": 0, "queued_tokens": 1, "connections": 0}


def test_retry_after_is_bounded():
    door = admission(max_num_queued_reqs=1000)
    with door.admit(["a"], [5], 1002):
        with pytest.raises(OverloadedError) as refused:
            door.admit(["b"], [5], 1).__enter__()
        assert refused.value.retry_after_s == MAX_RETRY_S


@pytest.mark.parametrize("is_stream", [False, True])
def test_refuses_excess_and_serves_admitted(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "max_tokens": 20, "stream": is_stream}
        asked = [client.post(COMPLETIONS, json=body) for _ in range(10)]
        answers = await asyncio.gather(*asked)
        refused = [one for one in answers if one.status_code != 200]
        assert len(refused) == 10 - 3 - 2
        for one in refused:
            error_of(one, 503, "ServiceUnavailableError")
            assert int(one.headers["retry-after"]) >= 1
        metrics = (await client.get("/metrics")).text
        name = "vllm:admission_rejections_total"
        labels = 'engine="0",model_name="target",reason="queued_reqs"'
        assert f"{name}{{{labels}}} 5.0" in metrics

    serve_http(ask, settings={"max_num_queued_reqs": 2}, delay_s=0.02)


PLACES = 4
ENGINE = {"max_num_seqs": PLACES, "num_pages": 96}
QUEUE_LENGTH = 6
# Numbers of tokens of the prompts.
LENGTHS = (3, 6, 15)
NUM_TOKENS = 12
# Requests are sent at this multiple of the server's capacity.
FACTOR = 5.0
GOAL_RECOVERY_S = 10.0
# The server has recovered once a request takes at most this multiple of the usual time.
NORMAL = 2.0


class Load:
    """A client of one server that records the outcomes of its requests.

    Attributes:
        took_s: Seconds of each answered request.
        refused_s: Seconds of each refused request.
        others: Counts of all other outcomes, by name.
        max_inside: Maximum number of running and waiting requests at one time.
    """

    def __init__(self, client: httpx.AsyncClient):
        self._client = client
        self._random = random.Random(0)
        self.took_s, self.refused_s = list[float](), list[float]()
        self.others = Counter[str]()
        self.max_inside = 0

    async def ask(self) -> float:
        """Send one request, and record its outcome; return its seconds."""
        length = self._random.choice(LENGTHS)
        body = {"prompt": letters([2, 3, 4] * (length // 3)), "max_tokens": NUM_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        start = time.monotonic()
        try:
            response = await self._client.post(COMPLETIONS, json=body)
        except httpx.TransportError as error:
            self.others[type(error).__name__] += 1
            return 0.0
        took_s, status = time.monotonic() - start, response.status_code
        text = letters(said(length + NUM_TOKENS - 3)[length - 3 :])
        if status == 503 and "retry-after" in response.headers:
            self.refused_s.append(took_s)
        elif status != 200:
            self.others[str(status)] += 1
        elif response.json()["choices"][0]["text"] != text:
            self.others["wrong text"] += 1
        else:
            self.took_s.append(took_s)
        return took_s

    async def flood(self, rate: float, seconds: float) -> None:
        """Send requests at a rate, with Poisson gaps, without waiting for responses."""
        start, due = time.monotonic(), 0.0
        watching = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as group:
            while (due := due + self._random.expovariate(rate)) < seconds:
                await asyncio.sleep(start + due - time.monotonic())
                group.create_task(self.ask())
        watching.cancel()

    async def _watch(self) -> None:
        names = ("vllm:num_requests_waiting{", "vllm:num_requests_running{")
        while True:
            lines = (await self._client.get("/metrics")).text.splitlines()
            counts = [
                float(line.split()[-1]) for line in lines if line.startswith(names)
            ]
            self.max_inside = max(self.max_inside, int(sum(counts)))
            await asyncio.sleep(0.5)

    async def recovery_s(self, usual_s: float) -> float:
        """Return the number of seconds until requests take no longer than usual."""
        start, normal_since = time.monotonic(), 0.0
        while time.monotonic() < start + 50 * usual_s:
            if await self.ask() > NORMAL * usual_s:
                normal_since = time.monotonic() - start
        return normal_since


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 24])
def test_server_survives_overload_by_factor_five(seconds: int):
    async def overload(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
            load = Load(http)
            usual_s = statistics.median([await load.ask() for _ in range(10)])
            await load.flood(FACTOR * PLACES / usual_s, seconds)
            median_s = statistics.median(load.took_s)
            assert len(load.refused_s) > len(load.took_s) > seconds * 4
            assert statistics.median(load.refused_s) < median_s
            assert QUEUE_LENGTH <= load.max_inside <= QUEUE_LENGTH + PLACES
            num_refused = len(load.refused_s)
            assert await load.recovery_s(usual_s) < GOAL_RECOVERY_S
            assert (len(load.refused_s), not load.others) == (num_refused, True)

    with site_of(ENGINE, max_num_queued_reqs=QUEUE_LENGTH) as site:
        site.delay_s = 0.02
        asyncio.run(overload(site.url))
