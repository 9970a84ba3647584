"""Hours of mixed requests: memory stays flat, acceptance steady, nothing is compiled.

    python -m benchmarks.soak --minutes 60

Clients ask the bundled pair's server (`python -m jaxspec.serve`) for short and long
texts, streamed and whole, one and several, greedy, sampled and seeded, with stop
strings, with fewer drafts or none; some hang up in the middle. Every ten seconds its
memory and metrics are read. Writes benchmarks/results/soak.json.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from tqdm.auto import tqdm

from benchmarks.client import PROMPTS
from benchmarks.server import samples, served
from jaxspec.bench.online.connection import data_of
from jaxspec.bench.report import record

RESULT = Path(__file__).with_name("results") / "soak.json"
NUM_CLIENTS = 12
SAMPLE_S = 10.0
HANG_UP_SHARE = 0.1


class Clients:
    """Threads that ask and count what came of it."""

    def __init__(self, url: str):
        self._url = url
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(random.Random(seed),))
            for seed in range(NUM_CLIENTS)
        ]
        self.counts = {"answered": 0, "hung_up": 0, "failed": 0}

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, chance: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=300) as client:
            while not self._is_over.is_set():
                self.counts[_ask(client, chance)] += 1


def _ask(client: httpx.Client, chance: random.Random) -> str:
    """One request; what came of it."""
    body: dict[str, Any] = {
        "prompt": chance.choice(PROMPTS) * chance.choice((1, 1, 1, 5)),
        "max_tokens": chance.choice((1, 16, 64, 200)),
        "temperature": chance.choice((0, 0.7, 1.0)),
        "top_p": chance.choice((0.9, 1.0)),
        "seed": chance.choice((None, 7)),
        "stop": chance.choice((None, ".")),
        "num_speculative_tokens": chance.choice((None, None, 0, 2)),
    }
    if body["temperature"]:
        body["n"] = chance.choice((1, 1, 2))
    if chance.random() < 0.5:
        response = client.post("/v1/completions", json=body)
        return "answered" if response.status_code == httpx.codes.OK else "failed"
    body["stream"] = True
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            return "failed"
        for data in data_of(response):
            if data == "[DONE]":
                return "answered"
            if chance.random() < HANG_UP_SHARE / 10:
                return "hung_up"
    return "failed"


def _sample(client: httpx.Client, pid: int) -> dict[str, float]:
    """The server's memory, and totals since its start."""
    told = samples(client.get("/metrics").text)
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return {
        "resident_mb": round(resident / 1e6, 1),
        "compiles": told["jaxspec:num_compiles_total"],
        "drafts": told["jaxspec:spec_decode_num_draft_tokens_total"],
        "accepted": told["jaxspec:spec_decode_num_accepted_tokens_total"],
        "tokens": told["jaxspec:generation_tokens_total"],
    }


def measure(seconds: float, flags: list[str]) -> dict[str, Any]:
    """Ask for a time; samples, and what they say about both halves."""
    samples: list[dict[str, float]] = []
    with served(flags) as (process, client, _), Clients(str(client.base_url)) as asking:
        start = time.monotonic()
        with tqdm(total=round(seconds), unit="s") as bar:
            while (passed := time.monotonic() - start) < seconds:
                time.sleep(min(SAMPLE_S, seconds - passed))
                samples.append(_sample(client, process.pid))
                bar.update(round(time.monotonic() - start) - bar.n)
    middle = len(samples) // 2
    halves = (samples[0], samples[middle]), (samples[middle], samples[-1])
    memory = [sample["resident_mb"] for sample in samples]
    return {
        "seconds": round(seconds),
        "requests": asking.counts,
        "tokens_per_s": round(samples[-1]["tokens"] / seconds, 1),
        "acceptance_by_half": [_acceptance(*half) for half in halves],
        "compiles_while_serving": samples[-1]["compiles"] - samples[0]["compiles"],
        "memory_growth_second_half": round(memory[-1] / memory[middle] - 1, 4),
        "resident_mb": memory,
    }


def _acceptance(first: dict[str, float], last: dict[str, float]) -> float:
    drafts = last["drafts"] - first["drafts"]
    return round((last["accepted"] - first["accepted"]) / max(drafts, 1), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixed requests for a long time.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options, flags = parser.parse_known_args()
    result = measure(60 * options.minutes, flags) | {"flags": flags}
    command = f"python -m benchmarks.soak --minutes {options.minutes:g}"
    result = record(result, options.out, command=command)
    print(json.dumps({key: result[key] for key in result if key != "resident_mb"}))


if __name__ == "__main__":
    main()
