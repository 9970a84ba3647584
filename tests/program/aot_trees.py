"""Compare the compiled programs of draft trees with those of chains.

`PYTHONPATH=.venv/aot python -m tests.program.aot_trees` compiles rounds of 9B and 27B
with a 2B draft without the devices: of a chain, of side leaves and of a tree. The
compilers' reports go to `benchmarks/results/aot_trees.json`, a row after every program;
programs already in the file are skipped. Programs named as arguments (or prefixes of
names) are compiled again. `--table` prints the table of `benchmarks/compilers.md`.

Both models have two layers of their full width. Nothing runs: no figure is a speed.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.config.engine import EngineConfig
from jaxspec.config.token_tree import TREE_KEY, read_paths
from jaxspec.engine.memory.device_descriptions import (
    describe,
    describe_mesh,
    named_devices,
)
from jaxspec.engine.scheduling.programs import GREEDY, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.rows import gather
from jaxspec.program.tree.compact_kv import compact_kv
from jaxspec.program.tree.tree import Tree
from jaxspec.sharding import TARGET_MESH_AXES, replicated
from tests.kernels import aot_tpu
from tests.kernels.aot_reports import compile_lowered
from tests.program import hlo
from tests.program.aot_record import Record, compile_step, engine_config, markdown

DEVICES = ("h200", "v6e-1", "v5e-8")
# Devices, each with the target model of its rounds.
PLACES = *((device, "9b") for device in DEVICES), ("h200", "27b"), ("v5e-8", "27b")
# Drafts of the main chain, which is as long as the tree has levels.
NUM_LEVELS = 5
NUM_SEQS, NUM_PAGES, NUM_LAYERS = 8, 4096, 2
# A main chain of five, three of whose nodes have siblings with children.
TREE = str(
    [(0,) * length for length in range(1, NUM_LEVELS + 1)]
    + [(1,), (2,), (3,), (1, 0), (2, 0), (1, 0, 0)]
    + [(0, 1), (0, 2), (0, 1, 0), (0, 0, 1), (0, 0, 0, 1)]
)
KINDS: dict[str, dict[str, Any]] = {
    "chain": {},
    "leaves": dict(num_side_leaves=1),
    "tree": {TREE_KEY: TREE},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program: a round of greedy requests."""

    device: str
    target: str = "9b"
    kind: str

    @property
    def name(self) -> str:
        """Unique name of the case."""
        return f"{self.device}/{self.target}/{self.kind}"

    def config(self, **changes: Any) -> EngineConfig:
        """Return the configuration of the engine whose program is compiled."""
        own = KINDS[self.kind]
        count = len(read_paths(own[TREE_KEY])) if TREE_KEY in own else NUM_LEVELS
        return engine_config(
            self.target,
            "2b",
            num_layers=NUM_LAYERS,
            num_speculative_tokens=count,
            speculative_config=own or None,
            dtype="bfloat16",
            tensor_parallel_size=len(named_devices(self.device)),
            max_num_seqs=NUM_SEQS,
            num_gpu_blocks_override=NUM_PAGES,
            **changes,
        )


CASES = {
    case.name: case
    for device, target in PLACES
    for case in (Case(device=device, target=target, kind=kind) for kind in KINDS)
}
RECORD = Record("aot_trees", CASES)


def measure(case: Case, **changes: Any) -> dict[str, Any]:
    """Compile a case; return the compiler's report for one device.

    `rows` is the number of target rows per sequence. `mask_operands` are the attention
    kernel's operands for masks, by type and shape, with their bytes. `squares` are
    arrays in memory with an element for each pair of the tree's rows.

    Args:
        changes: Engine arguments that differ from the case's.
    """
    config = case.config(**changes)
    shapes = Shapes(config, SpeculationPolicy(config.speculative))
    shape = shapes.find(NUM_SEQS, config.max_draft_tokens, 0, GREEDY)
    assert shape is not None
    mesh = describe_mesh(case.device, config)
    step = compile_step(config, mesh, shape, has_options=True)
    state, rows = step.forms[2], shape.tree.num_rows
    found = step.row(
        *("lowered_ops", "compiled_ops", "argument_bytes", "output_bytes"),
        *("temp_bytes", "peak_bytes", "code_bytes", "donated_bytes", "state_bytes"),
        *("kernels", "moves", "copied"),
    )
    return {
        "name": case.name,
        "program": shape.name,
        "nodes": shape.tree.num_nodes,
        "rows": rows,
        **found,
        "moves": hlo.largest(found["moves"], 4),
        "mask_operands": mask_operands(
            step.text,
            math.ceil(8192 / config.page_size),
            (state.target_pages, state.proposers),
        ),
        "squares": hlo.squares(step.text, rows),
        **step.row("compile_cpu_s"),
    }


def mask_operands(text: str, table_len: int, pages: Any) -> dict[str, int]:
    """Return attention's operands for masks, with their bytes.

    These are all operands other than queries, pages, page tables and lengths. `pages`
    are those of all layers, whose scales are not masks either.
    """
    known = {(NUM_SEQS, table_len), (NUM_SEQS,), (NUM_SEQS + 1,)}
    for leaf in jax.tree.leaves(pages):
        known.add(leaf.sharding.shard_shape(leaf.shape))
    found = {
        operand
        for call in hlo.kernel_operands(text, "paged_attention")
        for operand in call
        if len(hlo.shape_of(operand)) < 4 and hlo.shape_of(operand) not in known
    }
    return {operand: hlo.bytes_of(operand) for operand in sorted(found)}


def moved_in_place(device: str, kept: str) -> tuple[list[str], int, int]:
    """Compile only the move of the accepted drafts' keys and values.

    Args:
        kept: Storage type: a name of `KV_CACHE_DTYPES`.

    Returns:
        Copies of a layer's pages, bytes that are updated in place, and bytes of pages.
    """
    config = Case(device=device, kind="leaves").config(kv_cache_dtype=kept)
    assert config.speculative is not None and config.speculative.parents is not None
    tree = Tree(config.speculative.parents)
    mesh = describe_mesh(device, config)
    program, (*_, state) = describe(config, mesh)
    forms: Any = state

    def move(pages: Any, rows: Any, token_pages: Any, decode: Any, row: Any) -> Any:
        active = gather(rows, token_pages, decode, all_greedy=True)
        backend = program.backend(TARGET_MESH_AXES)
        return compact_kv(
            config.model_config, pages, tree, row, active, program.pool, backend
        )

    ints = jax.ShapeDtypeStruct((NUM_SEQS,), jnp.int32, sharding=replicated(mesh))
    given = forms.target_pages, forms.rows, forms.token_pages, ints, ints
    with aot_tpu.no_compilation_cache():
        lowered = jax.jit(move, donate_argnums=0).lower(*given)
        compiled = compile_lowered(lowered)
    copied = hlo.copied(compiled.as_text(), forms.target_pages)
    in_place = compiled.memory_analysis().alias_size_in_bytes
    return copied, in_place, hlo.local_bytes(forms.target_pages)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line per device and target; cells list all kinds."""
    columns = (
        "device", "target", "drafts", "operations given", "operations made",
        "temporaries, MB", "code, MB", "masks, bytes", "CPU-s",
    )  # fmt: skip
    lines = []
    for device, target in PLACES:
        names = [f"{device}/{target}/{kind}" for kind in KINDS]
        found = [rows[name] for name in names if name in rows]
        if not found:
            continue
        values = [
            [f"{row['lowered_ops']:,}" for row in found],
            [f"{row['compiled_ops']:,}" for row in found],
            [f"{row['temp_bytes'] / 1e6:.1f}" for row in found],
            [f"{row['code_bytes'] / 1e6:.1f}" for row in found],
            [f"{max(row['mask_operands'].values(), default=0):,}" for row in found],
            [f"{row['compile_cpu_s']:.0f}" for row in found],
        ]
        drafts = ", ".join(str(row["nodes"]) for row in found)
        lines.append((device, target, drafts, *map("; ".join, values)))
    return markdown(columns, *lines) + "\n"


if __name__ == "__main__":
    RECORD.main(
        lambda name: measure(CASES[name]),
        table,
        "Programs of draft trees.",
    )
