"""Compile 27B with a 2B draft for sixteen TPUs of four hosts, without the devices.

`PYTHONPATH=.venv/aot python -m tests.program.aot_hosts` writes the compiler's reports
to `benchmarks/results/aot_hosts.json`: memory of one chip, collectives with their
number of chips, copies. Nothing runs: no figure is a speed.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.config.engine import EngineConfig
from jaxspec.program.plan import Features, StepShape
from jaxspec.sharding import make_mesh
from tests.kernels import aot_tpu
from tests.program.aot_record import Record, compile_step, engine_config, markdown

TOPOLOGY, CHIPS_OF_A_HOST, NUM_HOSTS = "v5e:4x4", (2, 2, 1), 4
NUM_CHIPS = 16
# Eight sequences of 8,192 tokens.
NUM_PAGES = 4096
NUM_DRAFT_TOKENS = 5
# The two ways in which HLO writes the participants of a collective: lists,
# `{{0,1,2,3},{4,5,6,7}}`, or axes, `mesh['a'=4,'b'=4] {'b'}`.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]+)\] \{([^}]+)\}")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A program to compile.

    Attributes:
        draft_devices: Number of devices that share a copy of the draft.
        layers: Layers of target and draft to compile; None for all.
    """

    draft_devices: int
    layers: tuple[int | None, int | None] = (None, None)

    @property
    def name(self) -> str:
        parts = [f"draft over {self.draft_devices}", self.shape.name]
        if self.layers != (None, None):
            parts.append(
                "layers " + ", ".join(str(one or "all") for one in self.layers)
            )
        return "/".join(parts)

    @property
    def shape(self) -> StepShape:
        """The shape of a round of eight greedy sequences."""
        return StepShape(
            num_seqs=8,
            num_levels=NUM_DRAFT_TOKENS,
            max_prompt_tokens=0,
            features=Features(all_greedy=True),
        )

    def config(self) -> EngineConfig:
        """Return the configuration of the engine whose program is compiled."""
        return engine_config(
            "27b",
            "2b",
            num_layers=self.layers,
            num_speculative_tokens=NUM_DRAFT_TOKENS,
            speculative_draft_tensor_parallel_size=self.draft_devices,
            tensor_parallel_size=NUM_CHIPS,
            max_num_seqs=256,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=NUM_PAGES,
            dtype="bfloat16",
        )


# The long suite compiles every program. The first one has only one layer of each kind.
_CELLS = [
    Cell(draft_devices=4, layers=(2, 2)),
    Cell(draft_devices=4),
    Cell(draft_devices=16),
]
CELLS = {cell.name: cell for cell in _CELLS}
EXAMPLE = _CELLS[0].name
RECORD = Record("aot_hosts", CELLS)


def describe_hosts(draft_devices: int) -> Mesh:
    """Return the mesh of all chips, grouped by host, as `Runner` orders them."""
    found = aot_tpu.described_devices(TOPOLOGY, CHIPS_OF_A_HOST)
    devices = sorted(found, key=lambda one: (one.process_index, one.id))
    return make_mesh(NUM_CHIPS, draft_devices, devices)


def groups(text: str) -> dict[str, int]:
    """Count the text's collectives, by name and number of participating chips.

    A collective in a loop counts once, although it runs several times.
    """
    found: Counter[str] = Counter()
    for line in text.splitlines():
        operation = re.search(
            r" (all-reduce|all-gather|all-to-all|reduce-scatter)(-start)?\(", line
        )
        if operation is None:
            continue
        listed, by_axes = _LISTED.search(line), _BY_AXES.search(line)
        if listed is not None:
            size = len(listed[1].split(","))
        else:
            assert by_axes is not None, line
            sizes = dict(one.split("=") for one in by_axes[1].split(","))
            size = math.prod(int(sizes[axis]) for axis in by_axes[2].split(","))
        found[f"{operation[1]} over {size}"] += 1
    return dict(sorted(found.items()))


def measure(name: str) -> dict[str, Any]:
    """Compile a program; return the compiler's report for one chip."""
    cell = CELLS[name]
    mesh = describe_hosts(cell.draft_devices)
    step = compile_step(cell.config(), mesh, cell.shape)
    row = step.row(
        *("executables", "target_bytes", "draft_bytes", "state_bytes"),
        *("argument_bytes", "temp_bytes", "peak_bytes", "hbm_bytes", "donated_bytes"),
    )
    return (
        dict(
            name=name,
            topology=TOPOLOGY,
            processes=[device.process_index for device in mesh.devices.flat],
        )
        | row
        | dict(
            groups=groups(step.text),
            collectives=step.facts["collectives"],
            largest_moves=step.facts["moves"],
        )
        | step.row("copied", "compile_s")
    )


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows."""
    head = "program", "target", "draft", "pages, rows", "temporaries", "collectives"
    lines = []
    for name, row in rows.items():
        sizes = ("target_bytes", "draft_bytes", "state_bytes", "peak_bytes")
        found = ", ".join(f"{count} {kind}" for kind, count in row["groups"].items())
        lines.append([name, *(f"{row[one] / 2**30:.2f} GiB" for one in sizes), found])
    return markdown(head, *lines)


def main() -> None:
    RECORD.main(measure, make_table, str(__doc__))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
