"""The lock of an engine: reentrant, fair, and free after an interrupt."""

import threading
import time
from typing import Any

import pytest

from jaxspec.engine.engine_lock import EngineLock, exclusive

LIMIT_S = 20.0


def is_free(lock: EngineLock) -> bool:
    """Whether another thread gets the lock."""
    thread = threading.Thread(target=lambda: (lock.acquire(), lock.release()))
    thread.daemon = True
    thread.start()
    thread.join(0.5)
    return not thread.is_alive()


def test_reentrant_and_free_after_the_last_release():
    lock = EngineLock()
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)


def test_a_waiting_thread_goes_before_one_that_has_just_released():
    """`threading.RLock` goes back to the thread that released it."""
    lock, turns = EngineLock(), []

    def wait() -> None:
        with lock:
            turns.append("other")

    for _ in range(20):
        lock.acquire()
        thread = threading.Thread(target=wait)
        thread.start()
        end = time.monotonic() + LIMIT_S
        while not lock._next.locked():
            assert time.monotonic() < end
            time.sleep(0.001)
        lock.release()
        with lock:
            turns.append("loop")
        thread.join()
    assert turns == ["other", "loop"] * 20


def test_an_interrupt_just_after_acquiring_releases_the_lock():
    """As in `Lock.acquire`, which handles signals before it returns."""
    lock = EngineLock()

    class Interrupted:
        def __init__(self, held: Any):
            self._is_owned, self.release = held._is_owned, held.release
            self._acquire = held.acquire

        def acquire(self) -> None:
            self._acquire()
            raise KeyboardInterrupt

    held = lock._held
    lock._held = Interrupted(held)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    lock._held = held
    assert is_free(lock)


def test_methods_of_an_object_take_turns():
    class Counter:
        def __init__(self):
            self.lock, self.value = EngineLock(), 0

        @exclusive
        def add(self, amount: int) -> int:
            """Add slowly."""
            value = self.value
            time.sleep(0.001)
            self.value = value + amount
            return self.value

    counter = Counter()
    threads = [threading.Thread(target=counter.add, args=(2,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert counter.value == 40
    assert counter.add.__doc__ == "Add slowly."
