"""Programs are compiled in the background, in order, and only once."""

import threading
import time
from typing import Any

import pytest

from jaxspec.engine import compiler as compiling
from jaxspec.engine.compiler import Compiler
from jaxspec.program.plan import StepShape
from tests.support.interrupts import interrupt_often

SHAPES = [
    StepShape(num_seqs=seqs, num_levels=0, max_prompt_tokens=0) for seqs in (1, 2, 4, 8)
]
LIMIT_S = 10.0


class Maker:
    """A fake compile function that waits until the test releases each program."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.made: list[StepShape] = []
        self.threads: set[threading.Thread] = set()
        self.may_go = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def __call__(self, shape: StepShape) -> Any:
        self.threads.add(threading.current_thread())
        self.began.release()
        assert self.may_go.acquire(timeout=LIMIT_S)
        self.made.append(shape)
        if self.error is not None:
            raise self.error
        return f"program {shape.num_seqs}"

    def let_all(self) -> None:
        self.may_go.release(100)


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def compiler(maker: Maker) -> Compiler:
    return Compiler(maker, num_threads=1)


def begin(compiler: Compiler, maker: Maker, *shapes: StepShape) -> None:
    """Queue programs; return when the first is being compiled."""
    compiler.prepare(shapes)
    assert maker.began.acquire(timeout=LIMIT_S)


def fail(shape: StepShape) -> Any:
    raise RuntimeError("out of luck")


def wait_until(condition: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_requested_programs_precede_prepared_ones_latest_first(compiler, maker):
    begin(compiler, maker, *SHAPES[:2])
    assert compiler.current == SHAPES[0]
    compiler.request(SHAPES[2])
    compiler.request(SHAPES[3])
    compiler.request(SHAPES[2])  # no program is compiled twice
    assert compiler.num_wanted == 4
    maker.let_all()
    compiler.wait_for_all()
    assert maker.made == [SHAPES[0], SHAPES[3], SHAPES[2], SHAPES[1]]
    assert all(shape in compiler for shape in SHAPES)
    assert (compiler.num_wanted, compiler.num_made) == (0, 4)
    assert threading.main_thread() not in maker.threads
    assert compiler.get(SHAPES[1]) == "program 2"
    wait_until(lambda: not any(thread.is_alive() for thread in maker.threads))
    compiler.request(SHAPES[0])  # the program exists already, so no thread is started
    assert compiler.num_made == 4


def test_interrupts_at_any_time_leave_the_lock_free(compiler, maker):
    """Other threads continue after Ctrl-C in the requesting thread."""
    begin(compiler, maker, *SHAPES[:2])
    assert interrupt_often(lambda: compiler.num_wanted, 0.5) > 10
    other = threading.Thread(target=lambda: compiler.current, daemon=True)
    other.start()
    other.join(LIMIT_S)
    assert not other.is_alive()
    maker.let_all()
    compiler.wait_for_all()


def test_interrupt_of_a_request_does_not_stop_later_ones(compiler, maker, monkeypatch):
    """Ctrl-C while the compiler's thread is being started."""
    maker.let_all()

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiler.request(SHAPES[0])
    compiler.request(SHAPES[1])
    wait_until(lambda: SHAPES[0] in compiler and SHAPES[1] in compiler)


def test_interrupt_of_a_compile_in_the_callers_thread_lets_it_begin_again(
    compiler, maker, monkeypatch
):
    """Ctrl-C just after the program was noted as being made."""
    maker.let_all()

    class Making(dict[StepShape, None]):
        def __setitem__(self, shape: StepShape, value: None) -> None:
            super().__setitem__(shape, value)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_making", Making())
        with pytest.raises(KeyboardInterrupt):
            compiler.get(SHAPES[0])
        assert not compiler._making
    assert compiler.get(SHAPES[0]) == "program 1"


def test_threads_compile_several_programs_at_once(maker):
    announced = list[str]()
    compiler = Compiler(maker, num_threads=2)
    compiler.announce = announced.append
    begin(compiler, maker, *SHAPES)
    assert maker.began.acquire(timeout=LIMIT_S)
    assert not maker.began.acquire(timeout=0.05)
    assert compiler.current in SHAPES[:2] and compiler.num_wanted == 4
    maker.may_go.release()
    assert maker.began.acquire(timeout=LIMIT_S)
    assert "" not in announced, "another program was in progress"
    maker.let_all()
    compiler.wait_for_all()
    wait_until(lambda: not compiler._threads)
    assert len(maker.threads) == 2
    assert sorted(maker.made, key=SHAPES.index) == SHAPES
    assert all(shape in compiler for shape in SHAPES)
    assert compiler.current is None and announced[-1] == ""


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (24, 3), (96, 4), (None, 1)])
def test_number_of_threads_depends_on_the_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: cores)
    assert Compiler(fail)._num_threads == threads


def test_get_waits_for_a_program_in_progress(compiler, maker):
    begin(compiler, maker, SHAPES[0])
    threading.Timer(0.05, maker.let_all).start()
    assert compiler.get(SHAPES[0]) == "program 1"
    assert maker.made == [SHAPES[0]]
    assert compiler.get(SHAPES[1]) == "program 2"  # this thread compiles the program
    assert threading.current_thread() in maker.threads


def test_wait_ends_when_a_program_is_made(compiler, maker):
    start = time.monotonic()
    compiler.wait(LIMIT_S)  # nothing was requested
    compiler.request(SHAPES[0])
    compiler.wait(0.01)
    assert SHAPES[0] not in compiler
    version = compiler.version
    threading.Timer(0.05, maker.let_all).start()
    while SHAPES[0] not in compiler:
        compiler.wait(LIMIT_S)
    assert compiler.version > version
    assert time.monotonic() - start < LIMIT_S / 2


def test_failed_program_is_reported_once_and_not_retried():
    tried = []

    def make(shape: StepShape) -> Any:
        tried.append(shape)
        if shape == SHAPES[0]:
            raise MemoryError("no room")
        return shape

    compiler = Compiler(make, num_threads=1)
    compiler.request(SHAPES[0])
    wait_until(lambda: compiler.failures)
    compiler.request(SHAPES[0])
    compiler.request(SHAPES[1])
    wait_until(lambda: SHAPES[1] in compiler)
    assert tried == SHAPES[:2]
    with pytest.raises(MemoryError, match="no room"):
        compiler.wait_for_all()
    compiler.check(lambda shape: shape != SHAPES[0])  # other programs serve
    with pytest.raises(MemoryError, match="no room"):
        compiler.check(lambda shape: shape == SHAPES[0])
    compiler.check()
    with pytest.raises(MemoryError, match="no room"):
        compiler.get(SHAPES[0])


def test_programs_begun_before_clear_are_dropped(compiler, maker):
    begin(compiler, maker, *SHAPES)
    compiler.clear()
    maker.let_all()
    wait_until(lambda: not compiler.num_wanted)
    assert maker.made == SHAPES[:1]
    assert SHAPES[0] not in compiler
    assert compiler.get(SHAPES[0]) == "program 1"  # the program is compiled again
    assert maker.made == [SHAPES[0]] * 2


def test_memory_is_trimmed_after_each_batch_of_programs(compiler, maker, monkeypatch):
    trimmed: list[int] = []
    monkeypatch.setattr(
        compiling, "trim_malloc", lambda: trimmed.append(len(maker.made))
    )
    maker.let_all()
    compiler.get(SHAPES[3])
    assert trimmed == [1]
    compiler.prepare(SHAPES[:3])
    wait_until(lambda: not compiler._threads)
    assert trimmed == [1, 4], "once for all three"
    compiler.clear()
    assert trimmed == [1, 4, 4]


def test_failure_of_program_begun_before_clear_is_dropped():
    """The engine stopped drafting while a program with drafts was compiled."""
    maker = Maker(RuntimeError("out of luck"))
    compiler = Compiler(maker, num_threads=1)
    begin(compiler, maker, SHAPES[0])
    compiler.clear()
    maker.let_all()
    wait_until(lambda: maker.made and not compiler.num_wanted)
    compiler.check()
    compiler.request(SHAPES[0])
    wait_until(lambda: len(maker.made) == 2 and not compiler.num_wanted)
    with pytest.raises(RuntimeError, match="out of luck"):
        compiler.check()


def test_failure_is_recorded_before_the_queue_is_empty(monkeypatch):
    """Otherwise `wait_for_all` could return without raising the failure."""
    seen: list[list[StepShape]] = []
    compiler = Compiler(fail, num_threads=1)
    monkeypatch.setattr(
        compiling, "trim_malloc", lambda: seen.append(list(compiler.failures))
    )
    compiler.request(SHAPES[0])
    wait_until(lambda: bool(seen))
    assert seen == [[SHAPES[0]]]


def test_stop_drops_the_queue(compiler, maker):
    begin(compiler, maker, *SHAPES)
    compiler.stop()
    maker.let_all()
    wait_until(lambda: not compiler.num_wanted)
    assert maker.made == SHAPES[:1]
    assert SHAPES[0] in compiler


def test_failures_after_a_stop_are_reported_only_after_a_clear(caplog):
    maker = Maker(RuntimeError("Array has been deleted"))
    compiler = Compiler(maker, num_threads=1)
    begin(compiler, maker, SHAPES[0])
    compiler.stop()
    maker.let_all()
    wait_until(lambda: maker.made and not compiler.num_wanted)
    compiler.check()
    assert not caplog.records
    # An engine that was shut down may be woken up, and then compiles again.
    compiler.clear()
    compiler.request(SHAPES[0])
    wait_until(lambda: len(maker.made) == 2 and not compiler.num_wanted)
    with pytest.raises(RuntimeError, match="has been deleted"):
        compiler.check()


def test_exit_waits_for_current_program_and_drops_the_queue(compiler, maker):
    # Python does not wait for this thread at exit, because a thread started by a daemon
    # thread is a daemon as well.
    thread = threading.Thread(target=compiler.prepare, args=(SHAPES[:2],), daemon=True)
    thread.start()
    assert maker.began.acquire(timeout=LIMIT_S)
    compiler.begin_exit()
    compiler.request(SHAPES[2])
    assert compiler.num_wanted == 1
    exiting = threading.Thread(target=compiler.finish_exit)
    exiting.start()
    exiting.join(0.05)
    assert exiting.is_alive()
    maker.let_all()
    exiting.join(LIMIT_S)
    assert not exiting.is_alive()
    assert maker.made == SHAPES[:1]
    assert not any(one.is_alive() for one in maker.threads)
    # After the exit handler has run, daemon threads start no other program; the main
    # thread still may, in a later exit handler.
    threading.Thread(target=compiler.get, args=(SHAPES[3],), daemon=True).start()
    assert not maker.began.acquire(timeout=0.05)
    assert compiler.get(SHAPES[2]) == "program 4"
    assert maker.made == [SHAPES[0], SHAPES[2]]


def test_exit_waits_for_a_program_made_by_another_thread(compiler, maker):
    threading.Thread(target=compiler.get, args=(SHAPES[0],), daemon=True).start()
    assert maker.began.acquire(timeout=LIMIT_S)
    compiler.begin_exit()
    threading.Timer(0.05, maker.let_all).start()
    compiler.finish_exit()
    assert maker.made == SHAPES[:1]


def test_removing_a_listener_during_a_compile_is_not_a_failure():
    """`LLM.generate` removes its listener when it ends, perhaps during a compile."""

    class Removed(Compiler):
        listeners = iter([print])

        def __getattribute__(self, name: str) -> Any:
            if name == "announce":
                return next(type(self).listeners, None)
            return super().__getattribute__(name)

    assert Removed(lambda shape: shape).get(SHAPES[0]) == SHAPES[0]
