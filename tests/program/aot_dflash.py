"""Compile rounds of a DFlash drafter without the devices.

`PYTHONPATH=.venv/aot python -m tests.program.aot_dflash` compiles greedy rounds of 8
sequences and adds the compilers' reports to `benchmarks/results/aot_dflash.json`;
programs already in the file are skipped, and those named as arguments are compiled
again. `--table` prints the table of `benchmarks/compilers.md`. Nothing runs: no figure
is a speed.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.draft_costs import DFLASH, head_config
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.memory.device_descriptions import describe_mesh, named_devices
from jaxspec.engine.scheduling.programs import GREEDY, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.models.families import published_config
from tests.program import hlo
from tests.program.aot_record import Record, compile_step, engine_config, markdown
from tests.program.aot_step import num_attentions

GIB = 2**30
NUM_SEQS, NUM_PAGES = 8, 768
# Usable bytes of a device.
HBM = {
    "v5e-1": int(15.75 * GIB),
    "v6e-1": int(31.25 * GIB),
    "h200": 141 * 10**9,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program: a round of greedy requests with all drafts of a block.

    Attributes:
        size: The target's, of Gemma 3.
        num_drafter_layers: Layers of the drafter.
        block_size: Drafts of a block, and the newest token.
        draft_vocab_size: Rows of the drafter's own output matrix.
    """

    device: str
    size: str
    num_drafter_layers: int
    block_size: int
    draft_vocab_size: int

    @property
    def name(self) -> str:
        """Unique name of the case."""
        return f"{self.device}/{self.size}/{self.num_drafter_layers} layers"

    def num_target_layers(self) -> int:
        """Return the number of layers of the published target."""
        content = published_config(f"google/gemma-3-{self.size}-it")
        assert content is not None
        return content.get("text_config", content)["num_hidden_layers"]

    def config(self, num_target_layers: int) -> EngineConfig:
        """Return the configuration of an engine with some layers of the target."""
        drafter = head_config(self.size, DFLASH) | {
            "num_hidden_layers": self.num_drafter_layers,
            "num_target_layers": num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": 4,
                "target_layer_ids": [0, num_target_layers // 2, num_target_layers - 2],
            },
            "draft_vocab_size": self.draft_vocab_size,
        }
        with tempfile.TemporaryDirectory() as folder:
            content = json.dumps(drafter)
            (Path(folder) / "config.json").write_text(content, encoding="utf-8")
            return engine_config(
                f"google/gemma-3-{self.size}-it",
                num_layers=num_target_layers,
                speculative_config={
                    "method": "dflash",
                    "model": folder,
                    "num_speculative_tokens": self.block_size - 1,
                },
                dtype="bfloat16",
                tensor_parallel_size=len(named_devices(self.device)),
                max_num_seqs=NUM_SEQS,
                num_gpu_blocks_override=NUM_PAGES,
            )


# The drafter that docs/training.md trains for the 270M.
_TRAINED: dict[str, Any] = dict(
    size="270m", num_drafter_layers=1, block_size=4, draft_vocab_size=4096
)
CASES = {
    case.name: case
    for case in (
        Case(device=device, **_TRAINED) for device in ("v5e-1", "v6e-1", "h200")
    )
}
EXAMPLE = "v6e-1/270m/1 layers"  # always compiled, with fewer layers of the target
RECORD = Record("aot_dflash", CASES)


def measure(case: Case, num_target_layers: int | None = None) -> dict[str, Any]:
    """Compile a case; return the compiler's report for one device.

    Args:
        num_target_layers: Layers of the target; None for all.
    """
    if num_target_layers is None:
        num_target_layers = case.num_target_layers()
    config = case.config(num_target_layers)
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    shape = shapes.find(NUM_SEQS, config.max_draft_tokens, 0, GREEDY)
    assert shape is not None
    mesh = describe_mesh(case.device, config)
    step = compile_step(config, mesh, shape, has_options=True)
    found = step.row(
        *("target_bytes", "draft_bytes", "argument_bytes", "hbm_bytes", "temp_bytes"),
        *("peak_bytes", "code_bytes", "donated_bytes", "state_bytes", "kernels"),
        *("moves", "copied", "compile_cpu_s"),
    )
    drafter_pages = hlo.local_bytes(step.forms[2].proposers)
    return {
        "name": case.name,
        "program": shape.name,
        "layers": [num_target_layers, case.num_drafter_layers],
        "drafts": config.max_draft_tokens,
        **found,
        "moves": hlo.largest(found["moves"], 4),
        "drafter_pages_bytes": drafter_pages,
        "attentions": num_attentions(step.text),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line per program."""
    columns = (
        "device", "target", "drafter's layers", "drafts", "target, GiB",
        "drafter, MB", "drafter's pages, MB", "temporaries, MB", "kernels", "CPU-s",
    )  # fmt: skip
    lines = []
    for name, case in CASES.items():
        if name not in rows:
            continue
        row = rows[name]
        lines.append(
            (
                *(case.device, case.size, str(case.num_drafter_layers)),
                str(row["drafts"]),
                f"{row['target_bytes'] / GIB:.2f}",
                *(
                    f"{row[key] / 1e6:.1f}"
                    for key in ("draft_bytes", "drafter_pages_bytes", "temp_bytes")
                ),
                str(row["kernels"]),
                f"{row['compile_cpu_s']:.0f}",
            )
        )
    return markdown(columns, *lines) + "\n"


if __name__ == "__main__":
    RECORD.main(
        lambda name: measure(CASES[name]), table, "Programs of DFlash drafters."
    )
