"""Other threads reach the engine between steps, and get outputs in their event loop."""

import asyncio
import functools
import threading
from typing import Any

import pytest

from jaxspec.engine.engine_thread import (
    MAX_FAILURES,
    EngineThread,
    RequestOutputCollector,
)
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import EngineDeadError
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


class Engine(LLMEngine):
    """A fake engine with a given number of steps, any of which may fail."""

    def __init__(self):
        self.work = 0
        self.errors: list[BaseException] = []
        self.threads: set[str] = set()
        self.stepped = threading.Event()
        self.logged = threading.Event()
        self.num_log_checks = 0

    def log_if_due(self) -> None:
        self.num_log_checks += 1
        if self.num_log_checks == 3:
            self.logged.set()

    def has_unfinished_requests(self) -> bool:
        return self.work > 0

    def is_sleeping(self) -> bool:
        return False

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
    """An `EngineThread` with a fake engine; records its outputs and failures."""

    def __init__(self):
        self.engine = Engine()
        self.outputs: list[Any] = []
        self.failures: list[BaseException] = []
        self.idle = threading.Event()
        self.loop = EngineThread(self.engine, self._take, self._fail)
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


def test_failed_steps_are_reported_and_an_output_resets_their_count(running: Running):
    errors = [ValueError("broken")] * (MAX_FAILURES - 1)
    for _ in range(MAX_FAILURES):
        running.engine.errors = [*errors]
        for _ in range(MAX_FAILURES):
            running.add(1)
    assert running.failures == errors * MAX_FAILURES
    assert running.outputs == [0] * MAX_FAILURES
    assert running.loop.dead_error is None
    assert running.loop.is_running


def test_consecutive_failures_stop_the_thread(running: Running):
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


def test_dead_engine_is_not_stepped_again(running: Running):
    running.engine.errors = [EngineDeadError("a host is gone")]
    running.add(1)
    (dead,) = running.failures
    assert running.loop.dead_error is dead
    assert str(dead.__cause__) == "a host is gone"


def test_idle_loop_still_logs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxspec.engine.engine_thread.LOG_INTERVAL_S", 0.01)
    idle = Running()
    try:
        assert idle.engine.logged.wait(10)
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


def test_queued_calls_get_the_final_error(running: Running):
    entered, may_continue = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        entered.set()
        may_continue.wait(10)

    running.loop.call(wait)
    assert entered.wait(10)
    later = running.loop.call(lambda engine: None)
    assert not running.loop.stop(0.01)
    with pytest.raises(EngineDeadError):
        later.result(10)
    may_continue.set()
    assert running.loop.stop(10)


def output_of(text: str, reason: str | None = None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(
        index=index, text=text, token_ids=[*map(ord, text)], finish_reason=reason
    )
    return RequestOutput(
        request_id="a",
        prompt="p",
        prompt_token_ids=[1],
        outputs=[completion],
        finished=reason is not None,
    )


def in_loop(use: Any) -> Any:
    """Make a test of a coroutine function."""

    @functools.wraps(use)
    def test(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(use(**arguments), 10))

    return test


@in_loop
async def test_error_replaces_unfetched_outputs():
    collector = RequestOutputCollector("a", CUMULATIVE)
    collector.put(output_of("a"))
    collector.fail(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await collector.get()


@pytest.mark.parametrize(("kind", "text"), [(DELTA, ""), (CUMULATIVE, "ab")])
@in_loop
async def test_aborted_request_ends_with_the_text_so_far(kind, text):
    collector = RequestOutputCollector("a", kind)
    collector.put(output_of("ab"))
    before = await collector.get()
    collector.abort()
    last = await collector.get()
    assert not before.finished
    assert before.outputs[0].finish_reason is None
    assert last.finished
    assert (last.prompt, last.outputs[0].text) == ("p", text)
    assert last.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
@in_loop
async def test_abort_does_not_change_an_unfetched_final_output(kind):
    collector = RequestOutputCollector("a", kind)
    collector.put(output_of("ab", "stop"))
    collector.abort()
    (completion,) = (await collector.get()).outputs
    assert (completion.text, len(completion.token_ids)) == ("ab", 2)
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("is_fetched", [False, True])
@in_loop
async def test_abort_ends_all_texts_once(is_fetched):
    collector, parts = RequestOutputCollector("a", DELTA, 3), list[CompletionOutput]()
    for output in (output_of("xy", None, 1), output_of("ab", "stop", 0)):
        output.finished = False
        collector.put(output)
        if is_fetched:
            parts += (await collector.get()).outputs
    collector.abort()
    last = await collector.get()
    assert last.finished
    parts += last.outputs
    texts = ["".join(one.text for one in parts if one.index == i) for i in range(3)]
    assert texts == ["ab", "xy", ""]
    reasons = [(one.index, one.finish_reason) for one in parts if one.finished()]
    assert sorted(reasons) == [(0, "stop"), (1, "abort"), (2, "abort")]
