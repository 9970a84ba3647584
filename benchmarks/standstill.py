"""How long nobody is answered: at a start, and while programs compile beside streams.

    python -m benchmarks.standstill --checkout FOLDER --json FILE

The server is `python -m jaxspec.serve` of any checkout, with the bundled pair and its
default flags (and those given), asked over HTTP only: so two states of the code can be
compared.
What is built when it is installed is built before. Sections, of which `--only` chooses:

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
import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tqdm.auto import tqdm

from benchmarks.client import Chunks, Neighbour, complete, read_stream
from benchmarks.first_token import measure_startup
from benchmarks.server import (
    FIRST_TOKENS,
    ROOT,
    Start,
    cpu_s,
    end,
    environment,
    install,
    launched,
    num_warming,
    read_totals,
    totals,
)
from jaxspec.bench.report import record

SECTIONS = ("cold", "beside", "warm", "kinds", "llm", "interrupt")
STREAM_TOKENS = 400
# What an interrupted server may take, and when after its start it is interrupted.
END_GOAL_S = 15.0
INTERRUPT_S = (10.0, 20.0, 35.0)
# A stream runs by itself so long before and after what happens beside it.
ALONE_S = 1.0

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

    install(options.checkout)
    measure(options, flags, tell)
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
