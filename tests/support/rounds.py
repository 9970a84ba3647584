"""Launches and chunks of prompts that do not depend on measured times."""

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
def constant_times() -> Iterator[None]:
    """Record the same time for every round.

    Chunks of prompts and rounds per launch then do not depend on how busy the machine
    is, and so neither does the number of preemptions and prefix hits.
    """
    record = prefill_budget.Pacer.record

    def record_constant(
        self: prefill_budget.Pacer,
        round_kind: prefill_budget.RoundKind,
        seconds: float,
        *args: Any,
        **options: Any,
    ) -> None:
        record(self, round_kind, 0.001, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_budget.Pacer, "record", record_constant)
        yield


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
