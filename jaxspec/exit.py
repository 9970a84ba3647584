"""Exit of the process while engines are alive.

XLA cannot cancel a compilation, which takes seconds to minutes. The commands of this
package exit at once by `os._exit`, which frees nothing that XLA still uses.

User scripts exit normally: Python ends a daemon thread when that thread returns from
native code, and C++ code on its stack then aborts the process. Engines therefore finish
their native work before that (`finish_at_exit`), and the exit waits for native calls
that daemon threads make without an engine's lock (`call_native`).
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

from jaxspec.errors import NativePanicError, is_panic

T = TypeVar("T")

# Exit status of an interrupt, as in shells.
INTERRUPTED = 128 + signal.SIGINT
INTERRUPT_MESSAGE = b"\nInterrupted.\n"
# Name of an engine's compiler thread.
COMPILER_THREAD = "jaxspec-compiler"

_log = logging.getLogger(__name__)


@runtime_checkable
class Finishing(Protocol):
    """An object that runs native code in daemon threads."""

    def begin_exit(self) -> None:
        """Start no more calls; called on all objects before the first `finish_exit`."""
        ...

    def finish_exit(self) -> None:
        """Wait for running native calls."""
        ...


_unfinished: weakref.WeakSet[Finishing] = weakref.WeakSet()
# Ids of the threads in `call_native`.
_in_native: set[int] = set()
_has_exited = threading.Event()
# One atexit hook, registered with the first finalizer, runs all of them; hooks run in
# reverse order. This registers it before `_finish`, to run later: jax makes finalizers
# while it traces, which would break a trace that `_finish` waits for.
weakref.finalize(_unfinished, lambda: None)
# A forked process has none of the threads, and some locks may never be released.
os.register_at_fork(after_in_child=_unfinished.clear)
os.register_at_fork(after_in_child=_in_native.clear)


def call_native(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call into a native library that may release the interpreter's lock.

    Once the interpreter exits, a call in a daemon thread never returns.

    Raises:
        NativePanicError: A library in Rust panicked. Other errors pass unchanged.
    """
    thread = threading.get_ident()
    is_nested = thread in _in_native
    try:
        if not is_nested:
            _in_native.add(thread)
            _block_if_exiting(thread)
        return function(*arguments, **named)
    except BaseException as error:
        if is_panic(error):
            raise NativePanicError(f"a native library panicked: {error}") from error
        raise
    finally:
        if not is_nested:
            _in_native.discard(thread)


def _block_if_exiting(thread: int) -> None:
    """Block a daemon thread forever while the interpreter exits."""
    if _has_exited.is_set() and threading.current_thread().daemon:
        _in_native.discard(thread)
        threading.Event().wait()


def finish_at_exit(one: Finishing) -> None:
    """Finish an object when the interpreter exits, if it is still alive.

    Must be called after `jax` is imported, so that jax is cleaned up later. When the
    object is finished, all threads but daemon threads have ended.
    """
    atexit.unregister(_finish)
    atexit.register(_finish)
    _unfinished.add(one)


def _finish() -> None:
    found = list(_unfinished)
    for one in found:
        one.begin_exit()
    # Only now: a daemon thread that is blocked in `call_native` must not hold the lock
    # of an engine, for which `begin_exit` waits.
    _has_exited.set()
    while _in_native - {threading.get_ident()}:
        time.sleep(0.001)
    for one in found:
        try:
            one.finish_exit()
        except Exception:  # noqa: BLE001 - the others must finish too
            _log.exception("An engine did not shut down cleanly at exit")


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a program's main function and exit with its status; Ctrl-C exits with 130."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see `jaxspec/__init__.py`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
    except KeyboardInterrupt:
        os.write(2, INTERRUPT_MESSAGE)
        status = INTERRUPTED
    # A second Ctrl-C ends the exit itself, which would show a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end(status)


def end(status: int) -> NoReturn:
    """Exit with a status, without waiting for a running compile.

    If no compile is running, this is `sys.exit`.
    """
    if not is_compiling():
        sys.exit(status)
    logging.shutdown()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may have gone
            file.flush()
    os._exit(status)


def is_compiling() -> bool:
    """Return whether a compiler thread of this process is running."""
    return any(thread.name == COMPILER_THREAD for thread in threading.enumerate())


@contextmanager
def interrupts_end(release: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C exit the process at once, while nothing needs a clean shutdown.

    During startup a KeyboardInterrupt could be raised anywhere: a library that is being
    imported may turn it into another error, and a callback may lose it.

    Args:
        release: Called before the exit, to release anything that would outlive the
            process, such as a socket's file.
    """

    def end_now(*_: object) -> None:
        release()
        # Not `print`: the interrupt may have hit a call of it.
        os.write(2, INTERRUPT_MESSAGE)
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before == signal.SIG_IGN or not is_main:
        yield
        return
    signal.signal(signal.SIGINT, end_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
