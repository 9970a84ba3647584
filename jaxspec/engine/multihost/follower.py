"""A process that runs the leader's commands on the devices of another host.

The process has a runner, but neither scheduler nor tokenizer: the leader sends which
programs to run, in order, with their plans. Only the leader reads results, which are
the same everywhere.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.loader import Sleep, make_following_runner
from jaxspec.engine.multihost.channel import (
    END,
    Command,
    Leader,
    end_process,
    shape_of,
)
from jaxspec.engine.multihost.facts import facts_of
from jaxspec.engine.program_cache import facts
from jaxspec.engine.runner import Runner, leave
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.exit import COMPILER_THREAD

_log = logging.getLogger(__name__)

# Maximum launches in flight. The leader has one launch in flight beyond the one that it
# reads.
MAX_IN_FLIGHT = 2


class Follower:
    """Runs the commands of a leader."""

    def __init__(self, runner: Runner, leader: Leader):
        self.runner, self._leader = runner, leader
        self._sleep = Sleep(runner.config, runner)
        self._in_flight: deque[Any] = deque()

    @classmethod
    def start(cls, config: EngineConfig) -> "Follower":
        """Connect to the leader, and load the models in the sizes it has decided.

        Raises:
            ConfigError: There is no leader, it refuses this process, or the models
                cannot be loaded.
        """
        hosts = config.hosts
        assert hosts is not None and hosts.is_follower
        leader = Leader.find(hosts, facts_of(config, facts()))
        with _reporting_failure(leader):
            runner = make_following_runner(config, leader)
        _log.info("node_rank=%d follows %s", hosts.node_rank, hosts.master_addr)
        return cls(runner, leader)

    def run(self) -> None:
        """Run commands until the last one."""
        with _reporting_failure(self._leader):
            command = self._leader.receive()
            while command.name != END:
                self._handle(command)
                command = self._leader.receive()
            self._wait(0)
            leave()
        _log.info("The leader ended normally after %d launches", self.num_launches)
        self._leader.close()

    @property
    def num_launches(self) -> int:
        """Programs launched so far; the leader's number is the same."""
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
                # Compile in a thread, as the leader does, so that launches continue.
                threading.Thread(
                    target=self._compile,
                    args=(command,),
                    name=COMPILER_THREAD,
                    daemon=True,
                ).start()
            case "time_round":
                round_kind = RoundKind(
                    shape_of(values["shape"]), values["num_draft_tokens"]
                )
                runner.time_round(
                    round_kind, values["pages"], values["context"], values["num_runs"]
                )
            case "sleep":
                self._wait(0)
                self._sleep.begin(values["level"])
            case "wake_up":
                self._sleep.end(values["tags"])
            case _:
                raise AssertionError(f"unknown command {command.name!r}")

    def _wait(self, max_in_flight: int) -> None:
        """Wait until at most this many launches are in flight.

        A failed launch raises its error here.
        """
        while len(self._in_flight) > max_in_flight:
            self._in_flight.popleft().block_until_ready()

    def _compile(self, command: Command) -> None:
        try:
            with _reporting_failure(self._leader):
                self.runner.executable(shape_of(command.values))
        # The leader waits for this program; a thread's exception alone would leave this
        # process running.
        except Exception as error:  # noqa: BLE001
            _log.exception("A program could not be made")
            end_process(f"A program could not be compiled: {error!r}.")
        self._leader.answer(command, {})


@contextmanager
def _reporting_failure(leader: Leader) -> Iterator[None]:
    """Report an error to the leader as the reason why this process ends."""
    try:
        yield
    except BaseException as error:
        leader.fail(repr(error))
        raise
