"""One thread has the engine: calls are answered between steps, failures end it."""

import threading
import time
from typing import Any

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.loop import MAX_FAILURES, EngineLoop
from jaxspec.errors import EngineDeadError


class Engine(LLMEngine):
    """Has work for as many steps as it is given; a step may fail."""

    def __init__(self):
        self.work = 0
        self.errors: list[BaseException] = []
        self.threads: set[str] = set()
        self.stepped = threading.Event()
        self.num_looks = 0

    def log_if_due(self) -> None:
        self.num_looks += 1

    def has_unfinished_requests(self) -> bool:
        return self.work > 0

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.work -= 1
        self.stepped.set()
        if self.errors:
            raise self.errors.pop(0)
        return [self.work]

    def add(self, count: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.work += count
        return self.work


class Running:
    """A loop over such an engine, and what it told."""

    def __init__(self):
        self.engine = Engine()
        self.outputs: list[Any] = []
        self.failures: list[BaseException] = []
        self.idle = threading.Event()
        self.loop = EngineLoop(self.engine, self._take, self._fail)
        self.loop.start()

    def _take(self, outputs: list[Any]) -> None:
        self.outputs += outputs
        if not self.engine.work:
            self.idle.set()

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.idle.set()

    def add(self, count: int) -> None:
        self.idle.clear()
        self.loop.call(lambda engine: engine.add(count)).result(10)  # type: ignore
        assert self.idle.wait(10)


@pytest.fixture
def running():
    made = Running()
    yield made
    made.loop.stop(10)


def test_steps_and_calls_share_a_thread(running: Running):
    running.add(3)
    running.add(1)
    assert running.outputs == [2, 1, 0, 0]
    assert running.engine.threads == {"jaxspec-engine"}


def test_what_a_call_raises_goes_to_its_caller(running: Running):
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda engine: 1 // 0).result(10)
    running.add(1)
    assert running.outputs == [0]
    assert not running.failures


def test_a_failed_step_is_told_and_others_follow(running: Running):
    running.engine.errors = [ValueError("broken")]
    running.add(1)
    assert [str(error) for error in running.failures] == ["broken"]
    running.add(1)
    assert running.outputs == [0]
    assert running.loop.is_running


def test_an_output_forgives_the_failures_before_it(running: Running):
    for _ in range(MAX_FAILURES):
        running.engine.errors = [ValueError()] * (MAX_FAILURES - 1)
        for _ in range(MAX_FAILURES):
            running.add(1)
    assert running.loop.dead_error is None


def test_one_failure_after_the_other_is_the_end(running: Running):
    running.engine.errors = [ValueError("broken")] * MAX_FAILURES
    for _ in range(MAX_FAILURES):
        running.add(1)
    dead = running.failures[-1]
    assert isinstance(dead, EngineDeadError)
    assert str(dead.__cause__) == "broken"
    with pytest.raises(EngineDeadError):
        running.loop.call(lambda engine: None).result(10)
    assert running.loop.dead_error is dead
    assert not running.loop.is_running


def test_an_idle_loop_still_looks_after_the_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxspec.engine.loop.LOG_INTERVAL_S", 0.01)
    idle = Running()
    try:
        deadline = time.monotonic() + 10
        while idle.engine.num_looks < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not idle.engine.stepped.is_set()
    finally:
        idle.loop.stop(10)


def test_no_step_while_paused(running: Running):
    running.loop.pause(is_paused=True)
    running.engine.stepped.clear()
    added = running.loop.call(lambda engine: engine.add(1))  # type: ignore
    assert added.result(10) == 1
    assert running.loop.call(lambda engine: "answered").result(10) == "answered"
    assert not running.engine.stepped.wait(0.05)
    running.loop.pause(is_paused=False)
    assert running.engine.stepped.wait(10)


def test_calls_that_wait_are_told_of_the_end(running: Running):
    entered, go_on = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        entered.set()
        go_on.wait(10)

    running.loop.call(wait)
    assert entered.wait(10)
    later = running.loop.call(lambda engine: None)
    assert not running.loop.stop(0.01)
    with pytest.raises(EngineDeadError):
        later.result(10)
    go_on.set()
    assert running.loop.stop(10)
