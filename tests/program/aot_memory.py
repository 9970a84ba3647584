"""Record the compilers' memory of large batches, to compare with the memory plan.

`PYTHONPATH=.venv/aot python -m tests.program.aot_memory` compiles the largest program
of each cell below without the devices, and writes the compilers' reports to
`benchmarks/results/aot_memory.json`, a row after every program; programs already in the
file are skipped. Cells named as arguments (or prefixes of names) are compiled again.
`--table` prints the tables of `benchmarks/compilers.md` and of `docs/running.md`.

Unless a cell sets `layers`, both models have two layers: temporaries are those of one
layer and of the logits. Weights and pages are counted for whole models. If jax cannot
parse the text of a program, the compiler's own dump is read instead. Nothing runs.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxspec.config.engine import EngineConfig, GivenSizes
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.device_descriptions import (
    describe_mesh,
    named_devices,
    named_mesh,
)
from jaxspec.engine.memory.draft_sharding import DraftSharding
from jaxspec.engine.memory.plan import (
    DEFAULT_UTILIZATION,
    GIB,
    LENGTHS,
    MIB,
    MemoryFacts,
    MemoryPlan,
    Sizes,
)
from jaxspec.engine.memory.probe import find_facts, plan_for
from jaxspec.engine.scheduling.programs import GREEDY, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.errors import ConfigError
from jaxspec.program.plan import Features
from jaxspec_checkpoints.gemma.published import published_config
from tests.program import hlo
from tests.program.aot_record import Record, compile_step, engine_config, markdown

NUM_DRAFT_TOKENS = 5
NUM_PAGES = 4096
# Longest sequence of a published size, in tokens.
MAX_MODEL_LEN = 8192
FEATURES = {
    "greedy": GREEDY,
    "plain": Features(),
    "controls": Features(has_controls=True, num_logprobs=20),
    "prompts": Features(has_controls=True, num_logprobs=20, num_prompt_logprobs=20),
}
# Devices for which jax cannot parse the program text of large batches.
UNREADABLE = ("v6e-1",)
# An H100 runs the programs compiled for an H200, so they must also fit its smaller
# memory.
PLACES = {"h200": ("h100", "h200")}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A program to compile.

    Attributes:
        draft: Size of the draft model; None for the target alone, without drafts.
        num_tokens: Prompt tokens in one launch.
        form: Features that requests need: a key of `FEATURES`.
        draft_devices: Number of devices that share a copy of the draft; None: the
            target's number.
        layers: Layers of target and draft to compile; None for all.
    """

    device: str
    target: str
    draft: str | None = "2b"
    num_seqs: int
    num_tokens: int = 2048
    form: str = "plain"
    draft_devices: int | None = None
    layers: tuple[int | None, int | None] = (2, 2)

    @property
    def pair(self) -> str:
        """Names of the cell's models, for display."""
        return self.target if self.draft is None else f"{self.target}<-{self.draft}"

    @property
    def name(self) -> str:
        """Unique name of the cell."""
        parts = [self.device, self.pair, f"{self.num_seqs}+{self.num_tokens}"]
        parts.append(self.form)
        if self.draft_devices is not None:
            parts.append(f"draft over {self.draft_devices}")
        if self.layers != (2, 2):
            target, draft = (str(one or "all") for one in self.layers)
            parts.append(f"layers {target}, {draft}")
        return "/".join(parts)

    def _sizes(self) -> dict[str, Any]:
        drafts: dict[str, Any] = {}
        if self.draft is not None:
            drafts = dict(
                num_speculative_tokens=NUM_DRAFT_TOKENS,
                speculative_draft_tensor_parallel_size=self.draft_devices,
            )
        return drafts | dict(
            tensor_parallel_size=len(named_devices(self.device)),
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.num_tokens or None,
        )

    def args(self, **changes: Any) -> EngineArgs:
        """Return the arguments of an engine with whole models."""
        models: dict[str, Any] = dict(
            model=f"google/gemma-2-{self.target}", disable_hybrid_kv_cache_manager=True
        )
        if self.draft is not None:
            models["speculative_model"] = f"google/gemma-2-{self.draft}"
        given: dict[str, Any] = models | self._sizes() | {"load_format": "dummy"}
        return EngineArgs(**(given | changes))

    def config(self) -> EngineConfig:
        """Return the configuration of the engine whose program is compiled."""
        return engine_config(
            self.target,
            self.draft,
            num_layers=self.layers,
            num_gpu_blocks_override=NUM_PAGES,
            **self._sizes(),
        )

    def facts(self, place: str) -> MemoryFacts:
        """Return the facts for the memory plan of whole models on a place's devices.

        They are known without a compiler.
        """
        config = dataclasses.replace(self, layers=(None, None)).config()
        return find_facts(config, named_mesh(place, config), GivenSizes(), place)


def _cells() -> dict[str, Cell]:
    """Return all cells in the order of compilation, the most informative first."""
    kaggle: dict[str, Any] = dict(device="v5e-8", target="27b")
    v6e: dict[str, Any] = dict(device="v6e-1", target="9b", num_tokens=512)
    alone: dict[str, Any] = dict(device="v6e-1", target="2b", draft=None)
    gpu: dict[str, Any] = dict(device="h200")
    # Cells with more prompt tokens per launch than an engine chooses.
    prompts = alone, dict(gpu, target="9b"), kaggle
    # Cells with the number of prompt tokens that an engine chooses for so many
    # sequences.
    many: dict[str, Any] = dict(num_seqs=256, num_tokens=512)
    # Cells that show how a draft model is divided, for which small programs are enough.
    rounds: dict[str, Any] = dict(num_seqs=64, num_tokens=0, form="greedy")
    cells = [
        Cell(**kaggle, num_seqs=64, draft_devices=8, layers=(2, None)),
        Cell(**kaggle, num_seqs=64, draft_devices=1),
        *(Cell(**kaggle, **rounds, draft_devices=parts) for parts in (8, 4, 2, 1)),
        Cell(**gpu, target="9b", num_seqs=256),
        Cell(**gpu, target="27b", num_seqs=256),
        Cell(**(v6e | many)),
        Cell(**alone, num_seqs=256),
        Cell(**kaggle, **many),
        Cell(**gpu, target="27b", num_seqs=64),
        Cell(**gpu, target="9b", num_seqs=64),
        Cell(**alone, num_seqs=64),
        Cell(**v6e, num_seqs=64),
        Cell(**gpu, target="27b", num_seqs=128),
        Cell(**gpu, target="9b", num_seqs=128),
        Cell(**alone, num_seqs=128),
        Cell(**v6e, num_seqs=128),
        Cell(**kaggle, num_seqs=128),
        Cell(**gpu, target="9b", num_seqs=256, form="controls"),
        Cell(**gpu, target="9b", num_seqs=64, form="prompts"),
        Cell(**gpu, target="27b", num_seqs=256, form="controls"),
        Cell(**kaggle, **many, form="controls"),
        Cell(**(v6e | many), form="controls"),
        *(Cell(**place, num_seqs=64, num_tokens=8192) for place in prompts),
    ]
    return {cell.name: cell for cell in cells}


CELLS = _cells()
RECORD = Record("aot_memory", CELLS)
read = RECORD.read


def measure(cell: Cell) -> dict[str, Any]:
    """Compile a cell, and count the memory of whole models."""
    config, facts = cell.config(), cell.facts(cell.device)
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    sizes = cell.num_seqs, config.max_draft_tokens, cell.num_tokens
    shape = shapes.find(*sizes, FEATURES[cell.form])
    assert shape is not None
    step = compile_step(
        config,
        describe_mesh(cell.device, config),
        shape,
        has_options=True,
        is_dumped=cell.device in UNREADABLE,
    )
    draft = config.draft_model_config
    layers = config.model_config.num_layers, 0 if draft is None else draft.num_layers
    found = step.row(
        *("argument_bytes", "output_bytes", "temp_bytes", "peak_bytes", "code_bytes"),
        *("donated_bytes", "state_bytes", "moves", "copied", "collectives"),
        *("is_text_dumped", "compile_cpu_s"),
    )
    return {
        "name": cell.name,
        "program": shape.name,
        "layers": list(layers),
        "weight_bytes": facts.weight_bytes,
        "page_bytes": facts.page_bytes,
        **found,
        "moves": hlo.largest(found["moves"], 4),
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def memory_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of a device's bytes, and of tokens in the KV cache, by size."""
    columns = (
        "device", "models", "sequences + prompt tokens", "weights",
        "plain", "with controls", "estimated for both", "code, estimated",
        "left, in tokens", "by the plan", "fits", "copied",
    )  # fmt: skip
    forms = ("plain", "controls")
    groups: dict[Any, dict[str, tuple[Cell, dict[str, Any]]]] = {}
    for name, row in rows.items():
        cell = CELLS[name]
        is_default = cell.draft_devices in (None, len(named_devices(cell.device)))
        if is_default and cell.layers != (None, None) and cell.form in forms:
            key = cell.device, cell.pair, cell.num_seqs, cell.num_tokens
            groups.setdefault(key, {})[cell.form] = cell, row
    lines = []
    for (device, pair, seqs, tokens), there in sorted(groups.items()):
        cell, _ = next(iter(there.values()))
        for place in PLACES.get(device, (device,)):
            facts = cell.facts(place)
            temporary = facts.programs.temporary_bytes(Sizes(seqs, tokens))
            room = facts.budget_bytes(DEFAULT_UTILIZATION) - facts.weight_bytes
            room -= facts.programs.code_bytes
            temps = {form: row["temp_bytes"] for form, (_, row) in there.items()}
            found = max(temps.values())
            left, planned = (
                max(room - one, 0) // facts.page_bytes * facts.page_size
                for one in (found, temporary)
            )
            cells = [_gib(temps[form]) if form in temps else "-" for form in forms]
            listed = [row["copied"] for _, row in there.values() if "copied" in row]
            copied = ", ".join(dict.fromkeys(sum(listed, []))) or (
                "none" if listed else "not asked"
            )
            lines.append(
                [place, pair, f"{seqs} + {tokens:,}", _gib(facts.weight_bytes)]
                + [*cells, _gib(temporary), _gib(facts.programs.code_bytes)]
                + [f"{left:,}", f"{planned:,}"]
                + ["yes" if left >= MAX_MODEL_LEN else "no", copied]
            )
    return markdown(columns, *lines)


def draft_sums(cell: Cell, num_layers: int | None = None) -> tuple[int, int]:
    """Number and bytes of all-reduces of the draft's hidden rows in a round.

    The first pass has two tokens per sequence, each other pass one. A pass has two
    float32 all-reduces per layer, and one in bfloat16 for the embedding.

    Args:
        num_layers: Layers of the draft model; None for all.
    """
    assert cell.draft is not None
    if cell.draft_devices == 1:
        return 0, 0
    config = published_config(cell.draft)
    layers = config["num_hidden_layers"] if num_layers is None else num_layers
    rows = cell.num_seqs * (2 + NUM_DRAFT_TOKENS - 1)
    row_bytes = config["hidden_size"] * (4 * 2 * layers + 2)
    return NUM_DRAFT_TOKENS * (2 * layers + 1), rows * row_bytes


def counted_draft_sums(row: dict[str, Any]) -> tuple[int, int]:
    """Number and bytes of these all-reduces in a program's text.

    The text has two passes of the draft: the first, and the body of a loop.
    """
    cell = CELLS[row["name"]]
    assert cell.draft is not None
    width = published_config(cell.draft)["hidden_size"]
    times: dict[tuple[int, ...], int] = {
        (2 * cell.num_seqs, width): 1,
        (cell.num_seqs, width): NUM_DRAFT_TOKENS - 1,
    }
    found = {
        key: count * times[hlo.shape_of(key)]
        for key, count in row["collectives"].items()
        if key.startswith("all-reduce ") and hlo.shape_of(key) in times
    }
    return _sum(found)


def other_collectives(row: dict[str, Any], name: str) -> tuple[int, int]:
    """Number and bytes of all collectives of one kind in the program's text."""
    found = {
        key: count
        for key, count in row["collectives"].items()
        if key.startswith(f"{name} ")
    }
    return _sum(found)


def _sum(found: dict[str, int]) -> tuple[int, int]:
    num_bytes = (count * hlo.bytes_of(key) for key, count in found.items())
    return sum(found.values()), sum(num_bytes)


def sharding_of(cell: Cell) -> DraftSharding:
    """Return the default draft sharding for the cell's models."""
    args = cell.args(speculative_draft_tensor_parallel_size=None)
    found = plan_for(args, cell.device).draft_sharding
    assert found is not None
    return found


def sharding_table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of draft models over few and over many devices.

    It has their bytes, their sums over devices, and the estimated time of a pass.
    """
    columns = (
        "draft over", "program, layers", "draft's weights",
        "KV of a token, both models", "pages",
        "draft's sums in a round", "all-reduces in the text", "all-gathers",
        "temporaries", "a pass, estimated",
    )  # fmt: skip
    lines = []
    sizes = [row for name, row in rows.items() if CELLS[name].draft_devices]
    if not sizes:
        return ""
    sharding = sharding_of(CELLS[sizes[0]["name"]])
    for row in sorted(sizes, key=lambda one: one["weight_bytes"]):
        cell = CELLS[row["name"]]
        facts = cell.facts(cell.device)
        [estimate] = [
            one for one in sharding.sizes if one.devices == cell.draft_devices
        ]
        num, num_bytes = draft_sums(cell)
        sums, gathers = (
            other_collectives(row, name) for name in ("all-reduce", "all-gather")
        )
        lines.append(
            [
                str(cell.draft_devices),
                f"{row['program']}, {row['layers'][0]} + {row['layers'][1]}",
                f"{_gib(facts.draft.weight_bytes)} GiB",
                f"{facts.page_bytes // facts.page_size:,} bytes",
                "none" if estimate.num_pages is None else f"{estimate.num_pages:,}",
                f"{num}, {num_bytes / 1e6:.1f} MB",
                f"{sums[0]}, {sums[1] / 1e6:.1f} MB",
                f"{gathers[0]}, {gathers[1] / 1e6:.2f} MB",
                f"{row['temp_bytes'] / MIB:.0f} MiB",
                f"{1e3 * estimate.read_s:.2f} + {1e3 * estimate.sum_s:.2f} ms",
            ]
        )
    return markdown(columns, *lines)


def window_plan(size: str, device: str, *, keeps_all: bool) -> MemoryPlan | None:
    """Return the plan of a Gemma 3 alone; None if it does not fit.

    Args:
        keeps_all: Layers with a sliding window keep all tokens.
    """
    args = EngineArgs(
        model=f"google/gemma-3-{size}-it",
        tensor_parallel_size=len(named_devices(device)),
        max_model_len=min(LENGTHS),
        disable_hybrid_kv_cache_manager=keeps_all,
    )
    try:
        return plan_for(args, device)
    except ConfigError:
        return None


def window_table() -> str:
    """Return a table of the sequences of Gemma 3 that fit.

    If every layer keeps all tokens, and if those with a sliding window keep theirs.
    """
    columns = ["model", "device", "KiB, every layer", "KiB, global", "KiB, local"]
    columns += [f"{length:,} tokens" for length in LENGTHS]
    lines = []
    for size in ("4b", "12b", "27b"):
        for device in ("v5e-1", "v5e-8", "v6e-1", "h100"):
            whole = window_plan(size, device, keeps_all=True)
            windows = window_plan(size, device, keeps_all=False)
            if whole is None or windows is None:
                continue
            token_bytes = [
                num_bytes
                for facts in (whole.facts, windows.facts)
                for num_bytes in facts.kv_bytes_per_token(facts.page_bytes).values()
            ]
            cells = [f"{num_bytes / 1024:.1f}" for num_bytes in token_bytes]
            for length in LENGTHS:
                counts = [one.concurrency(length) for one in (whole, windows)]
                shown = [f"{count:.1f}" if count >= 1 else "-" for count in counts]
                cells.append(" → ".join(shown))
            lines.append([size, device, *cells])
    return markdown(columns, *lines)


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """Return the tables of `benchmarks/compilers.md` and of `docs/running.md`."""
    return f"{memory_table(rows)}\n\n{sharding_table(rows)}\n\n{window_table()}"


if __name__ == "__main__":
    RECORD.main(lambda name: measure(CELLS[name]), tables, "Memory of large batches.")
