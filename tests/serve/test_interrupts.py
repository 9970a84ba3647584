"""Ctrl-C and SIGTERM end servers and commands fast, at every stage of their start.

No process may crash or print a traceback, even while XLA compiles. Programs are
compiled with users' settings, so slowly that the signal arrives during a compile.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxspec.exit import INTERRUPTED
from tests.serve.logged_program import Program, running
from tests.support.programs import users_flags

# The limit is generous, because other processes may use the cores too.
END_S = 30.0
SERVER = ("jaxspec.serve", "--port", "0", "--max-num-seqs", "1")
LISTENS, READY = "] Serving ", "The server is ready"
WARM_ALL = (*SERVER, "--warm-up", "all")
GENERATE = ("jaxspec", "generate", "Once upon a time", "--max-tokens", "4")
# Restores SIGINT in the child process, as the parent process may ignore it.
RUN = (
    "import runpy, signal, sys;"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"
    "sys.argv = sys.argv[1:];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class Command(Program):
    """A command that compiles slowly, with a cache of its own."""

    def __init__(self, arguments: tuple[str, ...], folder: Path):
        self._cache = folder / "cache"
        words = ["-c", RUN, *arguments, "--compilation-cache-dir", str(self._cache)]
        # With the tests' program cache, nothing would be compiled.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("JAX_COMPILATION")
        }
        environment["XLA_FLAGS"] = users_flags()
        super().__init__(words, folder / "log", env=environment)

    def wait_for(self, text: str) -> None:
        """Wait until the output, or a loaded library's path, contains a text."""
        maps = Path(f"/proc/{self.process.pid}/maps")
        self.wait(lambda: text in self.said or text in maps.read_text())

    @property
    def programs(self) -> list[Path]:
        """Return the files of the programs in the cache."""
        return list(self._cache.glob("*.program"))


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc: not Linux")
@pytest.mark.parametrize(
    ("arguments", "text", "after_s", "number", "status"),
    [
        # While jaxspec is imported: numpy is, jax is not yet.
        (("jaxspec", "generate", "x"), "numpy", 0.0, signal.SIGINT, INTERRUPTED),
        (SERVER, "numpy", 0.0, signal.SIGINT, INTERRUPTED),
        slow(SERVER, "jaxlib", 0.0, signal.SIGINT, INTERRUPTED),
        (GENERATE, "jaxlib", 0.0, signal.SIGINT, INTERRUPTED),
        # While weights are loaded.
        (SERVER, "dtype=auto", 0.0, signal.SIGINT, INTERRUPTED),
        # During the first compile.
        slow(SERVER, LISTENS, 0.0, signal.SIGINT, 0),
        (SERVER, LISTENS, 1.0, signal.SIGTERM, 0),
        slow(SERVER, LISTENS, 0.5, signal.SIGINT, 0),
        # During a later compile.
        slow(SERVER, READY, 0.0, signal.SIGTERM, 0),
        slow(SERVER, READY, 3.0, signal.SIGINT, 0),
        # During compiles before the server listens, and of a command.
        slow(GENERATE, "Compiling", 0.0, signal.SIGINT, INTERRUPTED),
        slow(GENERATE, "Compiling", 0.5, signal.SIGINT, INTERRUPTED),
        slow(WARM_ALL, "Memory of", 1.0, signal.SIGINT, INTERRUPTED),
        slow(WARM_ALL, "Memory of", 8.0, signal.SIGINT, INTERRUPTED),
    ],
)
def test_signal_ends_program(
    arguments: Any, text: str, after_s: float, number: int, status: int, tmp_path: Path
):
    with running(Command(arguments, tmp_path)) as program:
        program.wait_for(text)
        time.sleep(after_s)
        has_begun = {one for one in (LISTENS, READY) if one in program.said}
        program.process.send_signal(number)
        assert program.process.wait(END_S) == status
        assert "Traceback" not in program.said, program.said
        assert "Exception ignored" not in program.said, program.said
        if status == INTERRUPTED:
            assert not has_begun
            assert program.said.endswith("\nInterrupted.\n")
        else:
            assert has_begun == ({LISTENS} if text == LISTENS else {LISTENS, READY})
        assert program.programs or text != READY
        # Files that are being written have a temporary name until they are complete.
        assert all(path.stat().st_size > 10_000 for path in program.programs)


@pytest.mark.slow
def test_killed_server_restarts_with_the_programs_it_compiled(tmp_path: Path):
    """SIGKILL ends it during a stream; the restarted server has the same cache."""
    few = ("--num-speculative-tokens", "1", "--max-num-batched-tokens", "32")
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    texts, ready_s = [], []
    for _ in ("cold", "warm"):
        start = time.monotonic()
        with running(Command((*SERVER, *few), tmp_path)) as program:
            program.wait_for(READY)
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
