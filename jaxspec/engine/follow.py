"""A process that does what the leader does, on the devices of another host.

It has a runner, and neither scheduler nor tokenizer: which programs run, with which
plans and in which order, it hears. What a program tells is the same everywhere, and is
read by the leader alone.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.hosts import (
    END,
    Command,
    Leader,
    end_process,
    facts_of,
    shape_of,
)
from jaxspec.engine.loader import Sleep, make_following_runner
from jaxspec.engine.program_cache import facts
from jaxspec.engine.runner import Runner, leave
from jaxspec.engine.speculation.step_times import Round
from jaxspec.exit import COMPILER_THREAD

_log = logging.getLogger(__name__)

# The leader has one launch more under way than it has read.
MAX_IN_FLIGHT = 2


class Follower:
    """Does the commands of a leader with a runner."""

    def __init__(self, runner: Runner, leader: Leader):
        self.runner, self._leader = runner, leader
        self._sleep = Sleep(runner.config, runner)
        self._in_flight: deque[Any] = deque()

    @classmethod
    def start(cls, config: EngineConfig) -> "Follower":
        """Find the leader, and load what it has decided.

        Raises:
            ConfigError: There is no leader, it refuses this process, or the models
                cannot be loaded.
        """
        hosts = config.hosts
        assert hosts is not None and hosts.is_follower
        leader = Leader.find(hosts, facts_of(config, facts()))
        with _failure_told(leader):
            runner = make_following_runner(config, leader)
        _log.info("node_rank=%d follows %s", hosts.node_rank, hosts.master_addr)
        return cls(runner, leader)

    def run(self) -> None:
        """Do one command after the other until the last."""
        with _failure_told(self._leader):
            command = self._leader.receive()
            while command.name != END:
                self._handle(command)
                command = self._leader.receive()
            self._wait(0)
            leave()
        _log.info("The leader has ended in order after %d launches", self.num_launches)
        self._leader.close()

    @property
    def num_launches(self) -> int:
        """Programs launched so far: as many as the leader has."""
        return self.runner.num_launches

    def _handle(self, command: Command) -> None:
        runner, values = self.runner, command.values
        match command.name:
            case "launch":
                assert command.vector is not None
                result = runner.launch_vector(command.vector, shape_of(values))
                self._in_flight.append(result)
                self._wait(MAX_IN_FLIGHT)
            case "compile":
                # Beside launches, as the leader does.
                threading.Thread(
                    target=self._compile,
                    args=(command,),
                    name=COMPILER_THREAD,
                    daemon=True,
                ).start()
            case "rehearse":
                round_ = Round(shape_of(values["shape"]), values["num_drafts"])
                runner.rehearse(
                    round_, values["pages"], values["context"], values["num_runs"]
                )
            case "sleep":
                self._wait(0)
                self._sleep.begin(values["level"])
            case "wake_up":
                self._sleep.end(values["tags"])
            case _:
                raise AssertionError(f"an unknown command {command.name!r}")

    def _wait(self, most: int) -> None:
        """Wait until so many launches are under way; what has failed raises here."""
        while len(self._in_flight) > most:
            self._in_flight.popleft().block_until_ready()

    def _compile(self, command: Command) -> None:
        try:
            with _failure_told(self._leader):
                self.runner.executable(shape_of(command.values))
        # The leader waits for this program; a thread's exception alone would leave this
        # process running.
        except Exception as error:  # noqa: BLE001
            _log.exception("A program could not be made")
            end_process(f"A program could not be made: {error!r}.")
        self._leader.answer(command, {})


@contextmanager
def _failure_told(leader: Leader) -> Iterator[None]:
    """Have the leader say why this process ends, if it does."""
    try:
        yield
    except BaseException as error:
        leader.fail(repr(error))
        raise
