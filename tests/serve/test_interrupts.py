"""Ctrl-C and SIGTERM end servers and commands fast, at every stage of their start.

No process may crash or print a traceback, even while XLA compiles. Programs are
compiled with users' settings, so slowly that the signal arrives during a compile.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from jaxspec.exit import INTERRUPTED
from tests.support.programs import users_flags

ROOT = Path(__file__).parents[2]
# The limit is generous, because other processes may use the cores too.
END_S = 30.0
SERVER = ("jaxspec.serve", "--port", "0", "--max-num-seqs", "1")
LISTENS, READY = "Application startup complete", "The server is ready"
GENERATE = ("jaxspec", "generate", "Once upon a time", "--max-tokens", "4")
# Restores SIGINT in the child process, as the parent process may ignore it.
RUN = (
    "import runpy, signal, sys;"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "sys.argv = sys.argv[1:];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class Program:
    """A running command, and the output that it has written."""

    def __init__(self, arguments: tuple[str, ...], folder: Path):
        self._log, self._cache = folder / "log", folder / "cache"
        cached = ("--compilation-cache-dir", str(self._cache))
        # With the tests' program cache, nothing would be compiled.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("JAX_COMPILATION")
        }
        environment["XLA_FLAGS"] = users_flags()
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, *arguments, *cached],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=environment,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def says(self, text: str, after_s: float = 0.0) -> None:
        """Wait until the output contains a text, and then `after_s` seconds more."""
        self.wait(lambda: text in self.said)
        time.sleep(after_s)

    def has_loaded(self, library: str) -> None:
        """Wait until a shared library is loaded."""
        self.wait(lambda: library in Path(f"/proc/{self.process.pid}/maps").read_text())

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not is_so():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def end(self, number: int) -> int:
        """Send a signal; check for a fast and clean exit; return the status."""
        self.process.send_signal(number)
        status = self.process.wait(END_S)
        assert "Traceback" not in self.said, self.said
        assert "Exception ignored" not in self.said, self.said
        # Files that are being written have a temporary name until they are complete.
        for path in self.programs:
            assert path.stat().st_size > 10_000
        return status

    @property
    def programs(self) -> list[Path]:
        """Return the files of the programs in the cache."""
        return list(self._cache.glob("*.program"))


@contextmanager
def started(arguments: tuple[str, ...], folder: Path) -> Iterator[Program]:
    program = Program(arguments, folder)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()


needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="no /proc: not Linux"
)


@needs_maps
@pytest.mark.parametrize("arguments", [SERVER, GENERATE], ids=["serve", "generate"])
def test_interrupt_during_import_of_jax(arguments: tuple[str, ...], tmp_path: Path):
    # A signal before that would arrive while the interpreter imports jaxspec (0.3 s).
    with started(arguments, tmp_path) as program:
        program.has_loaded("jaxlib")
        assert program.end(signal.SIGINT) == INTERRUPTED
        assert program.said.endswith("\nInterrupted.\n")


def test_interrupt_during_weight_loading(tmp_path: Path):
    with started(SERVER, tmp_path) as program:
        program.says("dtype=auto")
        assert program.end(signal.SIGINT) == INTERRUPTED


@pytest.mark.parametrize(
    ("number", "after_s"),
    [
        (signal.SIGINT, 0.0),
        (signal.SIGTERM, 1.0),
        pytest.param(signal.SIGINT, 0.5, marks=pytest.mark.slow),
    ],
)
def test_signal_during_first_compile(number: int, after_s: float, tmp_path: Path):
    with started(SERVER, tmp_path) as program:
        program.says(LISTENS, after_s)
        assert READY not in program.said
        assert program.end(number) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "after_s"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 3.0)]
)
def test_signal_during_later_compile(number: int, after_s: float, tmp_path: Path):
    with started(SERVER, tmp_path) as program:
        program.says(READY, after_s)
        assert program.end(number) == 0
        assert program.programs


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 8.0])
def test_interrupt_during_warm_up_all(after_s: float, tmp_path: Path):
    with started((*SERVER, "--warm-up", "all"), tmp_path) as program:
        program.says("Compiling", after_s)
        assert LISTENS not in program.said
        assert program.end(signal.SIGINT) == INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_interrupt_of_compiling_command(after_s: float, tmp_path: Path):
    with started(GENERATE, tmp_path) as program:
        program.says("Compiling", after_s)
        assert program.end(signal.SIGINT) == INTERRUPTED
        assert program.said.endswith("\nInterrupted.\n")


@pytest.mark.slow
def test_killed_server_restarts_with_the_programs_it_compiled(tmp_path: Path):
    """SIGKILL ends it during a stream; the restarted server has the same cache."""
    few = ("--num-speculative-tokens", "1", "--max-num-batched-tokens", "32")
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    texts, ready_s = [], []
    for _ in ("cold", "warm"):
        start = time.monotonic()
        with started((*SERVER, *few), tmp_path) as program:
            program.says(READY)
            ready_s.append(time.monotonic() - start)
            (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)", program.said)
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=600) as client:
                answer = client.post("/v1/completions", json=body).raise_for_status()
                texts.append(answer.json()["choices"][0]["text"])
                long = body | {"stream": True, "max_tokens": 200, "ignore_eos": True}
                with client.stream("POST", "/v1/completions", json=long) as response:
                    next(response.iter_lines())
                    program.process.kill()
                    program.process.wait()
        assert program.programs
    assert texts[0] == texts[1]
    assert ready_s[1] < ready_s[0]
