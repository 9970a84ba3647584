"""Processes exit with their own status, even while compiling, and at once on Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxspec.exit import INTERRUPTED, interrupts_end
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
COMPILES = """
import logging, threading, time
from jaxspec.exit import COMPILER_THREAD, end, is_compiling
threading.Thread(target=time.sleep, args=({seconds},), name=COMPILER_THREAD).start()
logging.basicConfig()
"""
PRINTS = """
logging.getLogger().warning("logged")
print("printed", end="")
assert is_compiling() == {is_compiling}
end(3)
"""
# Sends SIGINT when jaxspec imports its first module.
INTERRUPTS = """
import importlib.abc, os, signal, sys
class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name in ("jaxspec.inputs", "numpy"):
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
"""
STARTS = """
import signal, time
from jaxspec.exit import interrupts_end
# The parent process may ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
class Loses:
    def __del__(self):
        time.sleep(100)
with interrupts_end(lambda: print("released", flush=True)):
    print("begun", flush=True)
    try:
        Loses()
    except BaseException:
        print("caught")
"""

FINISHES = """
import atexit, os, threading, weakref
from jaxspec.exit import finish_at_exit
atexit.register(print, "jax is cleaned up")
class Engine:
    def __init__(self, name):
        self.name = name
        finish_at_exit(self)
    def begin_exit(self):
        print("begin")
    def finish_exit(self):
        if self.name == "bad":
            raise RuntimeError("out of order")
        print("finish")
engines = [Engine("good"), Engine("bad"), Engine("good")]
weakref.finalize(engines[0], print, "a trace's arrays are gone")
del engines[2]
threading.Timer(0.3, print, ["the thread has ended"]).start()
print("ends", flush=True)
if not os.fork():
    raise SystemExit(0)  # prints only the other handlers' lines
os.wait()
raise SystemExit(7)
"""


@pytest.mark.parametrize("is_compiling", [False, True])
def test_end_flushes_output_and_exits_with_the_status(is_compiling: bool):
    seconds = 100 if is_compiling else 0
    code = COMPILES.format(seconds=seconds)
    code += "" if is_compiling else "time.sleep(0.2)"
    code += PRINTS.format(is_compiling=is_compiling)
    start = time.monotonic()
    done = run_python("-c", code)
    assert time.monotonic() - start < 60
    assert (done.returncode, done.stdout) == (3, "printed"), done.stderr
    assert done.stderr == "WARNING:root:logged\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_engines_finish_in_order_at_exit():
    done = run_python("-c", FINISHES)
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        "ends",
        "jax is cleaned up",  # printed by the child
        "a trace's arrays are gone",  # printed by the child
        "the thread has ended",
        "begin",
        "begin",
        "finish",
        "jax is cleaned up",
        "a trace's arrays are gone",
    ]
    assert "RuntimeError: out of order" in done.stderr


def test_interrupt_during_start_is_not_lost():
    """As an exception, the interrupt could be lost, for example in a `__del__`."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (INTERRUPTED, "released\n")
    assert error == "\nInterrupted.\n"


@pytest.mark.parametrize(
    ("words", "is_program"),
    [
        (("-m", "jaxspec", "--version"), True),
        (("-u", "-m", "jaxspec.bench"), True),
        (("-m", "jaxspec.train", "heads"), True),
        (("bin/jaxspec", "--version"), True),
        (("-m", "others_program", "-m", "jaxspec"), False),
        (("others_program.py", "jaxspec"), False),
    ],
)
def test_interrupt_while_modules_are_imported(words, is_program, tmp_path):
    """Programs of jaxspec end without a traceback; others get a KeyboardInterrupt."""
    for name, text in {
        "sitecustomize.py": INTERRUPTS,
        "bin/jaxspec": "from jaxspec.__main__ import script\nscript()",
        "others_program.py": "import jaxspec",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    done = run_python(*words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == -signal.SIGINT
    if is_program:
        assert not done.stderr
    else:
        assert done.stderr.endswith("\nKeyboardInterrupt\n")


def test_interrupt_during_exit_has_no_traceback():
    code = """
import atexit, os, signal
from jaxspec.exit import run_main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
run_main(lambda: print("done", flush=True) or 3)
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "done\n", "")


def test_interrupt_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    try:
        # Shells start background jobs with SIGINT ignored.
        handler = signal.default_int_handler
        signal.signal(signal.SIGINT, handler)
        with interrupts_end():
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_end():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
