"""The lock of an engine: reentrant, fair, and free after an interrupt."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxspec.engine.engine_lock import EngineLock, exclusive
from tests.support.interrupts import interrupt_often

LIMIT_S = 20.0


def is_free(lock: EngineLock) -> bool:
    """Return whether another thread can acquire the lock."""

    def enter() -> None:
        with lock:
            pass

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_waiting_thread_precedes_the_releasing_thread():
    """A waiting thread gets the lock before the thread that has just released it.

    With `threading.RLock`, the releasing thread would usually get it again.
    """
    lock, turns = EngineLock(), []

    def wait() -> None:
        with lock:
            turns.append("other")

    for _ in range(20):
        with lock:
            thread = threading.Thread(target=wait)
            thread.start()
            end = time.monotonic() + LIMIT_S
            while not lock._next.locked():
                assert time.monotonic() < end
                time.sleep(0.001)
        with lock:
            turns.append("loop")
        thread.join()
    assert turns == ["other", "loop"] * 20


def test_an_interrupt_just_after_acquiring_releases_the_lock():
    """`Lock.acquire` handles signals between acquiring the lock and returning."""

    class Interrupted(EngineLock):
        is_interrupted = True

        def acquire(self) -> None:
            super().acquire()
            if self.is_interrupted:
                raise KeyboardInterrupt

    lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    lock.is_interrupted = False
    assert is_free(lock)


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_interrupts_at_any_time_leave_the_lock_free(num_waiting: int):
    lock, is_over = EngineLock(), threading.Event()

    def loop() -> None:
        while not is_over.is_set():
            with lock:
                sum(range(100))

    threads = [threading.Thread(target=loop) for _ in range(num_waiting)]
    for thread in threads:
        thread.start()

    def enter() -> None:
        with lock, lock:
            sum(range(100))

    try:
        num_interrupts = interrupt_often(enter, 1.0)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert num_interrupts > 10
    assert not any(thread.is_alive() for thread in threads)
    assert is_free(lock)


def test_methods_of_an_object_take_turns():
    class Counter:
        def __init__(self):
            self.lock, self.value = EngineLock(), 0

        @exclusive
        def add(self, increment: int) -> None:
            """Increment slowly, so that threads without the lock would interfere."""
            value = self.value
            time.sleep(0.001)
            self.value = value + increment

    counter = Counter()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(counter.add, [2] * 20))
    assert counter.value == 40
    assert (counter.add.__doc__ or "").startswith("Increment slowly")
