"""Compile the full-size programs of `benchmarks.device` without a GPU.

`PYTHONPATH=.venv/aot python -m tests.program.aot_h200` adds the compiler's report on
each program that `benchmarks/results/aot_h200.json` lacks: memory, kernels, copies.
Programs named as arguments (or prefixes of names) are compiled again. Weights are
shapes; nothing runs, and no figure is a speed. The machine code is for an H200; an H100
runs the same code with less memory.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import device, device_steps
from benchmarks.step_times import Models
from tests.kernels import aot_tpu
from tests.program import hlo
from tests.program.aot_record import FOLDER, Record, markdown
from tests.program.aot_step import PLACES, describe

RESULTS = FOLDER / "aot_h200.json"
GIB = 2**30
PAIRS = ("9b-2b", "27b-2b")
# Memory that jax finds on each GPU; the benchmark uses a fraction of it.
MEMORY_GIB = {"NVIDIA H100": 78, "NVIDIA H200": 139}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the benchmark's programs.

    Attributes:
        make: Function that compiles it.
        rows: Largest number of positions whose logits it computes at once.
        layers: Numbers of layers of the models that run in it.
        weight_bytes: Weights of both models, which the process always holds.
    """

    make: Callable[[], Any]
    rows: int
    layers: tuple[int, ...]
    weight_bytes: int


def gpu() -> Mesh:
    """Return a mesh of one GPU, for compilation only."""
    return describe(PLACES["h200"])


def room(name: str) -> float:
    """Return the bytes that the benchmark's programs may use on a GPU."""
    return MEMORY_GIB[name] * GIB * device.MEMORY_FRACTION


def programs(
    *arguments: str, mesh: Mesh, layers: tuple[int, int] | None = None
) -> dict[str, Program]:
    """All programs that the benchmark runs with these arguments, without duplicates.

    Args:
        layers: Layers of target and draft to compile; None for all.
    """
    options = device.make_parser().parse_args(arguments)
    setting = device_steps.setting_of(options)
    found: dict[str, Program] = {}
    for pair in PAIRS:
        target, draft = device_steps.configs_of(pair, options)
        if layers is not None:
            target = replace(target, num_layers=layers[0])
            draft = replace(draft, num_layers=layers[1])
        models = Models.abstract(target, draft, setting, mesh)
        both = target.num_layers, draft.num_layers
        form = functools.partial(
            Program,
            weight_bytes=models.weight_bytes + models.draft_alone().weight_bytes,
        )
        for (size, seqs), make in device_steps.plain_steps(
            pair, models, options
        ).items():
            one = both[:1] if size == device_steps.PAIRS[pair][0] else both[1:]
            name = f"plain/{size}/batch {seqs}"
            found.setdefault(name, form(make=make, rows=seqs, layers=one))
        for (seqs, count), make in device_steps.target_passes(models, options).items():
            name = f"pass/{device_steps.PAIRS[pair][0]}/batch {seqs}/K {count}"
            rows = seqs * (count + 1)
            found[name] = form(make=make, rows=rows, layers=both[:1])
        seqs, most = options.batches[0], max(options.num_drafts)
        for count, make in device_steps.rounds(models, options).items():
            what = count if count == "standard" else f"K {count}"
            rows = seqs * ((most if count == "standard" else count) + 1)
            found[f"round/{pair}/{what}"] = form(make=make, rows=rows, layers=both)
    return found


def compile_program(name: str, program: Program) -> tuple[dict[str, Any], str]:
    """Compile one program; return the recorded facts and the program's text.

    `pair_bytes` includes weights of the pair that the program does not read;
    `logits_bytes` are float32 logits of all positions computed at once.
    """
    start = time.monotonic()
    with aot_tpu.no_compilation_cache():
        made = program.make()
    elapsed = time.monotonic() - start
    kept = made.params, [leaf for leaf in jax.tree.leaves(made.forms) if leaf.ndim == 4]
    facts = hlo.facts(made.compiled, state=made.forms, kept=kept)
    rest = program.weight_bytes - hlo.local_bytes(made.params)
    facts["pair_bytes"] = facts["hbm_bytes"] + rest
    facts["logits_bytes"] = program.rows * made.models.target.vocab_size * 4
    names = (
        *("argument_bytes", "temp_bytes", "peak_bytes", "hbm_bytes", "pair_bytes"),
        *("donated_bytes", "state_bytes", "logits_bytes", "kernels", "moves", "copied"),
    )
    row = {
        "name": name,
        "layers": list(program.layers),
        **{one: facts[one] for one in names},
        "compile_s": round(elapsed, 1),
        "fits": fits(facts["pair_bytes"]),
    }
    return row, made.compiled.as_text()


def fits(pair_bytes: int) -> dict[str, bool]:
    """Return for each kind of GPU whether a program of this size fits."""
    return {name: pair_bytes <= room(name) for name in MEMORY_GIB}


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows."""
    lines = [
        [name, f"{row['pair_bytes'] / GIB:.2f}", str(row["kernels"])]
        for name, row in rows.items()
    ]
    return markdown(("program", "with the pair's weights, GiB", "kernels"), *lines)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    found = programs(mesh=gpu())
    head = {
        "device": "NVIDIA H200, compiled for and not run",
        "memory_gib": MEMORY_GIB,
        "memory_fraction": device.MEMORY_FRACTION,
    }
    record = Record("aot_h200", found, head=head)
    record.main(
        lambda name: compile_program(name, found[name])[0], make_table, str(__doc__)
    )


if __name__ == "__main__":
    main()
