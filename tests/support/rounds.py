"""Let launches run a given number of rounds."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.scheduling import prefill_budget
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.program.plan import StepPlan, StepShape
from jaxspec.program.wire import DraftPrefillResult, StepResult

STEPS = 8


@contextlib.contextmanager
def at_most(engine: LLMEngine, num_rounds: int) -> Iterator[list[tuple[int, int]]]:
    """Let launches run up to `num_rounds` rounds, regardless of time and text length.

    Yields a list of (rounds planned, rounds run) of the launches that are read.
    """
    runner, planned, ran = engine.runner, deque[int](), list[tuple[int, int]]()
    launch, fetch = runner.launch, runner.fetch

    def note_launch(plan: StepPlan, shape: StepShape) -> Any:
        planned.append(plan.num_rounds)
        return launch(plan, shape)

    def note_fetch(result: Any, shape: StepShape) -> StepResult | DraftPrefillResult:
        fetched = fetch(result, shape)
        ran.append((planned.popleft(), len(fetched.rounds)))
        return fetched

    def count(self: object, round_: object, most: int, fill: float) -> int:
        return min(num_rounds, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", note_launch)
        patch.setattr(runner, "fetch", note_fetch)
        patch.setattr(prefill_budget.Pacer, "num_rounds", count)
        patch.setattr(RowTable, "rounds_left", lambda *_: STEPS)
        yield ran
