"""Compiles what `benchmarks.gpu` runs at full size for a GPU that is not there.

`PYTHONPATH=.venv/aot python -m tests.program.aot_h200` writes what the compiler says of
each program to `benchmarks/results/aot_h200.json`: memory, kernels, copies.
With names of programs behind it (or their beginnings), it prints those. Weights are
shapes; nothing runs, and no figure is a speed. The machine code is for an H200; an H100
runs the same, and differs in its memory.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm.auto import tqdm

from benchmarks import gpu as full_size
from benchmarks.step_times import Models
from tests.kernels import aot_gpu, aot_tpu
from tests.program import hlo
from tests.program.aot_step import PLACES, describe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "aot_h200.json"
COMMAND = "PYTHONPATH=.venv/aot python -m tests.program.aot_h200"
GIB = 2**30
# What jax finds on them, and what the benchmark lets it take of that.
MEMORY_GIB = {"NVIDIA H100": 78, "NVIDIA H200": 139}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the benchmark's programs.

    Attributes:
        make: Compiles it.
        rows: Positions whose logits it computes at once, at most.
        layers: Of the models that run in it.
        weight_bytes: Of both models of the pair: the process holds them all along.
    """

    make: Callable[[], Any]
    rows: int
    layers: tuple[int, ...]
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says about one program.

    Attributes:
        peak_bytes: In use at the worst moment, beside arguments.
        hbm_bytes: All of it: arguments, temporaries, code, results in new memory.
        pair_bytes: The same, with weights of the pair that the program does not read.
        state_bytes: Of pages and rows, which are updated in place.
        logits_bytes: Of all positions that are fed at once, in float32.
        moves: The largest ones, with their bytes.
        copied: Moves of a weight or of a layer's pages.
    """

    name: str
    layers: tuple[int, ...]
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int
    hbm_bytes: int
    pair_bytes: int
    donated_bytes: int
    state_bytes: int
    logits_bytes: int
    kernels: int
    moves: dict[str, int]
    copied: list[str]
    compile_s: float

    @property
    def fits(self) -> dict[str, bool]:
        """Whether each GPU has the memory, by its name."""
        return {name: self.pair_bytes <= room(name) for name in MEMORY_GIB}

    def row(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"fits": self.fits}


def gpu() -> Mesh:
    """One that can be compiled for and not run on."""
    return describe(PLACES["h200"])


def room(name: str) -> float:
    """Bytes that the benchmark's programs may use."""
    return MEMORY_GIB[name] * GIB * full_size.MEMORY_FRACTION


def programs(
    *arguments: str, mesh: Mesh, layers: tuple[int, int] | None = None
) -> dict[str, Program]:
    """All that the benchmark runs with these arguments; equal ones once.

    Args:
        layers: Of target and draft, where fewer than they have are enough.
    """
    options = full_size.make_parser().parse_args(arguments)
    setting = full_size.setting_of(options)
    found: dict[str, Program] = {}
    for pair in full_size.PAIRS:
        target, draft = full_size.configs_of(pair, options)
        if layers is not None:
            target = replace(target, num_layers=layers[0])
            draft = replace(draft, num_layers=layers[1])
        models = Models.abstract(target, draft, setting, mesh)
        both = target.num_layers, draft.num_layers
        form = functools.partial(
            Program,
            weight_bytes=models.weight_bytes + models.draft_alone().weight_bytes,
        )
        for (size, seqs), make in full_size.plain_steps(pair, models, options).items():
            one = both[:1] if size == full_size.PAIRS[pair][0] else both[1:]
            name = f"plain/{size}/batch {seqs}"
            found.setdefault(name, form(make=make, rows=seqs, layers=one))
        for (seqs, count), make in full_size.target_passes(models, options).items():
            name = f"pass/{full_size.PAIRS[pair][0]}/batch {seqs}/K {count}"
            rows = seqs * (count + 1)
            found[name] = form(make=make, rows=rows, layers=both[:1])
        seqs, most = options.batches[0], max(options.num_drafts)
        for count, make in full_size.rounds(models, options).items():
            what = count if count == "standard" else f"K {count}"
            rows = seqs * ((most if count == "standard" else count) + 1)
            found[f"round/{pair}/{what}"] = form(make=make, rows=rows, layers=both)
    return found


def compile_program(name: str, program: Program) -> tuple[Report, str]:
    """Compile one; the report and the program's text."""
    start = time.monotonic()
    with aot_tpu.no_compilation_cache():
        made = program.make()
    elapsed = time.monotonic() - start
    text, memory = made.compiled.as_text(), made.compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    used = arguments + memory.temp_size_in_bytes + memory.output_size_in_bytes
    used += memory.generated_code_size_in_bytes - memory.alias_size_in_bytes
    read = hlo.local_bytes(made.params)
    report = Report(
        name=name,
        layers=program.layers,
        argument_bytes=arguments,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes - arguments,
        hbm_bytes=used,
        pair_bytes=used + program.weight_bytes - read,
        donated_bytes=memory.alias_size_in_bytes,
        state_bytes=hlo.local_bytes(made.forms),
        logits_bytes=program.rows * made.models.target.vocab_size * 4,
        kernels=hlo.num_kernels(text),
        moves=hlo.largest(hlo.moves(text)),
        copied=hlo.copied(text, (made.params, _pages(made.forms))),
        compile_s=round(elapsed, 1),
    )
    return report, text


def _pages(forms: Any) -> list[jax.ShapeDtypeStruct]:
    """Those of the state's arrays that are a layer's pages."""
    return [leaf for leaf in jax.tree.leaves(forms) if leaf.ndim == 4]


def check_report(report: Report) -> None:
    """Raise unless it fits, copies nothing large and updates its state in place."""
    assert report.fits["NVIDIA H200"], report
    # To the last byte but padding.
    assert report.donated_bytes >= report.state_bytes, report
    assert report.copied == [], report
    # Logits, up to four times, and the rows of a layer: at batch 1, where logits are
    # small, that is less than the pages of one layer.
    assert max(report.moves.values(), default=0) <= report.logits_bytes, report
    assert report.peak_bytes <= 4 * report.logits_bytes + 2**21, report


def _write(rows: list[dict[str, Any]]) -> None:
    """A line for every program: a change of one shows as such."""
    head = {
        "device": "NVIDIA H200, compiled for and not run",
        "memory_gib": MEMORY_GIB,
        "memory_fraction": full_size.MEMORY_FRACTION,
        "command": COMMAND,
        "versions": aot_gpu.versions(),
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}"
    RESULTS.write_text(text + "\n", encoding="utf-8")


def _reports(wanted: dict[str, Program]) -> Iterator[Report]:
    for name, program in tqdm(wanted.items(), unit="program"):
        report, _ = compile_program(name, program)
        yield report


def main(arguments: list[str]) -> None:
    """Compile those that are named; or those to record, which are then checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names; all if none")
    names = parser.parse_args(arguments).names
    jax.config.update("jax_platforms", "cpu")
    reason = aot_gpu.missing()
    if reason is not None:
        raise SystemExit(reason)
    if names:
        wanted = programs(mesh=gpu())
        chosen = [name for name in wanted if name.startswith(tuple(names))]
        for report in _reports({name: wanted[name] for name in chosen}):
            print(json.dumps(report.row()), flush=True)
        return
    reports = []
    for report in _reports(programs(mesh=gpu())):
        reports.append(report)
        _write([report.row() for report in reports])
    for report in reports:
        check_report(report)


if __name__ == "__main__":
    main(sys.argv[1:])
