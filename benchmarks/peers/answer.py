"""The child's side of the run: loads one engine, then times the parent's requests.

Times are measured here, so that all peers are timed by the same code. Imports only the
standard library, because it runs in every peer's own environment.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """The interface of a child's engine.

    Attributes:
        version: Version of the library.
        settings: Settings that affect speed.
    """

    version: str
    settings: dict[str, Any]

    @property
    def generate(self) -> Callable[..., list[list[int]]]:
        """A function of prompts, `num_tokens` and engine-specific arguments.

        It returns `num_tokens` greedy tokens per prompt, for one batch of prompts.
        """
        ...

    def counts(self) -> dict[str, int]:
        """Return totals of rounds, drafts, accepted drafts and compiles, if known."""
        ...


def answer(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Read a task, load, then answer every line of stdin with one line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Output of libraries must not mix with answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    engine = load(json.loads(sys.stdin.readline()))
    say({"version": engine.version, "settings": engine.settings})
    for line in sys.stdin:
        say(run(engine, **json.loads(line)))


def run(
    engine: Engine,
    prompts: list[list[int]],
    batch_size: int,
    num_tokens: int,
    **more: Any,
) -> dict[str, Any]:
    """Time all prompts in batches, from passing them to the last token."""
    before, seconds = engine.counts(), 0.0
    # Sort prompts by length, because batches of similar lengths need little padding.
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    tokens: list[list[int]] = [[]] * len(prompts)
    for first in range(0, len(prompts), batch_size):
        numbers = order[first : first + batch_size]
        batch = [prompts[number] for number in numbers]
        start = time.perf_counter()
        found = engine.generate(batch, num_tokens, **more)
        seconds += time.perf_counter() - start
        lengths = sorted({len(one) for one in found})
        if len(found) != len(batch) or lengths != [num_tokens]:
            raise ValueError(
                f"requested {len(batch)} texts of {num_tokens} tokens each, got "
                f"{len(found)} texts of {lengths} tokens"
            )
        for number, one in zip(numbers, found, strict=True):
            tokens[number] = one
    after = engine.counts()
    return {
        "seconds": seconds,
        "token_ids": tokens,
        "counts": {name: after[name] - before.get(name, 0) for name in after},
    }
