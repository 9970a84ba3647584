"""Python programs in their own processes, with logs."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.programs import ROOT


class Program:
    """A running program, and the output that it has written."""

    def __init__(self, words: list[Any], log: Path, **options: Any):
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=file, stderr=file, cwd=ROOT, **options
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait(self, is_so: Callable[[], bool], limit_s: float = 600.0) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def end(self) -> None:
        """Stop a server, which must end without an error."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.said
        assert "Traceback" not in self.said, self.said


@contextmanager
def running(program: Program) -> Iterator[Any]:
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()
