"""A child's side of the run: loads one engine, then times what its parent asks for.

The clock is here, so that it is the same for all. Nothing but the standard library:
this runs in every peer's own environment.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """What a child must be able to do.

    Attributes:
        version: Of the library.
        settings: What was chosen that changes speed.
    """

    version: str
    settings: dict[str, Any]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """So many greedy tokens after each prompt, all prompts at once."""
        ...

    def counts(self) -> dict[str, int]:
        """Totals so far, of: rounds, drafted, accepted, compiles. Unknown ones lack."""
        ...


def answer(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Read a task, load, then answer every line of stdin with one line of JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # From here on, what libraries print is no answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    engine = load(json.loads(sys.stdin.readline()))
    say({"version": engine.version, "settings": engine.settings})
    for line in sys.stdin:
        say(run(engine, **json.loads(line)))


def run(
    engine: Engine, prompts: list[list[int]], batch_size: int, num_tokens: int
) -> dict[str, Any]:
    """Time all prompts, so many at once: from handing them over to the last token."""
    before, seconds = engine.counts(), 0.0
    # Prompts of about one length in a batch: few pads for those who pad.
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    tokens: list[list[int]] = [[]] * len(prompts)
    for first in range(0, len(prompts), batch_size):
        numbers = order[first : first + batch_size]
        batch = [prompts[number] for number in numbers]
        start = time.perf_counter()
        found = engine.generate(batch, num_tokens)
        seconds += time.perf_counter() - start
        lengths = sorted({len(one) for one in found})
        if len(found) != len(batch) or lengths != [num_tokens]:
            raise ValueError(
                f"{len(batch)} texts of {num_tokens} tokens were asked for, came "
                f"{len(found)} of {lengths}"
            )
        for number, one in zip(numbers, found, strict=True):
            tokens[number] = one
    after = engine.counts()
    return {
        "seconds": seconds,
        "token_ids": tokens,
        "counts": {name: after[name] - before.get(name, 0) for name in after},
    }
