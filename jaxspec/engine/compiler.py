"""Compiles programs in background threads, so that requests need not wait.

Owns the compiled programs and the queue of missing ones. A function passed in does the
compiling. XLA releases the GIL while it compiles, so the engine keeps running with the
programs that it already has.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.engine.memory.malloc import large_arrays_mapped, trim_malloc
from jaxspec.exit import COMPILER_THREAD, finish_at_exit
from jaxspec.program.plan import StepShape

_log = logging.getLogger(__name__)

# Thread switch interval while a program is compiled. Tracing and lowering hold the GIL
# for seconds. A step of the engine acquires it several times, each time after up to 5
# ms with Python's default: during a trace, a stream had 107 to 153 tokens/s with the
# default, and 141 to 175 with this.
SWITCH_S = 0.0005
# A compile takes one or two cores and some GB. Hosts of TPUs have 24 cores and more;
# with fewer cores, compiles would slow the engine.
CORES_PER_THREAD, MAX_THREADS = 8, 4


class Compiler:
    """Programs by shape, and the threads that compile the missing ones.

    The threads end when the queue is empty. When the interpreter exits, they finish
    their current programs: a process that exits during a compile would crash.

    Attributes:
        version: Changes whenever a program is added or removed.
        num_made: Programs made so far, loaded or compiled.
        made_s: Seconds that this took.
        failures: Errors of programs that failed; these are not tried again.
        announce: Called, in any thread, with the name of each program as its compile
            starts; when one ends, with the name of another in progress, or with "".
        is_exiting: Whether the interpreter exits; the queue is then dropped.
    """

    def __init__(
        self, make: Callable[[StepShape], Any], *, num_threads: int | None = None
    ):
        """Make an empty compiler.

        Args:
            make: Compiles a program. Called in any thread; may take minutes.
            num_threads: Maximum number of programs to compile at once; None: one for
                every 8 cores, between 1 and 4.
        """
        cores = os.cpu_count() or 1
        default = min(max(cores // CORES_PER_THREAD, 1), MAX_THREADS)
        self._make, self._num_threads = make, num_threads or default
        # Entered instead of the condition, whose `__enter__` is written in Python:
        # Ctrl-C could prevent the release, as in `EngineLock`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._programs: dict[StepShape, Any] = {}
        self._urgent: list[StepShape] = []
        self._later: list[StepShape] = []
        self._making: dict[StepShape, None] = {}  # in the order of their starts
        self._threads: set[threading.Thread] = set()
        self.is_exiting = self._has_finished = False
        # `clear` begins a new generation; programs begun in an earlier one are dropped.
        self._generation, self._is_stopped = 0, False
        self.version = self.num_made = 0
        self.made_s = 0.0
        self.failures: dict[StepShape, Exception] = {}
        self.announce: Callable[[str], None] | None = None
        finish_at_exit(self)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._programs

    def has_failed(self, shape: StepShape) -> bool:
        """Return whether compiling a program failed; it is not tried again."""
        return shape in self.failures

    @property
    def made(self) -> list[StepShape]:
        """The compiled programs."""
        return list(self._programs)

    @property
    def current(self) -> StepShape | None:
        """The program whose compile began last, of those in progress; or None."""
        with self._lock:
            return next(reversed(self._making), None)

    @property
    def num_wanted(self) -> int:
        """Number of programs left to make, the current one included."""
        with self._lock:
            return len({*self._urgent, *self._later, *self._making})

    def request(self, shape: StepShape) -> None:
        """Compile a program next; the latest request goes first."""
        self._want([shape], self._urgent)

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Compile programs in this order while nothing is requested."""
        self._want(list(shapes), self._later)

    def _want(self, shapes: list[StepShape], line: list[StepShape]) -> None:
        with self._lock:
            if self.is_exiting:
                return
            for shape in shapes:
                known = (self._programs, self._making, self.failures, line)
                if not any(shape in one for one in known):
                    line.append(shape)
            wanted = {*self._urgent, *self._later, *self._making}
            while len(self._threads) < min(len(wanted), self._num_threads):
                # A daemon, so that threads which outlive the main thread still get
                # programs; `finish_exit` waits for it.
                thread = threading.Thread(
                    target=self._run, name=COMPILER_THREAD, daemon=True
                )
                try:
                    self._threads.add(thread)
                    thread.start()
                except BaseException:  # such as KeyboardInterrupt
                    self._threads.discard(thread)
                    raise

    def get(self, shape: StepShape) -> Any:
        """Return a program; compile it in this thread if it is missing."""
        program = self._programs.get(shape)
        if program is not None:
            return program
        has_begun = False
        try:
            with self._lock:
                while shape in self._making or not self._may_begin():
                    self._changed.wait()
                if shape in self._programs:
                    return self._programs[shape]
                has_begun, generation = True, self._generation
                self._making[shape] = None
            return self._made(shape, generation)
        except BaseException:
            if has_begun:
                self._leave(shape)
            raise

    def wait(self, timeout_s: float) -> None:
        """Wait until a program is made or has failed, or until the timeout."""
        with self._lock:
            if self._making or self._urgent or self._later:
                self._changed.wait(timeout_s)

    def wait_for_all(self) -> None:
        """Wait until the queue is empty.

        Raises:
            Exception: The error of a failed program.
        """
        while self.num_wanted:
            self.wait(1.0)  # short waits, so that Ctrl-C works
        for error in self.failures.values():
            raise error

    def check(self, is_needed: Callable[[StepShape], bool] = lambda _: True) -> None:
        """Raise the error of a failed program, once.

        Args:
            is_needed: Returns whether a program must exist; errors of others are kept.
        """
        with self._lock:
            for shape in self.failures:
                if is_needed(shape):
                    raise self.failures.pop(shape)

    def clear(self) -> None:
        """Drop all programs, the queue and all errors, and return their memory."""
        with self._lock:
            # From now on, errors of programs count again, also after `stop`.
            self._is_stopped = False
            self._generation += 1
            self._programs = {}
            self._urgent.clear()
            self._later.clear()
            self.failures.clear()
            self.version += 1
        trim_malloc()

    def stop(self) -> None:
        """Drop the queue; errors of the current program are ignored from now on."""
        with self._lock:
            self._is_stopped = True
            self._urgent.clear()
            self._later.clear()

    def begin_exit(self) -> None:
        """Drop queued programs, because the interpreter exits."""
        with self._lock:
            self.is_exiting = True
            self._urgent.clear()
            self._later.clear()

    def finish_exit(self) -> None:
        """Wait for the programs that are being made, in any thread."""
        with self._lock:
            self._has_finished, threads = True, list(self._threads)
            while self._making:
                self._changed.wait()
        for thread in threads:
            thread.join()

    def _may_begin(self) -> bool:
        """Return whether this thread may start to compile a program.

        Once `finish_exit` has run, only the main thread may, because the exit does not
        wait for other threads.
        """
        is_main = threading.current_thread() is threading.main_thread()
        return is_main or not self._has_finished

    def _run(self) -> None:
        with _yielding():
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                shape = self._next()
                if shape is None:
                    self._threads.discard(threading.current_thread())
                    self._changed.notify_all()
                    return
                self._making[shape] = None
                generation = self._generation
            try:
                self._made(shape, generation)
            except Exception as error:  # noqa: BLE001 - `check` raises it
                self._leave(shape, generation, error)

    def _next(self) -> StepShape | None:
        for line, index in ((self._urgent, -1), (self._later, 0)):
            while line:
                shape = line.pop(index)
                if shape not in self._programs and shape not in self._making:
                    return shape
        return None

    def _made(self, shape: StepShape, generation: int) -> Any:
        """Make a program that this thread has added to `_making`."""
        start = time.monotonic()
        self._announce(shape)
        with large_arrays_mapped():
            program = self._make(shape)
        took_s = time.monotonic() - start
        with self._lock:
            self.num_made += 1
            self.made_s += took_s
            if generation == self._generation:
                self._programs[shape] = program
        self._leave(shape)
        self._announce(self.current)
        _log.info("%s is ready after %.1f s", shape.name, took_s)
        return program

    def _leave(
        self, shape: StepShape, generation: int = 0, error: Exception | None = None
    ) -> None:
        """Remove a program from `_making`, and record its error in the same step.

        The error of a program begun before `stop` or `clear` is dropped: the program is
        not needed, and the arrays that it is compiled for may have been deleted.
        """
        with self._lock:
            self._making.pop(shape, None)
            if error and generation == self._generation and not self._is_stopped:
                _log.error("Could not compile %s", shape.name, exc_info=error)
                self.failures[shape] = error
            self.version += 1
            is_last = not (self._making or self._urgent or self._later)
            self._changed.notify_all()
        if is_last:
            trim_malloc()

    def _announce(self, shape: StepShape | None) -> None:
        announce = self.announce  # another thread may set it to None meanwhile
        if announce is not None:
            announce("" if shape is None else f"Compiling {shape.name}")


@contextmanager
def _yielding() -> Iterator[None]:
    """Switch threads more often in the whole process, while this thread compiles."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        # Another engine's compiler, or the user, may have set another interval.
        if sys.getswitchinterval() == SWITCH_S:
            sys.setswitchinterval(before)
