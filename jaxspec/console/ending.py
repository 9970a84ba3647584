"""Owns how the programs of the command line end: at once, whatever is being compiled.

XLA cannot be told to stop, and a program takes it seconds to minutes. Python waits at
its end for the thread that compiles; a process that ended without waiting would take
away what XLA still uses, and crash. `os._exit` takes nothing away.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# The shell's status for an interrupt.
INTERRUPTED = 128 + signal.SIGINT
# The name of an engine's thread that compiles.
COMPILER_THREAD = "jaxspec-compiler"


def end(status: int) -> NoReturn:
    """End the process with what a program has returned: all that it had to do is done.

    While nothing is compiled this is `sys.exit`.
    """
    if not is_compiling():
        sys.exit(status)
    logging.shutdown()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            file.flush()
    os._exit(status)


def is_compiling() -> bool:
    """Whether a thread of this process is at a program."""
    return any(thread.name == COMPILER_THREAD for thread in threading.enumerate())


@contextmanager
def interrupts_end(release: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Have Ctrl-C end the process, for as long as there is nothing to end in order.

    As an exception it would come out of whatever goes on at a start: a library that is
    being imported makes another error of it, a callback loses it.

    Args:
        release: Called before; gives back what would stay, such as a socket's file.
    """

    def end_now(*_: object) -> None:
        release()
        # Not by `print`, which the interrupt may have come in the middle of.
        os.write(2, b"\nInterrupted.\n")
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
