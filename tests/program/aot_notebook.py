"""Compile the programs of the notebook's pairs for TPUs, without their devices.

`PYTHONPATH=.venv/aot python -m tests.program.aot_notebook` compiles each program that
`benchmarks/results/aot_notebook.json` lacks, and adds what the compiler reports. Pairs
and engine arguments are those of `notebooks/tpu_and_gpu.ipynb`, whose cells make them.
Programs named as arguments (or prefixes of names) are compiled again. Nothing runs.
"""

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import TPUS, named_mesh
from jaxspec.engine.memory.probe import fit, spread_draft
from jaxspec.engine.scheduling.programs import GREEDY, SAMPLED, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.models.families import published_config
from jaxspec.program.plan import StepShape
from tests.program.aot_pairs import GIB, measure_program
from tests.program.aot_record import Record, markdown
from tests.support.notebooks import parameters_of, read, run_cells

NOTEBOOK = "tpu_and_gpu"
# "first" serves all launches until the others are compiled. The timed texts are made by
# "plain" without drafts, and by "round" with them.
PROGRAMS = ("first", "round", "plain")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program of a pair.

    Attributes:
        pair: Target, draft model ("": none) and quantization, as in the notebook.
        program: One of `PROGRAMS`.
    """

    devices: str
    pair: tuple[str, str, str | None]
    program: str

    @property
    def label(self) -> str:
        """The pair, for display."""
        target, draft, quantization = self.pair
        sizes = [one.rpartition("-it")[0].rpartition("/")[2] for one in (target, draft)]
        drafts = sizes[1] or "its text"
        return f"{sizes[0]}<-{drafts}" + (f" {quantization}" if quantization else "")

    @property
    def name(self) -> str:
        """The name of the row."""
        return f"{self.devices}/{self.label}/{self.program}"


def _cases() -> list[Case]:
    """Return a case for every program of a TPU's pairs in the notebook."""
    pairs = parameters_of(read(NOTEBOOK))["PAIRS"]
    return [
        Case(devices=devices, pair=pair, program=program)
        for devices in pairs
        if devices in TPUS
        for pair in pairs[devices]
        for program in PROGRAMS
    ]


CASES = {case.name: case for case in _cases()}


@functools.cache
def _space(devices: str) -> dict[str, Any]:
    """Run the cells up to the plan; return all names that they define."""
    with contextlib.redirect_stdout(io.StringIO()):
        return run_cells(NOTEBOOK, "device", "weights", "plan", DEVICE=devices)


def arguments_of(case: Case) -> dict[str, Any]:
    """Return the engine arguments of a pair in the notebook."""
    return _space(case.devices)["arguments"](*case.pair)


def config_of(case: Case) -> EngineConfig:
    """Return the configuration of the engine that the notebook makes."""
    given = arguments_of(case)
    with tempfile.TemporaryDirectory() as root:

        def folder(name: str) -> str:
            path = Path(root) / Path(name).name
            path.mkdir()
            text = json.dumps(published_config(name))
            (path / "config.json").write_text(text, encoding="utf-8")
            return str(path)

        drafts = dict(given["speculative_config"])
        if "model" in drafts:
            drafts["model"] = folder(drafts["model"])
        changes = {"model": folder(given["model"]), "speculative_config": drafts}
        args = EngineArgs(**(given | changes), load_format="dummy")
        config = args.create_engine_config()
    mesh = named_mesh(case.devices, config)
    config, mesh, _ = spread_draft(config, mesh, device=case.devices)
    return fit(config, mesh, device=case.devices)[0]


def programs_of(config: EngineConfig) -> Mapping[str, StepShape]:
    """Return the programs of an engine, by the names in `PROGRAMS`."""
    shapes = Shapes(config, SpeculationPolicy(config.speculative)).all()
    assert shapes[0].features == SAMPLED
    greedy = [shape for shape in shapes if shape.features == GREEDY]
    return {
        "first": shapes[0],
        "round": next(shape for shape in greedy if shape.num_levels),
        "plain": next(shape for shape in greedy if not shape.num_levels),
    }


def measure(name: str) -> dict[str, Any]:
    """Compile a program; return its row."""
    case = CASES[name]
    config = config_of(case)
    return {
        "name": name,
        "arguments": arguments_of(case),
        **measure_program(config, case.devices, programs_of(config)[case.program]),
    }


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows."""
    head = (
        *("devices", "pair", "program", "CPU-s", "of a device, GiB"),
        *("temporaries, MiB", "code, MB", "copied"),
    )
    lines = [
        [
            CASES[name].devices,
            CASES[name].label,
            f"{CASES[name].program}: {row['program']}",
            f"{row['compile_cpu_s']:.0f}",
            f"{row['hbm_bytes'] / GIB:.2f}",
            f"{row['temp_bytes'] / 2**20:.0f}",
            f"{row['code_bytes'] / 1e6:.0f}",
            "yes" if row["copied"] else "no",
        ]
        for name, row in rows.items()
    ]
    return markdown(head, *lines)


RECORD = Record("aot_notebook", CASES)


if __name__ == "__main__":
    RECORD.main(measure, make_table, str(__doc__))
