"""Under overload, admitted requests get correct answers and others are refused."""

import asyncio
import random
import statistics
import time
from collections import Counter

import httpx
import pytest

from tests.support.serving import PROMPT, site_of

PLACES = 4
ENGINE = {"max_num_seqs": PLACES, "num_pages": 96}
QUEUE_LENGTH = 6
PROMPTS = (PROMPT, PROMPT * 2, PROMPT * 5)
NUM_TOKENS = 12
# Requests are sent at this multiple of the server's capacity.
FACTOR = 5.0
PROBES = 10
GOAL_RECOVERY_S = 10.0
# The server has recovered once a request takes at most this multiple of the usual time.
NORMAL = 2.0


class Outcomes:
    """Outcomes of requests.

    Attributes:
        took_s: Seconds of each answered request.
        refused_s: Seconds of each refused request.
        others: Counts of all other outcomes, by name.
        max_inside: Maximum number of running and waiting requests at one time.
    """

    def __init__(self) -> None:
        self.took_s, self.refused_s = list[float](), list[float]()
        self.others = Counter[str]()
        self.max_inside = 0


class Load:
    """A client of one server that knows the correct text of every prompt."""

    def __init__(self, client: httpx.AsyncClient):
        self._client = client
        self._texts: dict[str, str] = {}
        self._random = random.Random(0)

    async def ask(self, prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True}
        return await self._client.post("/v1/completions", json=body)

    async def learn(self) -> float:
        """Send requests one by one and store the texts; return the median seconds."""
        took_s = []
        for number in range(PROBES):
            prompt = PROMPTS[number % len(PROMPTS)]
            start = time.monotonic()
            response = await self.ask(prompt)
            took_s.append(time.monotonic() - start)
            text = response.raise_for_status().json()["choices"][0]["text"]
            assert self._texts.setdefault(prompt, text) == text
        return statistics.median(took_s)

    async def record(self, outcomes: Outcomes) -> None:
        """Send one request, and record its outcome and time."""
        prompt = self._random.choice(PROMPTS)
        start = time.monotonic()
        try:
            response = await self.ask(prompt)
        except httpx.TransportError as error:
            outcomes.others[type(error).__name__] += 1
            return
        took_s, status = time.monotonic() - start, response.status_code
        if status == 503 and "retry-after" in response.headers:
            outcomes.refused_s.append(took_s)
        elif status != 200:
            outcomes.others[str(status)] += 1
        elif response.json()["choices"][0]["text"] != self._texts[prompt]:
            outcomes.others["wrong text"] += 1
        else:
            outcomes.took_s.append(took_s)

    async def capacity(self, seconds: float) -> float:
        """Return requests per second of clients that each wait for their answers."""
        outcomes, end = Outcomes(), time.monotonic() + seconds

        async def keep_asking() -> None:
            while time.monotonic() < end:
                await self.record(outcomes)

        start = time.monotonic()
        await asyncio.gather(*(keep_asking() for _ in range(PLACES)))
        assert not outcomes.others, outcomes.others
        return len(outcomes.took_s) / (time.monotonic() - start)

    async def flood(self, rate: float, seconds: float) -> Outcomes:
        """Send requests at a rate, with Poisson gaps, without waiting for responses."""
        outcomes, start, due = Outcomes(), time.monotonic(), 0.0
        watching = asyncio.create_task(self._watch(outcomes))
        async with asyncio.TaskGroup() as group:
            while (due := due + self._random.expovariate(rate)) < seconds:
                await asyncio.sleep(start + due - time.monotonic())
                group.create_task(self.record(outcomes))
        watching.cancel()
        return outcomes

    async def _watch(self, outcomes: Outcomes) -> None:
        names = ("vllm:num_requests_waiting{", "vllm:num_requests_running{")
        while True:
            lines = (await self._client.get("/metrics")).text.splitlines()
            counts = [
                float(line.split()[-1]) for line in lines if line.startswith(names)
            ]
            outcomes.max_inside = max(outcomes.max_inside, int(sum(counts)))
            await asyncio.sleep(0.5)

    async def recovery_s(self, usual_s: float) -> float:
        """Return the number of seconds until requests take no longer than usual."""
        start, normal_since = time.monotonic(), 0.0
        while time.monotonic() < start + 50 * usual_s:
            sent = time.monotonic()
            (await self.ask(PROMPTS[0])).raise_for_status()
            if time.monotonic() - sent > NORMAL * usual_s:
                normal_since = time.monotonic() - start
        return normal_since


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, 24])
def test_server_survives_overload_by_factor_five(seconds: int):
    async def overload(url: str) -> tuple[Outcomes, float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
            load = Load(http)
            usual_s = await load.learn()
            rate = FACTOR * await load.capacity(seconds / 8)
            outcomes = await load.flood(rate, seconds)
            return outcomes, await load.recovery_s(usual_s)

    with site_of(ENGINE, max_num_queued_reqs=QUEUE_LENGTH) as site:
        site.delay_s = 0.02
        found, recovery_s = asyncio.run(overload(site.url))
    assert not found.others
    assert len(found.refused_s) > len(found.took_s) > seconds * 4
    assert QUEUE_LENGTH <= found.max_inside <= QUEUE_LENGTH + PLACES
    assert statistics.median(found.refused_s) < statistics.median(found.took_s)
    assert recovery_s < GOAL_RECOVERY_S
