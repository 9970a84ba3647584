"""A follower runs the commands of a leader, without devices."""

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.multihost import follower as follow
from jaxspec.engine.multihost.channel import END, Command, Leader, shape_values
from jaxspec.engine.multihost.follower import MAX_IN_FLIGHT, Follower
from jaxspec.engine.runner import Runner
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.program.plan import StepShape
from tests.support.loops import make_config

SHAPE = StepShape(num_seqs=2, num_levels=3, max_prompt_tokens=0)


class Written(Runner):
    """A fake runner that records its calls."""

    def __init__(self) -> None:
        self.config = make_config()
        self.events: list[Any] = []
        self.num_launches = 0
        self.is_broken = False
        self.followers = None

    def launch_vector(self, vector: np.ndarray, shape: StepShape) -> Any:
        self.num_launches += 1
        self.events.append(("launch", vector.tolist(), shape))
        waited = ("waited", self.num_launches)
        return SimpleNamespace(block_until_ready=lambda: self.events.append(waited))

    def executable(self, shape: StepShape) -> Any:
        if self.is_broken:
            raise ValueError("no room for it")
        self.events.append(("compile", shape))

    def time_round(self, *arguments: Any, **options: Any) -> float:
        self.events.append(("time_round", *arguments))
        return 0.0

    def drop_pages(self) -> None:
        self.events.append("drop_pages")

    def restore_pages(self) -> None:
        self.events.append("restore_pages")

    def drop_weights(self, *, keep: bool) -> None:
        self.events.append(("drop_weights", keep))

    def restore_weights(self, loaded: Any) -> None:
        self.events.append(("restore_weights", loaded))


class Script(Leader):
    """A fake leader that sends a list of commands and records the answers."""

    def __init__(self, *commands: tuple[str, dict[str, Any], Any]):
        self._script = iter(enumerate(commands, 1))
        self.answers: list[int] = []
        self.failures: list[str] = []
        self.has_answer = threading.Event()

    def receive(self) -> Command:
        number, (name, values, vector) = next(self._script)
        return Command(number, name, values, vector)

    def answer(self, command: Command, values: Mapping[str, Any]) -> None:
        self.answers.append(command.number)
        self.has_answer.set()

    def fail(self, reason: str) -> None:
        self.failures.append(reason)

    def close(self) -> None:
        self.answers.append(-1)


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replace process exits; return a list that gets the message of each exit."""
    found: list[str] = []
    monkeypatch.setattr(follow, "leave", lambda: found.append("left"))
    monkeypatch.setattr(follow, "end_process", found.append)
    yield found


def launch(number: int) -> tuple[str, dict[str, Any], Any]:
    return "launch", shape_values(SHAPE), np.array([number], np.int32)


def run(*commands: tuple[str, dict[str, Any], Any]) -> tuple[Written, Any]:
    runner, leader = Written(), Script(*commands, (END, {}, None))
    Follower(runner, leader).run()
    return runner, leader


def test_launches_run_in_order_with_a_bounded_number_in_flight(left: list[str]):
    runner, leader = run(*[launch(number) for number in range(4)])
    launched = [("launch", [number], SHAPE) for number in range(4)]
    waited = [("waited", number) for number in range(1, 5)]
    first = launched[: MAX_IN_FLIGHT + 1]
    assert runner.events == [*first, waited[0], launched[3], *waited[1:]]
    assert leader.answers == [-1] and left == ["left"]
    assert runner.num_launches == 4


def test_sleep_waits_for_launches_and_wake_up_restores_part_by_part():
    runner, _ = run(
        launch(0),
        ("sleep", {"level": 1}, None),
        ("wake_up", {"tags": ["weights"]}, None),
        ("wake_up", {"tags": ["weights", "kv_cache"]}, None),
    )
    assert runner.events[1:] == [
        ("waited", 1),
        "drop_pages",
        ("drop_weights", True),
        ("restore_weights", None),
        "restore_pages",
    ]


def test_follower_times_rounds_with_the_leader():
    values = dict(
        shape=shape_values(SHAPE),
        num_draft_tokens=2,
        pages=[3, 4],
        context=64,
        num_runs=3,
    )
    runner, _ = run(("time_round", values, None))
    assert runner.events == [("time_round", RoundKind(SHAPE, 2), [3, 4], 64, 3)]


def test_program_is_compiled_in_a_thread_and_then_reported(left: list[str]):
    compile_ = ("compile", shape_values(SHAPE), None)
    runner, leader = Written(), Script(compile_)
    with pytest.raises(StopIteration):
        Follower(runner, leader).run()
    assert leader.has_answer.wait(10)
    assert runner.events == [("compile", SHAPE)] and leader.answers == [1]
    # A failure ends the process.
    runner.is_broken, leader = True, Script(compile_)
    Follower(runner, leader)._compile(leader.receive())
    assert left == ["A program could not be compiled: ValueError('no room for it')."]
    assert leader.failures == ["ValueError('no room for it')"]


def test_failures_are_reported_to_the_leader():
    runner, leader = Written(), Script(("paint", {}, None))
    with pytest.raises(AssertionError, match="unknown command 'paint'"):
        Follower(runner, leader).run()
    assert leader.failures == ["AssertionError(\"unknown command 'paint'\")"]
