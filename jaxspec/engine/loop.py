"""The thread that steps an engine, and the way other threads reach it."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxspec.engine.llm_engine import LOG_INTERVAL_S, LLMEngine
from jaxspec.errors import EngineDeadError
from jaxspec.outputs import RequestOutput

_log = logging.getLogger(__name__)

# Steps that fail one after the other, and nothing came of any: it will not get better.
MAX_FAILURES = 3

Command = tuple[Callable[[LLMEngine], Any], Future[Any]]


class EngineLoop:
    """Owns an engine: it is touched in this thread only, between two steps.

    Attributes:
        dead_error: Why it has ended for good, or None.
    """

    def __init__(
        self,
        engine: LLMEngine,
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[BaseException], None],
    ):
        """Make the thread; `start` starts it.

        Args:
            deliver: Called in the thread with what a step gave.
            fail: Called in the thread when a step has failed: its requests have ended.
        """
        self.dead_error: EngineDeadError | None = None
        self._engine, self._deliver, self._fail = engine, deliver, fail
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_paused = self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="jaxspec-engine", daemon=True
        )

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it steps, or would if there were requests."""
        return self._thread.is_alive() and not self._is_stopped

    def call(self, function: Callable[[LLMEngine], Any]) -> Future[Any]:
        """Have a function called with the engine, before the next step.

        Returns:
            What it returns or raises; `EngineDeadError` where no step will come.
        """
        result: Future[Any] = Future()
        with self._lock:
            if self._is_stopped:
                result.set_exception(self.dead_error or EngineDeadError())
            else:
                self._commands.put((function, result))
        return result

    def pause(self, *, is_paused: bool) -> None:
        """Take no steps, or take them again; calls are answered meanwhile."""
        self._is_paused = is_paused
        self._commands.put(None)

    def stop(self, timeout: int | float | None = None) -> bool:
        """End the thread after the step it is in; whether that is over."""
        self._close(self.dead_error)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while not self._is_stopped:
            has_work = self._engine.has_unfinished_requests() and not self._is_paused
            if not has_work:
                self._engine.log_if_due()  # what came since the last step's line
            self._obey(waits=not has_work)
            if not has_work or self._is_stopped:
                continue
            try:
                outputs = self._engine.step()
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                failures += 1
                _log.exception("A step failed: the requests it was for have ended")
                self._end_all(error, is_last=failures == MAX_FAILURES)
            except BaseException as error:
                self._end_all(error, is_last=True)
                raise
            else:
                if outputs:
                    failures = 0
                    self._deliver(outputs)

    def _obey(self, *, waits: bool) -> None:
        """Answer the calls that wait; for the first one there is time if `waits`."""
        try:
            command = self._commands.get(block=waits, timeout=LOG_INTERVAL_S)
            while True:
                if command is not None:
                    self._answer(*command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _answer(
        self, function: Callable[[LLMEngine], Any], result: Future[Any]
    ) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(self._engine))
        except Exception as error:  # noqa: BLE001 - whoever called is told
            result.set_exception(error)

    def _end_all(self, error: BaseException, *, is_last: bool) -> None:
        if is_last:
            dead = EngineDeadError()
            dead.__cause__ = error
            self._close(dead)
            error = dead
        self._fail(error)

    def _close(self, error: EngineDeadError | None) -> None:
        """Take no more calls; those that wait are told."""
        with self._lock:
            self.dead_error, self._is_stopped = error, True
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(error or EngineDeadError())
        self._commands.put(None)  # for a thread that waits
