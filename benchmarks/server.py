"""A server in a process of its own, for as long as a benchmark asks it."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from benchmarks.machine import ROOT

LONGEST_START_S = 1800.0


@contextmanager
def served(
    arguments: list[str], *, is_quiet: bool = True
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, float]]:
    """A server that is ready, a client of it, and the seconds that took.

    Args:
        is_quiet: Nothing is compiled any more, which is not in the seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxspec.serve", "--port", str(port), *arguments]
    start = time.monotonic()
    with (
        subprocess.Popen(command, cwd=ROOT) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            while not _is_ready(client):
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < start + LONGEST_START_S, "it takes too long"
                time.sleep(0.1)
            seconds = time.monotonic() - start
            while is_quiet and _is_warming(client):
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < start + LONGEST_START_S, "it takes too long"
                time.sleep(1.0)
            yield process, client, seconds
        finally:
            process.terminate()


def _is_warming(client: httpx.Client) -> bool:
    """Whether the server still compiles; /metrics says it of its warm-up."""
    text = client.get("/metrics").text
    return any(map(float, re.findall(r"^jaxspec:warming{.*} (\S+)$", text, re.M)))


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
