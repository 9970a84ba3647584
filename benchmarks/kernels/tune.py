"""`python -m benchmarks.kernels.tune`: measures tile sizes on jax's device.

Writes the device's table, which `tuning` reads, entry by entry. A stopped run is
continued if the commit and the version of jax are the same; otherwise the table is
started again. Of cases that share a key, only the first is tuned. Each candidate must
agree with the reference before it is timed.
"""

import argparse
import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.kernels import bench
from benchmarks.kernels.clock import measure
from benchmarks.kernels.work import REFUSALS, Work
from jaxspec.bench.report import now
from jaxspec_kernels import dispatch, tuning
from jaxspec_kernels.paged_attention.gpu_tiles import (
    Tiles,
    choose_tiles,
    gpu_of,
    product_dtype,
)
from jaxspec_kernels.tuning import Sizes

Axes = Mapping[str, Sequence[int]]
Timer = Callable[[Sizes, Callable[..., Any], Work], float]

# Candidate values of each tile size; one size is tuned after the other.
AXES: dict[tuple[str, str], Axes] = {
    ("paged_attention", "reference"): {"block_tokens": (64, 128, 256)},
    ("paged_attention", "tpu"): {"block_tokens": (128, 256, 512, 1024, 2048)},
    ("paged_attention", "gpu"): {
        "keys": (16, 32, 64, 128),
        "num_stages": (2, 3, 4, 5, 6),
        "num_warps": (2, 4, 8),
        "splits": (1, 2, 4, 8, 16, 32, 64),
    },
    ("rejection_sampling", "reference"): {"tile": (1024, 2048, 4096, 8192)},
    ("rejection_sampling", "tpu"): {"tile": (4096, 8192, 16384, 32768)},
    ("rejection_sampling", "gpu"): {"tile": (1024, 2048, 4096, 8192, 16384)},
}


class TuneError(Exception):
    """A kernel fails with its default sizes, so it cannot be tuned."""


def heuristic(work: Work, implementation: str) -> Sizes:
    """Return the default sizes of attention on GPUs; {} for other operations."""
    if (work.operation, implementation) != ("paged_attention", "gpu"):
        return {}
    pages, table, _ = work.turns[0]
    tiles = choose_tiles(
        work.carry.shape,
        pages.shape,
        table=table.shape[1],
        itemsize=product_dtype(work.carry.dtype, pages.dtype).itemsize,
        window=work.case.window,
        gpu=gpu_of(jax.devices()[0].device_kind),
    )
    return dataclasses.asdict(tiles)


def sized(work: Work, implementation: str, sizes: Sizes) -> Callable[..., Any]:
    """Return the implementation with these sizes; {} means its default sizes."""
    path = f"jaxspec_kernels.{work.operation}.{implementation}"
    run = getattr(importlib.import_module(path), work.operation)
    if sizes and (work.operation, implementation) == ("paged_attention", "gpu"):
        return functools.partial(run, tiles=Tiles(**sizes))
    return functools.partial(run, **sizes)


def search(
    start: Sizes, axes: Axes, seconds: Callable[[Sizes], float | None]
) -> tuple[Sizes, float] | None:
    """Return the fastest sizes found, changing one after the other from `start`.

    Args:
        seconds: Returns the time of a candidate; None if it does not compile or its
            result is wrong.

    Returns:
        None if no candidate could be timed.
    """
    best, least = start, seconds(start) if start else None
    for name, values in axes.items():
        at_start = best
        for value in values:
            candidate = at_start | {name: value}
            if candidate == at_start:
                continue
            found = seconds(candidate)
            if found is not None and (least is None or found < least):
                best, least = candidate, found
    return None if least is None else (best, least)


def tune_case(
    planned: bench.Planned, implementation: str, timer: Timer
) -> tuple[Sizes, dict[str, float]] | None:
    """Return the best sizes of a case, and microseconds before and with them.

    Raises:
        TuneError: The kernel fails with its own sizes.
    """
    work, ragged = planned.make(), planned.make(is_ragged=True)
    truth = ragged.result(sized(ragged, "reference", {}))

    def seconds(sizes: Sizes) -> float | None:
        run = sized(work, implementation, sizes)
        try:
            result = ragged.result(sized(ragged, implementation, sizes))
            if ragged.error(result, truth) > ragged.tolerance:
                print(
                    f"{planned.name}: results with {sizes} are wrong", file=sys.stderr
                )
                return None
            return timer(sizes, work.step(run), work)
        except REFUSALS:
            return None

    own = seconds({})
    if own is None:
        raise TuneError(
            f"{planned.operation} {planned.name}: the {implementation} "
            "implementation gives wrong results with its default sizes; see "
            "`benchmarks.kernels.bench --parity`"
        )
    found = search(
        heuristic(work, implementation),
        AXES[planned.operation, implementation],
        seconds,
    )
    if found is None:
        return None
    best, least = found
    return best, {
        "heuristic": round(own * 1e6, 3),
        "tuned": round(least * 1e6, 3),
    }


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.tune", description=__doc__
    )
    add = parser.add_argument
    add("--operation", choices=tuning.OPERATIONS, action="append")
    add("--case", default="*", metavar="GLOB", help="names of cases, as '9b/tp1/*'")
    add("--implementation", choices=dispatch.IMPLEMENTATIONS)
    add("--calls", type=int, default=32, help="calls in one timed loop")
    add("--repeats", type=int, default=5, help="timings of every loop")
    add("--budget-s", type=float, default=500, help="start no case after so long")
    add(
        "--again",
        action="store_true",
        help="also measure cases that the table has already",
    )
    add("--quick", action="store_true", help="only small cases; needs --output")
    add("--output", type=Path, metavar="FILE.json", help="default: the package's own")
    return parser


def main(arguments: Sequence[str] | None = None, timer: Timer | None = None) -> None:
    """Tune the requested cases; `timer` replaces the clock in tests."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = make_parser().parse_args(arguments)
    options.operation = options.operation or list(tuning.OPERATIONS)
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.quick:
        raise SystemExit(
            "jax finds only a CPU, for which there is nothing to tune. --quick "
            "tries the tuner on the small cases"
        )
    if options.quick and options.output is None:
        raise SystemExit(
            "--quick measures tiny cases, which must not replace the tuned table: "
            "give --output"
        )
    implementation = options.implementation
    if implementation is None:
        implementation = dispatch.implementation_for(device.platform)
        if implementation == "cpu":  # has no sizes to choose
            implementation = "reference"
    path = options.output
    if path is None:
        path = Path(str(tuning.folder())) / tuning.file_name(device.device_kind)

    def by_clock(sizes: Sizes, step: Callable[..., Any], work: Work) -> float:
        calls, repeats = options.calls, options.repeats
        return measure(
            step, work.carry, work.turns, calls=calls, repeats=repeats
        ).median_s

    table = _begin(path, device.device_kind, arguments, is_again=options.again)
    planned = _missing(bench.plan(options, device.platform), table, implementation)
    start, failed, left = time.monotonic(), [], []
    for case in tqdm(planned, unit="case", disable=None):
        if time.monotonic() - start > options.budget_s:
            left.append(f"{case.operation} {case.name}")
            continue
        try:
            found = tune_case(case, implementation, timer or by_clock)
        except TuneError as error:
            failed.append(str(error))
            continue
        if found is not None:
            for name, value in zip(("entries", "measured_us"), found, strict=True):
                of_operation = table[name].setdefault(case.operation, {})
                of_operation.setdefault(implementation, {})[case.key] = value
            bench.save(path, table)
    print(f"{path}: {_num_entries(table)} entries")
    if left:
        print(
            f"not started within {options.budget_s:g} s (run again to measure "
            f"these): {', '.join(left)}"
        )
    if failed:
        raise SystemExit("\n".join(failed))


def _missing(
    planned: Sequence[bench.Planned], table: dict[str, Any], implementation: str
) -> list[bench.Planned]:
    """Return the first case of every key that has no entry in the table."""
    first: dict[tuple[str, str | None], bench.Planned] = {}
    for case in planned:
        of_operation = table["entries"].get(case.operation, {})
        if case.key not in of_operation.get(implementation, {}):
            first.setdefault((case.operation, case.key), case)
    return list(first.values())


def _num_entries(table: dict[str, Any]) -> int:
    every = table["entries"].values()
    return sum(len(keys) for found in every for keys in found.values())


def _begin(
    path: Path, device_kind: str, arguments: Sequence[str], *, is_again: bool
) -> dict[str, Any]:
    """Return the table of an earlier run to continue, or an empty one.

    A table is continued only with the same commit and jax; else its times are not
    comparable.
    """
    table: dict[str, Any] = {
        "device": device_kind,
        "jax": jax.__version__,
        "date": now(),
        "command": bench.command("tune", arguments),
        "commit": bench.code() or "unknown",
        "entries": {},
        "measured_us": {},
    }
    if is_again or not path.is_file():
        return table
    before = tuning.read(path, device_kind)
    if any(before[name] != table[name] for name in ("jax", "commit")):
        return table
    names = ("entries", "measured_us")
    return table | {name: before.get(name, {}) for name in names}


if __name__ == "__main__":
    main()
