"""The lock that makes an engine usable from several threads."""

import functools
import threading
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    no_type_check,
    runtime_checkable,
)

P = ParamSpec("P")
R = TypeVar("R")


# The class of reentrant locks, which is written in C: a `with` statement calls its
# `__exit__` directly. In a method written in Python, an interrupt could prevent the
# release of the lock.
_RLock: Any = type(threading.RLock())


class EngineLock(_RLock):
    """A reentrant lock that is fair to waiting threads, for `with` statements.

    A thread that steps an engine in a loop releases the lock for some microseconds
    between two steps. It would reacquire a `threading.RLock` before a waiting thread
    wakes up.
    """

    def __init__(self):
        # Held by the one thread that waits for the lock. It acquires the lock before a
        # thread that has just released it.
        self._next = threading.Lock()

    @no_type_check  # a wrapper in Python could be interrupted after this has returned
    def __enter__(self):
        """Acquire the lock; a thread that owns it acquires it again at once."""
        # An interrupt may arrive just after the lock was acquired. A lock that is owned
        # is acquired without waiting, so that no interrupt arrives before.
        is_nested = self._is_owned()
        try:
            if is_nested:
                self.acquire()
            else:
                with self._next:
                    self.acquire()
        except BaseException:
            if self._is_owned():
                self.release()
            raise


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
