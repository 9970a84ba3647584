"""How long nobody is answered: at a start, and while programs compile beside streams.

    python -m benchmarks.standstill --checkout FOLDER --json FILE

The server is `python -m jaxspec.serve` of any checkout, with the bundled pair and its
default flags (and those given), asked over HTTP only: so two states of the code can be
compared.
Sections, of which `--only` chooses:

- `cold`: nothing is compiled; until the port is open, until /health is 200, until the
  first 16 tokens are answered, until nothing more compiles; programs and CPU-s.
- `beside`: a stream right after that first answer, and again when all is compiled.
- `warm`: as `cold`, with what the first server left.
- `kinds`: on that server, a stream alone; then, beside a long stream, the first request
  with log-probabilities and a penalty, the first with a JSON schema, the same four at a
  time, and each once more. The longest gap of the stream, and its tokens/s.
- `llm`: `LLM(...)` in a process, until its first token, cold and warm.
- `interrupt`: SIGINT while the server compiles: how it ends.

Prints a table and one line of JSON.
"""

import argparse
import collections
import contextlib
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tqdm.auto import tqdm

from benchmarks.machine import ROOT, record
from benchmarks.server import environment, is_ready, launched
from benchmarks.startup import measure_startup

SECTIONS = ("cold", "beside", "warm", "kinds", "llm", "interrupt")
PROMPT = "The dragon looked at the map and"
FIRST_TOKENS = 16
STREAM_TOKENS = 400
# As many as the longest sequence has room for, nearly.
LONG_STREAM_TOKENS = 7500
# In the name of the number of programs that a running server still compiles; an older
# one has no such number.
WARMING = "warming"

LONGEST_START_S = 1800.0
LONGEST_ANSWER_S = 300.0
LONGEST_END_S = 60.0
# What an interrupted server may take, and when after its start it is interrupted.
END_GOAL_S = 15.0
INTERRUPT_S = (10.0, 20.0, 35.0)
# A stream runs by itself so long before and after what happens beside it.
ALONE_S = 1.0
POLL_S = 0.05

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "is_large": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "is_large", "count"],
    "additionalProperties": False,
}
SAMPLED = {"max_tokens": 32, "temperature": 0.7, "seed": 7}
KINDS: dict[str, dict[str, Any]] = {
    "logprobs and frequency_penalty": {"logprobs": 5, "frequency_penalty": 0.5},
    "JSON schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA},
        }
    },
}
CONCURRENCIES = (1, 4)


class Chunks:
    """When the parts of one or several streams came, one stream after the other."""

    def __init__(self):
        self.times: list[float] = []
        self.totals: list[int] = []

    def add(self, then: float, num_tokens: int) -> None:
        """Take down a part with so many new tokens."""
        self.times.append(then)
        self.totals.append(num_tokens + (self.totals[-1] if self.totals else 0))

    def largest_gap(self, since: float, until: float) -> float:
        """Longest time between two parts, of those that reach into the given time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        gaps = [after - then for then, after in pairs if after > since and then < until]
        return max(gaps, default=until - since)

    def rate(self, since: float, until: float) -> float:
        """Tokens per second in between."""
        return (self._total(until) - self._total(since)) / (until - since)

    def _total(self, at: float) -> int:
        return max(
            (n for then, n in zip(self.times, self.totals, strict=True) if then <= at),
            default=0,
        )

    def whole(self) -> dict[str, float]:
        """Of a stream that ran to its end."""
        first, last = self.times[0], self.times[-1]
        return {
            "tokens": self.totals[-1],
            "tokens_per_s": round((self.totals[-1] - self.totals[0]) / (last - first)),
            "gap_s": round(self.largest_gap(first, last), 3),
        }


def read_stream(
    client: httpx.Client,
    chunks: Chunks,
    *,
    num_tokens: int,
    until: Callable[[], bool] = lambda: False,
) -> Chunks:
    """Ask for a greedy stream and take down its parts, to its end or to a condition."""
    body = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    before = 0
    with client.stream(
        "POST", "/v1/completions", json=body, timeout=LONGEST_ANSWER_S
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            now = time.monotonic()
            if not line.startswith("data: {"):
                continue
            told = json.loads(line.removeprefix("data: "))
            now_tokens = told["usage"]["completion_tokens"]
            if now_tokens > before:
                chunks.add(now, now_tokens - before)
                before = now_tokens
            if until():
                break
    return chunks


class Neighbour:
    """A client that reads streams, one after the other, until it is left."""

    def __init__(self, client: httpx.Client):
        self.chunks = Chunks()
        self._client = client
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._is_over.is_set():
            read_stream(
                self._client,
                self.chunks,
                num_tokens=LONG_STREAM_TOKENS,
                until=self._is_over.is_set,
            )

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def wait_beyond(self, moment: float) -> None:
        """Wait until it has got something later than that."""
        limit = time.monotonic() + LONGEST_ANSWER_S
        while not self.chunks.times or self.chunks.times[-1] <= moment:
            assert self._thread.is_alive(), "the neighbour's stream has failed"
            assert time.monotonic() < limit, "the neighbour's stream stands still"
            time.sleep(POLL_S)


def complete(client: httpx.Client, **more: Any) -> str:
    """The text of one request."""
    body = {"prompt": PROMPT, **more}
    given = {"json": body, "timeout": LONGEST_ANSWER_S}
    response = client.post("/v1/completions", **given).raise_for_status()
    return response.json()["choices"][0]["text"]


def totals(text: str) -> dict[str, float]:
    """What /metrics tells, over all labels, of programs: by the name of its sample."""
    found: dict[str, float] = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if any(word in sample.name for word in ("compile", "program", WARMING)):
                if not sample.name.endswith(("_created", "_bucket")):
                    found[sample.name] += sample.value
    return dict(found)


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


def kept(folder: Path) -> dict[str, Any]:
    """How much there is of what servers keep."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"files": len(sizes), "mb": round(sum(sizes) / 1e6, 1)}


def beside_warm_up(client: httpx.Client, start: Start) -> dict[str, Any]:
    """A stream while programs compile, and the same when nothing does."""
    compiling = num_warming(read_totals(client))
    beside = read_stream(client, Chunks(), num_tokens=STREAM_TOKENS).whole()
    still_compiling = num_warming(read_totals(client))
    start.wait_for_programs()
    alone = read_stream(client, Chunks(), num_tokens=STREAM_TOKENS).whole()
    share = beside["tokens_per_s"] / max(alone["tokens_per_s"], 1)
    return {
        "programs_to_compile": [compiling, still_compiling],
        "beside": beside,
        "alone": alone,
        "share_of_alone": round(share, 3),
    }


def beside_request(
    client: httpx.Client, pid: int, kind: str, count: int
) -> dict[str, Any]:
    """So many requests of a kind at once, and what a neighbour sees of them."""
    body = SAMPLED | KINDS[kind]
    used, compiled = cpu_s(pid), read_totals(client)
    with Neighbour(client) as neighbour, ThreadPoolExecutor(count) as threads:
        neighbour.wait_beyond(time.monotonic())
        began = time.monotonic()
        time.sleep(ALONE_S)
        start = time.monotonic()
        asked = [threads.submit(complete, client, **body) for _ in range(count)]
        errors = [str(error) for one in asked if (error := one.exception())]
        answered = time.monotonic()
        # What is compiled once the others have left holds the neighbour up as well.
        time.sleep(ALONE_S)
        left = time.monotonic()
        neighbour.wait_beyond(left)
        chunks = neighbour.chunks
    before, during = chunks.rate(began, start), chunks.rate(start, answered)
    after = read_totals(client)
    return {
        "kind": kind,
        "requests": count,
        "request_s": round(answered - start, 2),
        "gap_s": round(chunks.largest_gap(start, left), 3),
        "before_tokens_per_s": round(before),
        "during_tokens_per_s": round(during),
        "share_of_before": round(during / max(before, 1), 3),
        "cpu_s": round(cpu_s(pid) - used, 1),
        "programs": {
            name: round(value - compiled.get(name, 0.0), 2)
            for name, value in after.items()
            if value != compiled.get(name, 0.0)
        },
        "errors": errors,
    }


def new_kinds(client: httpx.Client, pid: int) -> dict[str, Any]:
    """A stream alone; then requests of new kinds beside one, the first and again."""
    alone = read_stream(client, Chunks(), num_tokens=STREAM_TOKENS).whole()
    rows = []
    wanted = [(kind, count) for count in CONCURRENCIES for kind in KINDS]
    for kind, count in tqdm(wanted, desc="kinds", unit="kind", leave=False):
        for time_ in ("first", "again"):
            row = beside_request(client, pid, kind, count)
            rows.append({"time": time_} | row)
    return {"alone": alone, "requests": rows}


def interrupted(checkout: Path, flags: list[str], after_s: float) -> dict[str, Any]:
    """A server with nothing compiled, interrupted so long after its start."""
    with _kept() as folder, _server(checkout, folder, flags) as (process, client, _):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        assert process.poll() is None, "the server has ended by itself"
        told: dict[str, float] = {}
        with contextlib.suppress(httpx.TransportError):
            told = totals(client.get("/metrics", timeout=1).text)
        found = end(process, signal.SIGINT)
        words = (folder / "log").read_text(errors="replace")
        # One that had to be killed has no status: it is late, which is another matter.
        has_crashed = (found["status"] or 0) < 0 or "Fatal Python error" in words
        found |= {"after_s": after_s, "still_to_compile": num_warming(told)}
        found["last_words"] = words.strip().splitlines()[-1:]
        in_time = found["ended_s"] <= END_GOAL_S
        return found | {"has_crashed": has_crashed, "in_time": in_time}


@contextlib.contextmanager
def _kept(folder: Path | None = None) -> Iterator[Path]:
    """A folder for what a server keeps: the given one, which stays, or a new one."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    made = Path(tempfile.mkdtemp())
    try:
        yield made
    finally:
        # Who was killed may have left something that still writes.
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _server(
    checkout: Path, folder: Path, flags: list[str]
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, float]]:
    arguments = ["--compilation-cache-dir", str(folder / "programs"), *flags]
    with launched(arguments, checkout=checkout, folder=folder) as served:
        yield served


def first_tokens(checkout: Path, times: int) -> dict[str, Any]:
    """Seconds of `LLM(...)` to its first token; medians."""
    runs = []
    for _ in tqdm(range(times), desc="LLM", unit="pair", leave=False):
        with _kept() as folder:
            own = environment(checkout, folder)
            runs.append(measure_startup(5, "auto", FIRST_TOKENS, environment=own))
    found: dict[str, Any] = {}
    for kind in ("cold", "warm"):
        samples = [round(run[kind]["first_token_s"], 2) for run in runs]
        found[kind] = {"median_s": statistics.median(samples), "samples_s": samples}
    return found


def measure(
    options: argparse.Namespace,
    flags: list[str],
    tell: Callable[[dict[str, Any]], Any],
) -> None:
    """Measure all sections that are wanted.

    Args:
        flags: Of the server, beside where it listens and keeps its programs.
        tell: Is given what there is after every section, in the order of `SECTIONS`.
    """
    wanted, checkout = options.only, options.checkout
    result: dict[str, Any] = {}
    bar = tqdm(total=len(wanted), unit="section")

    def done(section: str, found: Any) -> None:
        if section in wanted:
            result[section] = found
            bar.update()
            tqdm.write(f"{section}: {json.dumps(found)}", file=sys.stderr)
            tell({name: result[name] for name in SECTIONS if name in result})

    needs_server = {"cold", "beside", "warm", "kinds"} & set(wanted)
    with bar, _kept(options.cache) as folder:
        is_empty = not (folder / "programs").exists()
        assert is_empty or not {"cold", "beside"} & set(wanted), (
            "the cache has programs"
        )
        if needs_server and is_empty:
            with _server(checkout, folder, flags) as (process, client, started):
                start = Start(process, client, started)
                start.wait_for_answer()
                if "beside" in wanted:
                    done("beside", beside_warm_up(client, start))
                start.wait_for_programs()
                found = start.found | {"end": end(process, signal.SIGTERM)}
                done("cold", found | {"kept": kept(folder / "programs")})
        if {"warm", "kinds"} & set(wanted):
            with _server(checkout, folder, flags) as (process, client, started):
                start = Start(process, client, started)
                start.wait_for_answer()
                start.wait_for_programs()
                found = dict(start.found) | {"kept": kept(folder / "programs")}
                if "kinds" in wanted:
                    done("kinds", new_kinds(client, process.pid))
                done("warm", found | {"end": end(process, signal.SIGTERM)})
    if "llm" in wanted:
        done("llm", first_tokens(checkout, options.starts))
    if "interrupt" in wanted:
        moments = [INTERRUPT_S[n % len(INTERRUPT_S)] for n in range(options.interrupts)]
        done("interrupt", [interrupted(checkout, flags, one) for one in moments])


def table(result: dict[str, Any]) -> str:
    """What was found, in Markdown: a line for each number that a reader looks for."""
    lines = ["| what | found |", "|---|---|"]

    def add(what: str, found: Any) -> None:
        lines.append(f"| {what} | {found} |")

    for kind in ("cold", "warm"):
        for name, value in result.get(kind, {}).items():
            if name == "programs":
                value = ", ".join(f"{key} {count:g}" for key, count in value.items())
            elif name == "kept":
                value = f"{value['files']} files, {value['mb']} MB"
            elif name == "end":
                value = f"status {value['status']} after {value['ended_s']} s"
            add(f"{kind}: {name}", value)
    if beside := result.get("beside"):
        for when in ("beside", "alone"):
            one = beside[when]
            told = f"{one['tokens_per_s']} tokens/s, largest gap {one['gap_s']} s"
            add(f"stream {when} the warm-up" if when == "beside" else "alone", told)
        add("share of alone", beside["share_of_alone"])
    if kinds := result.get("kinds"):
        one = kinds["alone"]
        told = f"{one['tokens_per_s']} tokens/s, largest gap {one['gap_s']} s"
        add("stream alone", told)
        for row in kinds["requests"]:
            add(
                f"{row['time']}: {row['requests']} x {row['kind']}",
                f"{row['request_s']} s; neighbour: gap {row['gap_s']} s, "
                f"{row['share_of_before']:.0%} of {row['before_tokens_per_s']} "
                f"tokens/s; {row['cpu_s']} CPU-s"
                + (f"; {len(row['errors'])} failed" if row["errors"] else ""),
            )
    for kind, one in result.get("llm", {}).items():
        add(f"LLM: first token, {kind}", f"{one['median_s']} s {one['samples_s']}")
    for one in result.get("interrupt", ()):
        add(
            f"SIGINT after {one['after_s']:g} s",
            f"status {one['status']} after {one['ended_s']} s"
            + (", crashed" if one["has_crashed"] else "")
            + ("" if one["in_time"] else ", too late"),
        )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="How long nobody is answered.")
    parser.add_argument(
        "--checkout", type=lambda given: Path(given).resolve(), default=ROOT
    )
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--cache", type=Path, help="kept, for `--only warm kinds`")
    parser.add_argument("--starts", type=int, default=3, help="of LLM(...), each kind")
    parser.add_argument("--interrupts", type=int, default=3)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options, flags = make_parser().parse_known_args(arguments)
    # A shell starts what runs in the background with SIGINT ignored: so would be the
    # servers that are interrupted here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    result: dict[str, Any] = {}

    def tell(found: dict[str, Any]) -> None:
        # After every section: who stops this has what was found until then.
        took_s = round(time.monotonic() - start)
        result.clear()
        result.update(found | {"flags": flags, "took_s": took_s})
        if options.json is not None:
            command, checkout = "python -m benchmarks.standstill", options.checkout
            record(result, options.json, command=command, checkout=checkout)

    measure(options, flags, tell)
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
