"""Interrupts of the main thread: at a given instruction, and many at any time."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# The modules that wait for other threads, or give them work.
WAITING = ("engine_group.py", "threading.py", "_base.py", "thread.py")


def interrupted_at(number: int, function: Callable[[], object]) -> bool:
    """Interrupt a call after `number` instructions; return whether it was interrupted.

    Only instructions of modules in `WAITING` count.
    """
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(WAITING):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupt_often(function: Callable[[], object], seconds: float) -> int:
    """Repeat a call while Ctrl-C interrupts it; return the number of interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    num_interrupts = 0
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            timer = threading.Timer(0.001, _thread.interrupt_main)
            try:
                timer.start()
                while True:
                    function()
            except KeyboardInterrupt:
                num_interrupts += 1
                timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    return num_interrupts
