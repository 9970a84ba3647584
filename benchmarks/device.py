"""Check and measure one TPU or GPU, in at most 20 minutes.

    python -m benchmarks.device

Compares the kernels with their references and texts bit by bit, and measures plain
decoding, rounds with forced acceptance, sampling, prompts, launches of several rounds
and the seconds to compile. Writes a JSON file and a Markdown page, which lists times
by the cost model and measured times. Every part runs in a process of its own.
Rows are written when they are measured; a run that was stopped continues with the parts
that are not done. `--dry-run` runs everything with shapes a hundred times smaller, on
any device; its numbers mean nothing. Needs jax and flax, and torch and transformers for
the parts `hf-*`, which are not run by default.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import device_checks, device_steps
from benchmarks.device_steps import (
    ACCEPTANCES,
    BATCHES,
    NUM_DRAFTS,
    Row,
    SkippedError,
)
from benchmarks.kernels import bench
from jaxspec.bench.report import commit, machine, markdown, now, versions, write_whole
from jaxspec.engine.model_folders import BUNDLED_TARGET
from jaxspec_kernels import dispatch

HERE = Path(__file__).parent
DEVICE = "device"  # the first part, which names the device
Part = Callable[[argparse.Namespace], Iterator[Row]]


def measure_kernels(options: argparse.Namespace) -> Iterator[Row]:
    """Compare kernels with their references; time those that have a goal.

    Full-size cases are left out of a dry run.
    """
    words = ["--parity", "--rivals", "none"]
    device = jax.default_backend()
    implementation = dispatch.implementation_for(device)
    small = bench.make_parser().parse_args([*words, "--quick", "--calls", "2"])
    plans = [(small, bench.plan(small, device))]
    if options.dry_run:
        plans = [(small, [one for one in plans[0][1] if "verify" in one.name][:1])]
    else:
        large = bench.make_parser().parse_args(words)
        goals = [one for one in bench.plan(large, device) if one.is_goal]
        plans.append((large, goals))
    copy = device_steps.measure_copy(options)
    for given, cases in plans:
        for case in cases:
            for row in bench.measure_case(case, given, implementation, copy):
                yield {"what": "kernel"} | row


# Parts in the order in which they run: the most important first, because time may run
# out.
PARTS: dict[str, Part] = {
    DEVICE: device_steps.measure_device,
    "kernels": measure_kernels,
    "batch_invariant": device_checks.batch_invariant,
    "4b-270m": partial(device_steps.measure_pair, "4b-270m"),
    "9b-2b": partial(device_steps.measure_pair, "9b-2b"),
    "lossless": device_checks.lossless,
    "real": device_checks.real_model,
    "prompts": device_steps.measure_prompts,
    "sampling": device_steps.measure_sampling,
    "launches": device_steps.measure_launches,
    "layers": device_steps.measure_layers,
    "27b-2b": partial(device_steps.measure_pair, "27b-2b"),
    **{
        f"hf-{size}": partial(device_steps.measure_huggingface, f"hf-{size}")
        for size in ("9b", "27b", "2b")
    },
}
DEFAULT_PARTS = tuple(name for name in PARTS if not name.startswith("hf-"))
# Share of a GPU's memory that jax reserves at the start. By default jax reserves three
# quarters, which on an H100 is too little for 27B with 2B and the pages of eight
# sequences.
MEMORY_FRACTION = 0.9
# Goals: minimum share of the copy bandwidth; minimum share of the speed-up's upper
# bound; maximum time of a verification pass / a plain step; minimum speed-up of 27B
# with a 2B draft at acceptance 0.8.
GOALS = {
    "plain_share_of_bandwidth": 0.75,
    "share_of_ceiling": 0.85,
    "verify_over_plain": 1.10,
    "speed_up_27b_2b_at_0.8": 2.2,
}
# A measurement that differs from the cost model by more than this factor is marked.
OFF_BY = 1.5
# Arguments that must be the same for a run to be continued.
KEPT = ("num_drafts", "acceptances", "batches", "context", "scan_layers", "dry_run")
KEPT += ("dtypes", "methods", "model", "num_prompts", "num_tokens")
DONE, EARLY = "done", "ended early"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=1200,
        help="start no part after this many seconds",
    )
    add("--parts", nargs="+", choices=PARTS, default=DEFAULT_PARTS)
    add("--again", action="store_true", help="repeat the parts that are done")
    add("--num-drafts", type=int, nargs="+", default=NUM_DRAFTS)
    add("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    add("--batches", type=int, nargs="+", default=BATCHES)
    add("--context", type=int, help="tokens before the first step (default: 1024)")
    add("--scan-layers", action="store_true", help="programs with one loop over layers")
    add("--model", default=BUNDLED_TARGET, help="of batch_invariant and lossless")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add(
        "--methods",
        nargs="+",
        choices=device_checks.METHODS,
        help="of lossless (default: all that the model has)",
    )
    add("--num-prompts", type=int, default=16)
    add("--num-tokens", type=int, default=96)
    add("--dry-run", action="store_true", help="use tiny shapes, to test the script")
    add("--output", type=Path, help="default: results/device-<device>.json")
    add("--part", choices=PARTS, help=argparse.SUPPRESS)  # what a child does
    return parser


def run_part(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure one part; yield each row when it is measured."""
    try:
        yield from PARTS[name](options)
    except SkippedError as error:
        yield {"what": "skipped", "why": str(error)}


def run_child(name: str, seconds: float, arguments: list[str]) -> Iterator[Row]:
    """Run one part in a child process, which is killed when its time is up.

    The child's own children are killed too, also if the caller stops reading. After a
    failure, the last row says how the child ended.
    """
    command = [sys.executable, "-m", "benchmarks.device", "--part", name, *arguments]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_FRACTION)} | os.environ
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parent,
        env=environment,
        start_new_session=True,  # a group of its own, which can be killed whole
    )
    timer = threading.Timer(seconds, _kill, [process])
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                # A process that is killed may leave half a line.
                if line.startswith("{") and line.endswith("}\n"):
                    yield json.loads(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill(process)
    if code:
        took_s = round(time.monotonic() - start, 1)
        yield {"what": EARLY, "code": code, "after_s": took_s}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a child and its process group, unless it has ended and was waited for."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows_of(name: str, end: float, arguments: list[str]) -> Generator[Row]:
    """Yield the rows of one part until a time of the monotonic clock."""
    left = end - time.monotonic()
    if left <= 0:
        yield {"what": EARLY, "why": "the time limit was reached"}
        return
    yield from run_child(name, left, arguments)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the child is ended too.

    Raises:
        KeyboardInterrupt: One of the signals arrived.
    """
    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Result:
    """The rows of a run, in a file that is rewritten after every row.

    Attributes:
        content: What the file has.
    """

    def __init__(self, options: argparse.Namespace, arguments: list[str]):
        self._options = options
        self._path: Path | None = None  # until it is known what the file has
        self.content: Row = {
            "command": shlex.join(["python", "-m", "benchmarks.device", *arguments]),
            "date": now(),
            "is_dry_run": options.dry_run,
            "goals": GOALS,
            "machine": machine(),
            "versions": versions(),
            **commit(),
            "settings": json.loads(
                json.dumps({name: getattr(options, name) for name in KEPT})
            ),
            "parts": {},
            "rows": [],
        }

    @property
    def is_placed(self) -> bool:
        """Whether the device is known, whose name the file has."""
        return any("device" in row for row in self.content["rows"])

    def place(self) -> None:
        """Choose the file, and continue with the results that it has.

        Raises:
            SystemExit: The file is of another device, or has other settings.
        """
        device = next(row["device"] for row in self.content["rows"] if "device" in row)
        self._path = self._options.output
        if self._path is None:
            form = "-scanned" if self._options.scan_layers else ""
            form += "-dry-run" if self._options.dry_run else ""
            name = device.lower().replace(" ", "-")
            self._path = HERE / "results" / f"device-{name}{form}.json"
        if self._options.again or not self._path.exists():
            return
        before = json.loads(self._path.read_text(encoding="utf-8"))
        for name, now_, then in (
            ("settings", self.content["settings"], before["settings"]),
            ("device", device, _device_of(before)),
        ):
            if now_ != then:
                raise SystemExit(
                    f"{self._path} has results with other {name}: {then}, not {now_}. "
                    "Give --again to replace them, or another --output."
                )
        kept = {
            name: about
            for name, about in before["parts"].items()
            if about["state"] == DONE and name != DEVICE
        }
        self.content["parts"] |= kept
        self.content["rows"] += [row for row in before["rows"] if row["part"] in kept]

    def has(self, part: str) -> bool:
        """Return whether a part is done."""
        return part in self.content["parts"]

    def add(self, row: Row) -> None:
        """Add a row, and write the file as soon as its name is known."""
        self.content["rows"].append(row)
        self.write()

    def end(self, part: str, took_s: float) -> None:
        """Record how a part ended."""
        rows = [row for row in self.content["rows"] if row["part"] == part]
        is_early = any(row["what"] == EARLY for row in rows)
        about = {"state": EARLY if is_early else DONE, "took_s": round(took_s, 1)}
        self.content["parts"][part] = about | commit() | {"date": now()}
        self.write()

    def write(self) -> None:
        """Write the JSON file and the page, so that they are kept if a part stops."""
        if self._path is not None:
            write_whole(json.dumps(self.content, indent=2) + "\n", self._path)
            write_whole(page(self.content), self._path.with_suffix(".md"))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = make_parser().parse_args(arguments)
    if options.dry_run:
        options.num_prompts, options.num_tokens = 2, 8
        options.dtypes, options.methods = ["float32"], ["target as draft"]
    if options.part is not None:
        logging.basicConfig(format="%(relativeCreated)d ms %(message)s")
        logging.getLogger("jaxspec").setLevel(logging.INFO)  # seconds of every program
        for row in run_part(options.part, options):
            print(json.dumps(row), flush=True)
        return
    end = time.monotonic() + options.seconds
    result = Result(options, arguments)
    with stopped_by_signals():
        _measure(DEVICE, end, arguments, result)
        if not result.is_placed:
            raise SystemExit("jax found no device: see the messages above")
        result.place()
        for name in options.parts:
            if not result.has(name):
                _measure(name, end, arguments, result)
        result.write()


def _measure(name: str, end: float, arguments: list[str], result: Result) -> None:
    start = time.monotonic()
    with contextlib.closing(rows_of(name, end, arguments)) as rows:
        for row in rows:
            row = {"part": name} | row
            print(json.dumps(row), flush=True)
            result.add(row)
    result.end(name, time.monotonic() - start)


# The page.


def _device_of(result: Row) -> str | None:
    found = (row["device"] for row in result["rows"] if "device" in row)
    return next(found, None)


def _us(value: Any) -> str:
    return f"{value['median'] if isinstance(value, dict) else value:,.0f}"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


# Tables by `what` of a row: a title, and columns by name of an entry.
TABLES: dict[str, tuple[str, str]] = {
    "copy": ("Device", "device num_devices memory_bytes gb_per_s"),
    "kernel": (
        "Kernels and their references",
        "operation case is_within_tolerance error share_of_copy failed skipped",
    ),
    "bits": (
        "Bits of logprobs: alone, and with drafts",
        "dtype batch_invariant compared num_texts num_equal num_equal_bits "
        "largest_difference",
    ),
    "lossless": (
        "Texts of plain decoding and of drafts",
        "method dtype sampling num_texts num_equal acceptance_rate",
    ),
    "speed": (
        "Tokens/s of whole engines",
        "model method dtype one_tokens_per_s all_tokens_per_s share_of_bandwidth",
    ),
    "plain": ("Plain decoding", "model batch step_us tokens_per_s share_of_bandwidth"),
    "verify": (
        "The target's pass over drafts",
        "model batch num_drafts plain_us verify_us verify_over_plain",
    ),
    "round": (
        "Rounds",
        "pair batch num_drafts forced_acceptance round_us tokens_per_round "
        "speed_up expected_speed_up share_of_ceiling",
    ),
    "tree": (
        "Rounds with trees of drafts",
        "pair tree num_nodes num_levels round_us round_over_plain",
    ),
    "prompt": ("Prompts", "model prompt_tokens step_us tokens_per_s"),
    "sampling": ("Sampling", "model batch requests step_us over_greedy"),
    "launch": (
        "Rounds per launch",
        "pair num_drafts num_rounds launch_us round_us tokens_per_s",
    ),
    "layers": (
        "Unrolled and scanned layers",
        "pair is_scanned num_drafts step_us compile_s",
    ),
    "huggingface": ("HuggingFace", "model batch is_compiled step_us tokens_per_s"),
    "compile": (
        "Seconds to compile, several at once",
        "part program layers is_scanned lower_s compile_s num_parallel wall_s",
    ),
    "skipped": ("Not measured", "part pair why"),
}
_UNITS = ("_us",)


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    is_time = name.endswith(_UNITS) and value is not None
    return _us(value) if is_time else _number(value)


def _table(rows: Iterable[Row], names: Sequence[str]) -> str:
    rows = list(rows)
    used = [name for name in names if any(row.get(name) is not None for row in rows)]
    head = [name.replace("_", " ") for name in used]
    return markdown([head, *([_cell(row, name) for name in used] for row in rows)])


def compared(result: Row) -> list[Row]:
    """Return times by the cost model and measured times, in microseconds.

    The largest factor between both is first.
    """
    names = {"plain": "step_us", "verify": "verify_us", "round": "round_us"}
    names |= {"prompt": "step_us"}
    found = []
    for row in result["rows"]:
        if "expected_us" not in row:
            continue
        about = ("model", "pair", "batch", "num_drafts", "prompt_tokens")
        words = [f"{name}={row[name]}" for name in about if name in row]
        measured = row[names[row["what"]]]["median"]
        one = {
            "step": " ".join([row["what"], *words]),
            "speeds": row["speeds"],
            "expected_us": row["expected_us"],
            "measured_us": measured,
            "off_by": measured / row["expected_us"],
        }
        # Times do not depend on the forced acceptance.
        if all(one["step"] != other["step"] for other in found):
            found.append(one)
    return sorted(found, key=lambda one: -abs(math.log(one["off_by"])))


def goal_rows(result: Row) -> list[Row]:
    """Return every goal with the best and the worst measurement."""
    rows, goals = result["rows"], result["goals"]

    def of(what: str, name: str, **wanted: Any) -> list[float]:
        return [
            row[name]
            for row in rows
            if row["what"] == what
            and name in row
            and all(row.get(key) == value for key, value in wanted.items())
        ]

    best = of("round", "speed_up", pair="27b-2b", forced_acceptance=0.8)
    measured = {
        "plain_share_of_bandwidth": of("plain", "share_of_bandwidth"),
        "share_of_ceiling": of("round", "share_of_ceiling"),
        "verify_over_plain": of("verify", "verify_over_plain"),
        "speed_up_27b_2b_at_0.8": best and [max(best)],
    }
    lines = []
    for name, goal in goals.items():
        values = measured[name]
        is_most = name == "verify_over_plain"
        worst = (max if is_most else min)(values, default=None)
        is_met = None
        if worst is not None:
            is_met = worst <= goal if is_most else worst >= goal
        lines.append({"goal": name, "limit": goal, "worst": worst, "is_met": is_met})
    return lines


def page(result: Row) -> str:
    """Return the result as a Markdown page."""
    rows = result["rows"]
    packages = ", ".join(f"{name} {one}" for name, one in result["versions"].items())
    lines = [
        f"# {_device_of(result) or 'Unknown device'}",
        f"Measured {result['date'][:10]} at commit {result['commit']} by "
        f"`{result['command']}`; {packages}.",
    ]
    if result["is_dry_run"]:
        lines.append("A dry run with tiny shapes: its numbers mean nothing.")
    parts = [{"part": name} | about for name, about in result["parts"].items()]
    lines += ["## Parts", _table(parts, ("part", "state", "took_s", "commit"))]
    found = compared(result)
    if found:
        num_off = sum(max(one["off_by"], 1 / one["off_by"]) > OFF_BY for one in found)
        lines += [
            "## Expected and measured",
            f"Microseconds by the cost model and by the clock; {num_off} of "
            f"{len(found)} differ by more than a factor of {OFF_BY:g}. `speeds` says "
            "whether the device's speeds are published, or the bandwidth of a copy.",
            _table(found, ("step", "speeds", "expected_us", "measured_us", "off_by")),
        ]
    lines += [
        "## Goals",
        _table(goal_rows(result), ("goal", "limit", "worst", "is_met")),
    ]
    for what, (title, names) in TABLES.items():
        there = [row for row in rows if row["what"] == what]
        if there:
            lines += [f"## {title}", _table(there, names.split())]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
