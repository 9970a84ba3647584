"""The lock that makes an engine usable from several threads."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

P = ParamSpec("P")
R = TypeVar("R")


class EngineLock:
    """A reentrant lock that threads get in turn.

    A thread that steps an engine in a loop releases the lock for some microseconds
    between two steps. It would get a `threading.RLock` back before a waiting thread has
    woken up.
    """

    def __init__(self):
        self._held: Any = threading.RLock()  # has `_is_owned`, as `Condition` expects
        # Held by the one thread that waits for `_held`: it goes before a thread that
        # has just released `_held` and asks for it again.
        self._next = threading.Lock()

    def acquire(self) -> None:
        """Wait for the lock; a thread that has it gets it again at once."""
        if self._held._is_owned():
            self._held.acquire()
            return
        try:
            with self._next:
                self._held.acquire()
        except BaseException:
            if self._held._is_owned():  # an interrupt just after the lock was acquired
                self._held.release()
            raise

    def release(self) -> None:
        """Release the lock; it is free after as many calls as of `acquire`."""
        self._held.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self._held.release()


@runtime_checkable
class Locked(Protocol):
    """An object whose methods may be called in any thread."""

    lock: EngineLock


S = TypeVar("S", bound=Locked)


def exclusive(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Hold the object's lock while the method runs."""

    @functools.wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return run
