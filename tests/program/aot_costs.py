"""What compiling the full-size step costs, for devices that are not there.

`PYTHONPATH=.venv/aot python -m tests.program.aot_costs --out FILE` lowers and compiles
9B with a 2B draft for a v5e-8, a v6e-1 and an H200: rounds alone, rounds with prompts,
and, where the program tells them apart, greedy ones. CPU-s, operations and temporary
bytes, to compare two states of the code. Nothing runs: no figure is a speed of a step.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.compile_costs import costs_of
from jaxspec.bench.report import commit, write_whole
from jaxspec.program.plan import Features, StepShape
from tests.kernels import aot_gpu, aot_tpu
from tests.program.aot_step import PLACES, SHAPE, lower_pair, missing

NAMES = ("v5e-8", "v6e-1", "h200")
CHUNKS = {"decode": 0, "with prompts": 128}
GREEDY = {"is_greedy": True}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one program.

    Attributes:
        lowered_ops: Operations that the compiler is given.
        compiled_ops: Operations of what it made of them.
        temp_bytes, code_bytes, hbm_bytes: Of one chip; all with arguments and results.
        peak_rss_bytes: Of the process so far.
    """

    place: str
    program: str
    num_draft_tokens: int
    lower_cpu_s: float
    lower_s: float
    compile_cpu_s: float
    compile_s: float
    lowered_ops: int
    compiled_ops: int
    num_arguments: int
    argument_bytes: int
    donated_bytes: int
    temp_bytes: int
    code_bytes: int
    hbm_bytes: int
    peak_rss_bytes: int


def shapes() -> dict[str, StepShape]:
    """The programs that are compared, by name."""
    found = {
        name: dataclasses.replace(SHAPE, chunk=chunk) for name, chunk in CHUNKS.items()
    }
    if any(item.name == "is_greedy" for item in dataclasses.fields(Features)):
        # Not a keyword here: the script also runs where the field is missing.
        make: Callable[..., Features] = functools.partial(Features, **GREEDY)
        found |= {
            f"{name}, greedy": dataclasses.replace(shape, features=make())
            for name, shape in found.items()
        }
    return found


def measure(
    place: str,
    program: str,
    *,
    layers: tuple[int | None, int | None] = (None, None),
) -> Costs:
    """Lower and compile one."""
    shape = shapes()[program]
    with aot_tpu.no_compilation_cache():
        found = costs_of(lambda: lower_pair(place, shape, layers=layers)[0])
    return Costs(
        place=place,
        program=program,
        num_draft_tokens=shape.num_draft_tokens,
        **found,
    )


def _all(places: list[str], programs: list[str]) -> Iterator[Costs]:
    wanted = [(place, program) for program in programs for place in places]
    for place, program in tqdm(wanted, unit="program"):
        yield measure(place, program)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| place | program | lower+compile CPU-s | ops in | ops out | temporaries MB | "
        "code MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["place"],
            row["program"],
            f"{row['lower_cpu_s']}+{row['compile_cpu_s']}",
            f"{row['lowered_ops']:,}",
            f"{row['compiled_ops']:,}",
            f"{row['temp_bytes'] / 1e6:.1f}",
            f"{row['code_bytes'] / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What compiling full sizes costs.")
    parser.add_argument("--out", type=Path, help="written after every program")
    parser.add_argument("--places", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--programs", nargs="+", choices=[*shapes()])
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name in options.places:
        if (reason := missing(PLACES[name])) is not None:
            raise SystemExit(f"{name}: {reason}")
    versions = aot_tpu.versions() | aot_gpu.versions()
    rows: list[dict[str, Any]] = []
    for costs in _all(options.places, options.programs or [*shapes()]):
        rows.append(asdict(costs))
        if options.out is not None:
            result = {"versions": versions, **commit(), "rows": rows}
            write_whole(json.dumps(result, indent=2) + "\n", options.out)
    print(table(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
