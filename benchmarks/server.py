"""A server in a process of its own, for as long as a benchmark asks it.

How it starts, what it tells of its programs, what it uses, and how it ends.
"""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import LONGEST_ANSWER_S, POLL_S, complete
from jaxspec_kernels import native

ROOT = Path(__file__).parents[1]
LONGEST_START_S = 1800.0
# For requests to end after the signal, and for the process to go.
LONGEST_END_S = 60.0
# Of the first request.
FIRST_TOKENS = 16
# In the name of the number of programs that a running server still compiles; an older
# one has no such number.
WARMING = "warming"

Server = tuple[subprocess.Popen[bytes], httpx.Client, float]


@contextmanager
def served(arguments: list[str], *, is_quiet: bool = True) -> Iterator[Server]:
    """A server that is ready, a client of it, and the seconds that took.

    Args:
        is_quiet: Nothing is compiled any more, which is not in the seconds.
    """
    with launched(arguments) as (process, client, start):
        while not is_ready(client):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < start + LONGEST_START_S, "it takes too long"
            time.sleep(0.1)
        seconds = time.monotonic() - start
        while is_quiet and num_warming(read_totals(client)):
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < start + LONGEST_START_S, "it takes too long"
            time.sleep(1.0)
        yield process, client, seconds


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
    """This process's, but for packages of one checkout, and nothing compiled before.

    Operations in C++ are not: they are built when jaxspec is installed.
    """
    own = dict(os.environ)
    own.setdefault(native.VARIABLE, str(native.cache_folder()))
    # A cache that the user has set up would make every start a warm one.
    own.pop("JAX_COMPILATION_CACHE_DIR", None)
    parts = (checkout, checkout / "kernels", checkout / "checkpoints")
    own["PYTHONPATH"] = os.pathsep.join(map(str, parts))
    if folder is not None:
        own["XDG_CACHE_HOME"] = str(folder / "cache")
    return own


def install(checkout: Path) -> None:
    """Have a checkout build what is built when it is installed, if it has that."""
    code = "from jaxspec_kernels import native; native.is_available()"
    words = [sys.executable, "-c", code]
    own = environment(checkout)
    subprocess.run(words, cwd=checkout, env=own, stderr=subprocess.DEVNULL, check=False)


def is_ready(client: httpx.Client) -> bool:
    """Whether it says that it can answer."""
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def samples(text: str) -> dict[str, float]:
    """What /metrics tells, over all labels, by the name of its sample."""
    found: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)


def totals(text: str) -> dict[str, float]:
    """What /metrics tells of programs."""
    return {
        name: value
        for name, value in samples(text).items()
        if any(word in name for word in ("compile", "program", WARMING))
        and not name.endswith(("_created", "_bucket"))
    }


def num_warming(told: dict[str, float]) -> float | None:
    """Programs that are still to be compiled; None where nobody tells that."""
    found = [count for name, count in told.items() if WARMING in name]
    return sum(found) if found else None


def read_totals(client: httpx.Client) -> dict[str, float]:
    return totals(client.get("/metrics", timeout=LONGEST_ANSWER_S).text)


def cpu_s(pid: int) -> float:
    """CPU-s of a process, its descendants and those of them that have ended."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may have anything in it.
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            children[int(fields[1])].append(number)
            used[number] = sum(map(int, fields[11:15])) / 100
    total, left = 0.0, [pid]
    while left:
        number = left.pop()
        total += used.get(number, 0.0)
        left += children[number]
    return round(total, 1)


class Start:
    """What happens after a server was started, in seconds since then."""

    def __init__(
        self, process: subprocess.Popen[bytes], client: httpx.Client, start: float
    ):
        self._process, self._client, self._start = process, client, start
        self.found: dict[str, Any] = {}

    def _passed(self) -> float:
        return round(time.monotonic() - self._start, 2)

    def _wait(self, name: str, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._process.poll() is None, "the server has ended"
            assert self._passed() < LONGEST_START_S, f"too long until {name}"
            time.sleep(POLL_S)
        self.found[name] = self._passed()

    def wait_for_answer(self) -> None:
        """Until the port is open, then until a first request is answered.

        It is asked at once, whether or not the server says that it is ready.
        """
        self._wait("listens_s", self._listens)
        with ThreadPoolExecutor(1) as thread:
            health = thread.submit(
                self._wait, "healthy_s", lambda: is_ready(self._client)
            )
            self._wait("first_answer_s", self._answers)
            health.result()
        self.found["first_answer_cpu_s"] = cpu_s(self._process.pid)

    def wait_for_programs(self) -> None:
        """Until no more programs are compiled, where the server tells that."""

        def is_done() -> bool:
            self.found["programs"] = read_totals(self._client)
            return not num_warming(self.found["programs"])

        self._wait("all_compiled_s", is_done)
        self.found["cpu_s"] = cpu_s(self._process.pid)

    def _listens(self) -> bool:
        address = self._client.base_url.host, self._client.base_url.port or 0
        with contextlib.suppress(OSError), socket.create_connection(address, 1):
            return True
        return False

    def _answers(self) -> bool:
        try:
            complete(
                self._client,
                max_tokens=FIRST_TOKENS,
                temperature=0,
                ignore_eos=True,
            )
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return False  # it does not let anybody in yet
            raise
        return True


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> dict[str, Any]:
    """Send a signal; the exit status, and the seconds until then."""
    start = time.monotonic()
    process.send_signal(number)
    try:
        status = process.wait(LONGEST_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        status = None
    return {"status": status, "ended_s": round(time.monotonic() - start, 2)}
