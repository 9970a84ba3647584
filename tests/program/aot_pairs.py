"""Compile the first programs of servers of published pairs, without their devices.

`PYTHONPATH=.venv/aot python -m tests.program.aot_pairs` compiles each program that
`benchmarks/results/aot_pairs.json` lacks, and adds what the compiler reports: memory,
copies, and the CPU seconds of lowering and compilation. Sizes are those that an engine
chooses on these devices. Programs named as arguments (or
prefixes of names) are compiled again. Nothing runs: no figure is the speed of a round.
"""

import functools
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.memory.device_descriptions import (
    describe_mesh,
    named_devices,
    named_mesh,
)
from jaxspec.engine.memory.probe import fit, spread_draft
from jaxspec.engine.scheduling.programs import SAMPLED, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import StepShape
from tests.program.aot_record import Record, compile_step, engine_config, markdown

GIB = 2**30
# Published names of target and draft.
PAIRS = {
    "4b<-270m": ("google/gemma-3-4b-it", "google/gemma-3-270m-it"),
    "12b<-270m": ("google/gemma-3-12b-it", "google/gemma-3-270m-it"),
    "27b<-1b": ("google/gemma-3-27b-it", "google/gemma-3-1b-it"),
    "9b<-2b": ("google/gemma-2-9b-it", "google/gemma-2-2b-it"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program of a server.

    Attributes:
        program: A key of `programs_of`.
        scan_layers: Whether the program has a loop over the layers.
    """

    devices: str
    pair: str
    program: str
    scan_layers: bool = True

    @property
    def name(self) -> str:
        """The name of the row."""
        form = "loop" if self.scan_layers else "every layer"
        return f"{self.devices}/{self.pair}/{self.program}/{form}"


_CASES = [
    Case(devices="v7x-2", pair="4b<-270m", program="first"),
    Case(devices="v7x-2", pair="12b<-270m", program="first"),
    Case(devices="v7x-2", pair="27b<-1b", program="first"),
    Case(devices="v7x-2", pair="9b<-2b", program="first"),
    Case(devices="v7x-2", pair="4b<-270m", program="first", scan_layers=False),
    Case(devices="v7x-2", pair="12b<-270m", program="first", scan_layers=False),
    Case(devices="v7x-2", pair="27b<-1b", program="first", scan_layers=False),
    Case(devices="v7x-2", pair="9b<-2b", program="first", scan_layers=False),
    Case(devices="v6e-1", pair="4b<-270m", program="alone"),
    Case(devices="v6e-1", pair="4b<-270m", program="first"),
    Case(devices="v6e-1", pair="12b<-270m", program="first"),
    Case(devices="v6e-8", pair="27b<-1b", program="first"),
]
CASES = {case.name: case for case in _CASES}
FIRST = "v6e-1/4b<-270m/first/loop"
EVERY_LAYER = "v7x-2/4b<-270m/first/every layer"
# Here XLA transposes the query matrix of each layer of the draft model, 1.2 MB.
TRANSPOSED = "v6e-8/27b<-1b/first/loop"
# Bytes of VMEM that an operation uses, in a program for a TPU.
_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"'
)


@functools.cache
def config_of(case: Case) -> EngineConfig:
    """Return the configuration of a server with default arguments on these devices."""
    target, draft = PAIRS[case.pair]
    config = engine_config(
        target,
        draft,
        scan_layers=case.scan_layers,
        tensor_parallel_size=len(named_devices(case.devices)),
        disable_hybrid_kv_cache_manager=None,
    )
    mesh = named_mesh(case.devices, config)
    config, mesh, _ = spread_draft(config, mesh, device=case.devices)
    return fit(config, mesh, device=case.devices)[0]


def programs_of(config: EngineConfig) -> Mapping[str, StepShape]:
    """Return the programs of the first requests.

    "first", which samples, is compiled at the start, and serves all requests until the
    others are compiled. "alone" is the smallest that answers a request.
    """
    shapes = Shapes(config, SpeculationPolicy(config.speculative)).all()
    assert shapes[0].features == SAMPLED
    alone = next(shape for shape in shapes if shape.num_seqs == 1)
    return {"alone": alone, "first": shapes[0]}


def measure(case: Case) -> dict[str, Any]:
    """Compile a program; return its row."""
    config = config_of(case)
    shape = programs_of(config)[case.program]
    return {"name": case.name, **measure_program(config, case.devices, shape)}


def measure_program(
    config: EngineConfig, devices: str, shape: StepShape
) -> dict[str, Any]:
    """Compile a program of an engine; return what the compiler reports.

    All bytes are those of one device, but `peak_rss_bytes`, the most memory that this
    process has used so far. `vmem_bytes` is the most of any operation: a kernel, or a
    fusion of XLA, which may use more than a kernel's limit.
    """
    mesh = describe_mesh(devices, config)
    step = compile_step(config, mesh, shape, has_options=True, is_dumped=True)
    models = [config.model_config]
    if config.draft_model_config is not None:
        models.append(config.draft_model_config)
    names = (
        *("target_bytes", "draft_bytes", "state_bytes", "argument_bytes", "temp_bytes"),
        *("peak_bytes", "code_bytes", "hbm_bytes", "donated_bytes", "kernels"),
        *("moves", "copied", "lowered_ops", "compiled_ops", "lower_cpu_s"),
        *("compile_cpu_s", "compile_s"),
    )
    return {
        "program": shape.name,
        "layers": [model.num_layers for model in models],
        "draft_devices": dict(mesh.shape)["model"],
        **step.row(*names),
        "vmem_bytes": max(map(int, _VMEM.findall(step.text))),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows."""
    head = (
        *("devices", "pair", "program", "layers", "CPU-s", "to lower", "wall, s"),
        *("of a device, GiB", "temporaries, MiB", "VMEM of an operation, MiB"),
        *("code, MB", "copied"),
    )
    lines = []
    for name, row in rows.items():
        case = CASES[name]
        lines.append(
            [
                case.devices,
                case.pair,
                f"{case.program}: {row['program']}",
                "in a loop" if case.scan_layers else "one by one",
                f"{row['compile_cpu_s']:.0f}",
                f"{row['lower_cpu_s']:.0f}",
                f"{row['compile_s']:.0f}",
                f"{row['hbm_bytes'] / GIB:.2f}",
                f"{row['temp_bytes'] / 2**20:.0f}",
                f"{row['vmem_bytes'] / 2**20:.1f}",
                f"{row['code_bytes'] / 1e6:.0f}",
                "yes" if row["copied"] else "no",
            ]
        )
    return markdown(head, *lines)


RECORD = Record("aot_pairs", CASES)


if __name__ == "__main__":
    RECORD.main(lambda name: measure(CASES[name]), make_table, str(__doc__))
