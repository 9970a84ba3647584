"""More than the server can do: what is let in is answered, the rest is refused soon.

    python -m benchmarks.overload

Asks the bundled pair's server (`python -m jaxspec.serve`) for short greedy texts: each
alone, then as many as it can do, then for two minutes at `FACTOR` times that rate,
whether or not it answers (an open loop, with Poisson's gaps), then one by one again.
Every text must be the one that its prompt got alone. Writes
benchmarks/results/overload.json.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm.auto import tqdm

from benchmarks.client import PROMPTS
from benchmarks.server import samples, served
from jaxspec.bench.report import record

RESULT = Path(__file__).with_name("results") / "overload.json"
FACTOR = 5.0
QUEUE_LENGTH = 32
PROBES = 10
RECOVERY_S = 30.0
GOAL_RECOVERY_S = 10.0
# An answer in at most this many times the usual time is a normal one.
NORMAL = 2.0


@dataclass
class Answers:
    """What came of requests.

    Attributes:
        took_s: Of those with the right text.
        refused_s: Of those refused.
        others: How often anything else happened, by what it was.
        most_waiting: The longest queue seen.
        most_inside: The most texts seen in the server, running and waiting: a place
            that has just become free makes the queue longer by one for a moment.
    """

    took_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    most_waiting: int = 0
    most_inside: int = 0


class Load:
    """Asks one server."""

    def __init__(self, client: httpx.AsyncClient, prompts: tuple[str, ...], size: int):
        self._client, self._prompts, self._size = client, prompts, size
        self._texts: dict[str, str] = {}
        self._chance = random.Random(0)

    async def ask(self, prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": self._size, "temperature": 0}
        body |= {"ignore_eos": True}
        return await self._client.post("/v1/completions", json=body)

    async def learn(self) -> float:
        """Ask each prompt alone; the usual seconds of a request."""
        took_s = []
        for number in range(max(PROBES, len(self._prompts))):
            prompt = self._prompts[number % len(self._prompts)]
            start = time.monotonic()
            response = await self.ask(prompt)
            took_s.append(time.monotonic() - start)
            text = response.raise_for_status().json()["choices"][0]["text"]
            assert self._texts.setdefault(prompt, text) == text
        return statistics.median(took_s)

    async def note(self, answers: Answers) -> None:
        """One request, and what came of it."""
        prompt = self._chance.choice(self._prompts)
        start = time.monotonic()
        try:
            response = await self.ask(prompt)
        except httpx.TransportError as error:
            answers.others[type(error).__name__] += 1
            return
        took_s = time.monotonic() - start
        if response.status_code == httpx.codes.OK:
            if response.json()["choices"][0]["text"] == self._texts[prompt]:
                answers.took_s.append(took_s)
            else:
                answers.others["wrong text"] += 1
        elif response.status_code == 503 and "retry-after" in response.headers:
            answers.refused_s.append(took_s)
        else:
            answers.others[str(response.status_code)] += 1

    async def capacity(self, clients: int, seconds: float) -> float:
        """Requests per second of clients that each wait for their answer."""
        answers, end = Answers(), time.monotonic() + seconds

        async def ask_on() -> None:
            while time.monotonic() < end:
                await self.note(answers)

        start = time.monotonic()
        await asyncio.gather(*(ask_on() for _ in range(clients)))
        assert not answers.others, answers.others
        return len(answers.took_s) / (time.monotonic() - start)

    async def flood(self, rate: float, seconds: float) -> Answers:
        """Requests at a rate, whatever the server does."""
        answers, start, due = Answers(), time.monotonic(), 0.0
        watching = asyncio.create_task(self._watch(answers))
        async with asyncio.TaskGroup() as group:
            with tqdm(total=round(seconds), unit="s") as bar:
                while (due := due + self._chance.expovariate(rate)) < seconds:
                    await asyncio.sleep(start + due - time.monotonic())
                    group.create_task(self.note(answers))
                    bar.update(round(due) - bar.n)
        watching.cancel()
        return answers

    async def _watch(self, answers: Answers) -> None:
        while True:
            told = samples((await self._client.get("/metrics")).text)
            waiting = int(told["vllm:num_requests_waiting"])
            inside = waiting + int(told["vllm:num_requests_running"])
            answers.most_waiting = max(answers.most_waiting, waiting)
            answers.most_inside = max(answers.most_inside, inside)
            await asyncio.sleep(0.5)

    async def recovery_s(self, usual_s: float, end: Awaitable[Answers]) -> Any:
        """Seconds after a flood from which on all requests take as long as usual."""
        answers = await end
        start, normal_since = time.monotonic(), 0.0
        while time.monotonic() < start + min(RECOVERY_S, 50 * usual_s):
            sent = time.monotonic()
            (await self.ask(self._prompts[0])).raise_for_status()
            if time.monotonic() - sent > NORMAL * usual_s:
                normal_since = time.monotonic() - start
        return answers, normal_since


async def measure(
    url: str, *, clients: int, seconds: float, prompts=PROMPTS, size: int = 32
) -> dict[str, Any]:
    """Ask a server for more than it can do.

    Args:
        url: Of the server.
        clients: As many as it can serve at once.
        seconds: Of asking too much; an eighth of that finds out what is too much.
        prompts: To choose from.
        size: Tokens of each text.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
        load = Load(client, prompts, size)
        usual_s = await load.learn()
        capacity = await load.capacity(clients, seconds / 8)
        flood = load.flood(FACTOR * capacity, seconds)
        answers, recovery_s = await load.recovery_s(usual_s, flood)
    return {
        "seconds": seconds,
        "capacity_per_s": round(capacity, 2),
        "asked_per_s": round(FACTOR * capacity, 2),
        "answered_right": len(answers.took_s),
        "refused": len(answers.refused_s),
        "anything_else": dict(answers.others),
        "most_waiting": answers.most_waiting,
        "most_inside": answers.most_inside,
        "usual_s": round(usual_s, 4),
        "answered_median_s": round(statistics.median(answers.took_s), 4),
        "answered_max_s": round(max(answers.took_s), 4),
        "refused_median_s": round(statistics.median(answers.refused_s or [0.0]), 4),
        "normal_again_s": round(recovery_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="More than the server can do.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULT)
    options, flags = parser.parse_known_args()
    flags = ["--max-num-queued-reqs", str(QUEUE_LENGTH), *flags]
    with served(flags) as (_, client, _):
        url = str(client.base_url)
        found = measure(url, clients=options.clients, seconds=options.seconds)
        result = asyncio.run(found)
    result |= {"goal_normal_again_s": GOAL_RECOVERY_S, "flags": flags}
    command = f"python -m benchmarks.overload --seconds {options.seconds:g}"
    print(json.dumps(record(result, options.out, command=command)))


if __name__ == "__main__":
    main()
