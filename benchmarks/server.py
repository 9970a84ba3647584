"""A server in a process of its own, for as long as a benchmark asks it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.machine import ROOT

LONGEST_START_S = 1800.0
# For requests to end after the signal, and for the process to go.
LONGEST_END_S = 60.0

Server = tuple[subprocess.Popen[bytes], httpx.Client, float]


@contextmanager
def served(arguments: list[str]) -> Iterator[Server]:
    """A server that is ready, a client of it, and the seconds that took."""
    with launched(arguments) as (process, client, start):
        while not is_ready(client):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < start + LONGEST_START_S, "it takes too long"
            time.sleep(0.1)
        yield process, client, time.monotonic() - start


@contextmanager
def launched(
    arguments: list[str], *, checkout: Path | None = None, folder: Path | None = None
) -> Iterator[Server]:
    """A server that may not listen yet, a client of it, and when it was started.

    Args:
        checkout: Whose server it is, with only its own packages; this one's by default.
        folder: Where all goes that it keeps, and what it says (`log`); by default what
            it keeps is where it always is.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxspec.serve", "--port", str(port), *arguments]
    own = None if checkout is None else environment(checkout, folder)
    start = time.monotonic()
    with (
        open(folder / "log" if folder else os.devnull, "ab") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        subprocess.Popen(
            command,
            cwd=checkout or ROOT,
            env=own,
            stdout=log if folder else None,
            stderr=log if folder else None,
        ) as process,
    ):
        try:
            yield process, client, start
        finally:
            process.terminate()
            try:
                process.wait(LONGEST_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def environment(checkout: Path, folder: Path | None = None) -> dict[str, str]:
    """This process's, but for packages of one checkout, and nothing compiled before."""
    own = dict(os.environ)
    # A cache that the user has set up would make every start a warm one.
    own.pop("JAX_COMPILATION_CACHE_DIR", None)
    parts = (checkout, checkout / "kernels", checkout / "checkpoints")
    own["PYTHONPATH"] = os.pathsep.join(map(str, parts))
    if folder is not None:
        own["XDG_CACHE_HOME"] = str(folder / "cache")
    return own


def is_ready(client: httpx.Client) -> bool:
    """Whether it says that it can answer."""
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
