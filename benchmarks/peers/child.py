"""The parent's side of a child: start it on some cores, ask it, end it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

# A reason stands in a table.
MOST_CHARACTERS = 200


class PeerError(Exception):
    """A peer did not do what it was asked; the message is a reason for a table."""


@contextlib.contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """Let processes that are started here run on these cores only, where it can be."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A process that answers lines of JSON; see `answer`.

    Attributes:
        about: Version and settings, as the child says when it has loaded.
    """

    def __init__(
        self,
        command: list[str],
        task: dict[str, Any],
        *,
        cores: list[int],
        environment: Mapping[str, str],
        limit_s: float,
    ):
        # What it says to people; an end of it becomes a reason.
        self._log = tempfile.TemporaryFile()
        try:
            with on_cores(cores):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    env=dict(environment),
                    # A group of its own: what it starts ends with it.
                    start_new_session=True,
                )
        except BaseException:
            self._log.close()
            raise
        try:
            self.about = self.ask(task, limit_s)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            PeerError: It has ended, or takes longer than `limit_s`; it is gone then.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        line = ""
        # A child that has ended reads nothing more.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        timer.cancel()
        if is_late.is_set():
            raise PeerError(f"took longer than {limit_s:.0f} s")
        if not line.endswith("\n"):
            code = self._process.wait()
            raise PeerError(f"ended with code {code}: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return shorten(lines[-1]) if lines else "it said nothing"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and all that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def shorten(reason: str) -> str:
    """A reason without folders of this machine, and not too long."""
    text = re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", reason)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"
