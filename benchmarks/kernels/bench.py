"""`python -m benchmarks.kernels.bench`: times the kernels on jax's device.

Each case is compared with a memory copy measured in the same run, and with other
libraries' implementations. Results are written after each case, so a run may be
stopped.
"""

import argparse
import fnmatch
import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tqdm.auto import tqdm

from benchmarks.kernels import work as bench_work
from benchmarks.kernels.clock import copy_bandwidth, measure
from benchmarks.kernels.work import CONTROLS, READ_ONCE, REFUSALS, Work, rivals_of
from jaxspec.bench.report import commit, now, versions, write_whole
from jaxspec_kernels import dispatch
from jaxspec_kernels.paged_attention import cases as attention_cases
from jaxspec_kernels.rejection_sampling import cases as sampling_cases
from jaxspec_kernels.write_kv_pages import cases as writing_cases

# 6 rows of 256,000 logits are those of a round of one sequence with five drafts.
GOAL_SAMPLING = "goal/6x256000"
MODELS = ("2b", "9b", "27b")

Row = dict[str, Any]
OPERATIONS = ("paged_attention", "rejection_sampling", "write_kv_pages")
_GOAL = sampling_cases.Case(seqs=1, drafts=5, vocab_size=256_000, columns=256_000)


class Planned(NamedTuple):
    """A case without its arrays; cases of equal `shape` are measured once."""

    operation: str
    name: str
    shape: Any
    key: str | None  # in a tuned table
    make: Callable[..., Work]  # is_ragged=True: lengths that test every branch

    @property
    def is_goal(self) -> bool:
        """Whether there is a goal for this case."""
        return (self.operation, self.name) in _GOALS


_GOALS = {
    ("paged_attention", f"{model}/tp1/{call}")
    for model in MODELS
    for call in ("verify", "decode")
} | {("rejection_sampling", f"{GOAL_SAMPLING}/{controls}") for controls in CONTROLS}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.bench", description=__doc__
    )
    add = parser.add_argument
    add("--operation", choices=OPERATIONS, action="append", help="may be repeated")
    add("--case", default="*", metavar="GLOB", help="names of cases, as '9b/tp1/*'")
    add(
        "--implementation",
        choices=dispatch.IMPLEMENTATIONS,
        help="default: that of the device",
    )
    add("--calls", type=int, default=32, help="calls in one timed loop")
    add("--repeats", type=int, default=10, help="timings of every loop")
    add(
        "--rivals",
        choices=("some", "all", "none"),
        default="some",
        help="time alternatives: for the goals and all cases of tensor parallelism 1, "
        "for every case, or never",
    )
    add("--parity", action="store_true", help="also compare with the reference")
    add("--budget-s", type=float, default=500, help="start no case after this time")
    add("--output", type=Path, metavar="FILE.json", help="written case by case")
    add("--quick", action="store_true", help="the small cases, a few calls")
    add("--slow-cpu", action="store_true", help="allow the real cases on a CPU")
    return parser


def plan(options: argparse.Namespace, device: str) -> list[Planned]:
    """Return the requested cases; those with a goal come first."""
    chosen = options.operation or OPERATIONS
    planned = [
        found
        for found in _all_cases(options.quick, device)
        if found.operation in chosen and fnmatch.fnmatch(found.name, options.case)
    ]
    if not planned:
        raise SystemExit(
            f"--case {options.case!r} matches no case of {', '.join(chosen)}; names "
            "are like '9b/tp1/verify', with --quick like 'tiny/verify'"
        )
    return sorted(planned, key=lambda found: not found.is_goal)


def _all_cases(is_quick: bool, device: str) -> Iterator[Planned]:
    # On CPUs, cases use float32, because XLA:CPU does not compute in bfloat16.
    dtype = "float32" if device == "cpu" else "bfloat16"
    pool_bytes = 0 if is_quick else bench_work.POOL_BYTES
    attends = attention_cases.CASES if is_quick else attention_cases.REAL_CASES
    for name, case in attends.items():
        make = functools.partial(
            bench_work.attention, case, dtype, pool_bytes=pool_bytes
        )
        key = bench_work.attention_key(case, dtype)
        yield Planned("paged_attention", name, case, key, make)
    samples = {f"{GOAL_SAMPLING}": _GOAL} | sampling_cases.CASES
    for name, case in samples.items():
        if name.startswith("tiny/") != is_quick:
            continue
        for controls in CONTROLS:
            # Sharded cases are measured with one kind of sampling only, because filters
            # take the same time per column on a part of the vocabulary as on all of it.
            if case.shards > 1 and controls != "sampled":
                continue
            make = functools.partial(
                _sampling, case, controls, 0 if is_quick else bench_work.LOGIT_BYTES
            )
            key, shape = bench_work.sampling_key(case, "float32"), (case, controls)
            full_name = f"{name}/{controls}"
            yield Planned("rejection_sampling", full_name, shape, key, make)
    writes = writing_cases.CASES if is_quick else writing_cases.REAL_CASES
    for name, case in writes.items():
        make = functools.partial(_writing, case, dtype)
        yield Planned("write_kv_pages", name, case, None, make)


def _sampling(
    case: Any, controls: str, logit_bytes: int, *, is_ragged: bool = False
) -> Work:
    logit_bytes = 0 if is_ragged else logit_bytes
    return bench_work.sampling(case, controls, "float32", logit_bytes=logit_bytes)


def _writing(case: Any, dtype: str, *, is_ragged: bool = False) -> Work:
    return bench_work.writing(case, dtype)


def measure_case(
    planned: Planned, options: argparse.Namespace, implementation: str, copy: float
) -> list[Row]:
    """Time one case: this package's kernel first, then other libraries'."""
    work = planned.make()
    head = {"operation": planned.operation, "case": planned.name, "key": planned.key}
    row = head | {"implementation": implementation, "num_bytes": work.num_bytes}
    try:
        if options.parity and implementation != "reference":
            row |= compare(planned, implementation)
        row |= _time_ours(work, options, implementation, copy)
    except NotImplementedError as error:
        row["skipped"] = _reason(error)
    except REFUSALS as error:
        row["failed"] = _reason(error)
    rows = [row]
    for name, rival in rivals_of(work).items() if _has_rivals(planned, options) else ():
        row = head | {"implementation": name}
        try:
            spread = rival(work, calls=options.calls, repeats=options.repeats)
            row["back_to_back_us"] = spread.in_microseconds()
        except REFUSALS as error:
            row["skipped"] = _reason(error)
        rows.append(row)
    return rows


def _has_rivals(planned: Planned, options: argparse.Namespace) -> bool:
    if options.rivals != "some":
        return options.rivals == "all"
    some = ("tiny/verify",) if options.quick else ("2b/tp1", "9b/tp1", "27b/tp1")
    return planned.is_goal or planned.name.startswith(some)


def _time_ours(
    work: Work, options: argparse.Namespace, implementation: str, copy: float
) -> Row:
    step = work.step(functools.partial(work.run, implementation=implementation))
    repeats = options.repeats
    spread = measure(step, work.carry, work.turns, calls=options.calls, repeats=repeats)
    alone = measure(step, work.carry, work.turns[:1], calls=1, repeats=repeats)
    gb_per_s = work.num_bytes / spread.median_s / 1e9
    return {
        "back_to_back_us": spread.in_microseconds(),
        "alone_us": alone.in_microseconds(),
        "gb_per_s": round(gb_per_s, 2),
        "share_of_copy": round(gb_per_s / copy, 4),
    }


def compare(planned: Planned, implementation: str) -> Row:
    """Compare a kernel's results with the reference's, for sequences of all lengths."""
    work = planned.make(is_ragged=True)
    ours = work.result(functools.partial(work.run, implementation=implementation))
    truth = work.result(functools.partial(work.run, implementation="reference"))
    error = work.error(ours, truth)
    return {"error": error, "is_within_tolerance": error <= work.tolerance}


def _reason(error: BaseException) -> str:
    """Return an error's class and first line only: compilers' messages are long."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def header(options: argparse.Namespace, arguments: Sequence[str]) -> Row:
    """Return the header of a result: machine, versions, options; no local paths."""
    device = jax.devices()[0]
    given = vars(options) | {"output": None}
    return {
        "benchmark": "kernels",
        "date": now(),
        "commit": code(),
        "command": command("bench", arguments),
        "arguments": {name: value for name, value in given.items() if name != "output"},
        "platform": device.platform,
        "device": device.device_kind,
        "versions": versions(),
    }


def code() -> str | None:
    """Return the checkout's commit, with a + if files differ from it."""
    found = commit()
    if found["commit"] is None:
        return None
    return found["commit"] + ("+" if found["has_changes"] else "")


def command(module: str, arguments: Sequence[str]) -> str:
    """Return the command line that repeats a run, without its output file."""
    kept = list(arguments)
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    kept = [word for word in kept if not word.startswith("--output=")]
    return shlex.join(["python", "-m", f"benchmarks.kernels.{module}", *kept])


def save(path: Path | None, result: Row) -> None:
    """Write a result atomically, because a run may be stopped at any time."""
    if path is not None:
        write_whole(json.dumps(result) + "\n", path)


def main(arguments: Sequence[str] | None = None) -> Row:
    """Run the benchmark; return the result that is written."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = make_parser().parse_args(arguments)
    if options.calls < 1 or options.repeats < 1:
        raise SystemExit("--calls and --repeats must be at least 1")
    if options.quick:
        options.calls, options.repeats = min(options.calls, 2), min(options.repeats, 2)
    device = jax.default_backend()
    if device == "cpu" and not (options.quick or options.slow_cpu):
        raise SystemExit(
            "jax has only a CPU here, and the real cases take hours on one. "
            "--quick runs the small cases; --slow-cpu runs the real ones"
        )
    implementation = options.implementation or dispatch.implementation_for(device)
    planned = plan(options, device)
    size = 2**22 if options.quick else 2**30
    copy = copy_bandwidth(size, calls=options.calls, repeats=options.repeats)
    result = header(options, arguments)
    result |= {"copy_gb_per_s": round(copy, 2), "rows": [], "goals": []}
    start, seen = time.monotonic(), {}
    for case in tqdm(planned, unit="case", disable=None):
        shape = (case.operation, case.shape)
        row = {"operation": case.operation, "case": case.name}
        row["implementation"] = implementation
        if shape in seen:
            rows = [row | {"same_as": seen[shape]}]
        elif time.monotonic() - start > options.budget_s:
            rows = [row | {"skipped": f"not started within {options.budget_s:g} s"}]
        else:
            seen[shape] = case.name
            rows = measure_case(case, options, implementation, copy)
        result["rows"] += rows
        result["goals"] = goals(result["rows"], implementation)
        save(options.output, result)
    _print(result)
    return result


def failures(result: Row) -> list[str]:
    """Return this package's cases that raised, or that differ from the reference."""
    return [
        f"{row['operation']} {row['case']}"
        for row in result["rows"]
        if "failed" in row or not row.get("is_within_tolerance", True)
    ]


def _print(result: Row) -> None:
    device, copy = result["device"], result["copy_gb_per_s"]
    print(f"{device}, jax {result['versions']['jax']}: copy at {copy} GB/s")
    for operation in OPERATIONS:
        rows = [row for row in result["rows"] if row["operation"] == operation]
        if rows:
            print(f"\n{operation}\n{table(rows)}")
    print("\nGoals")
    print("\n".join(goal_lines(result["goals"])))
    print(json.dumps(result))


def goals(rows: Iterable[Row], implementation: str) -> list[Row]:
    """Compare measurements with goals; `is_met` is None without a measurement.

    Args:
        implementation: Name of the measured implementation of this package.
    """
    times = {
        (row["operation"], row["case"], row["implementation"]): row["back_to_back_us"]
        for row in rows
        if "back_to_back_us" in row
    }
    shares = {
        (row["case"], row["implementation"]): row["share_of_copy"]
        for row in rows
        if row["operation"] == "paged_attention" and "share_of_copy" in row
    }

    def median(operation: str, case: str, name: str = implementation) -> float | None:
        found = times.get((operation, case, name))
        return None if found is None else found["median"]

    found = []
    for model in MODELS:
        verify, decode = f"{model}/tp1/verify", f"{model}/tp1/decode"
        share = shares.get((verify, implementation))
        text = f"{verify}, 8 sequences of 8192: share of the bandwidth of a copy"
        found.append(_goal(text, share, 0.70, is_least=True))
        ratio = _ratio(
            median("paged_attention", verify), median("paged_attention", decode)
        )
        text = f"{model}/tp1: time of 6 queries / time of 1 query"
        found.append(_goal(text, ratio, 1.15, is_least=False))
    for controls in ("greedy", "sampled", "top-p"):
        case = f"{GOAL_SAMPLING}/{controls}"
        ratio = _ratio(
            median("rejection_sampling", case),
            median("rejection_sampling", case, READ_ONCE),
        )
        text = (
            f"rejection sampling, 6 rows of 256,000, {controls}: time / time of "
            "reading the logits once"
        )
        found.append(_goal(text, ratio, 2.0, is_least=False))
    return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _goal(text: str, figure: float | None, limit: float, *, is_least: bool) -> Row:
    is_met = None
    if figure is not None:
        is_met = figure >= limit if is_least else figure <= limit
    return {
        "goal": f"{text} {'>=' if is_least else '<='} {limit}",
        "figure": None if figure is None else round(figure, 3),
        "is_met": is_met,
    }


def goal_lines(found: Iterable[Row]) -> list[str]:
    """Return one line for every goal, also for goals that were not measured."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    return [
        f"{words[goal['is_met']]:>12}  {goal['goal']}"
        + ("" if goal["figure"] is None else f": {goal['figure']}")
        for goal in found
    ]


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row["case"],
    "implementation": lambda row: row["implementation"],
    "in a loop, us": lambda row: _spread(row.get("back_to_back_us")),
    "alone, us": lambda row: _spread(row.get("alone_us")),
    "GB/s": lambda row: _number(row.get("gb_per_s"), "{:.1f}"),
    "of copy": lambda row: _number(row.get("share_of_copy"), "{:.0%}"),
    "error": lambda row: _number(row.get("error"), "{:.2g}"),
    "": lambda row: _remark(row),
}


def table(rows: Iterable[Row]) -> str:
    """Format the results as a table for a terminal."""
    lines = [list(_COLUMNS)]
    for row in rows:
        lines.append([cell(row) for cell in _COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.ljust, line, widths) for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _remark(row: Row) -> str:
    if "same_as" in row:
        return f"the shapes of {row['same_as']}"
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if not row.get("is_within_tolerance", True):
        return "WRONG: not within rounding of the reference"
    return row.get("skipped", "")


def _spread(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.1f} ({found['least']:.1f}-{found['most']:.1f})"


def _number(found: float | None, form: str) -> str:
    return "" if found is None else form.format(found)


if __name__ == "__main__":
    sys.exit(1 if failures(main()) else 0)
