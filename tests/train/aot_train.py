"""Compile the training of heads for 9B on eight TPUs, without the devices.

`PYTHONPATH=.venv/aot python -m tests.train.aot_train` writes the compiler's reports to
`benchmarks/results/aot_train.json`: memory of one chip and collectives, of the pass
that computes the target's states and of the training step. Nothing runs: no figure is a
speed.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.models.families import config_from_hf
from jaxspec.models.heads.weights import abstract_head
from jaxspec.models.trimmed import TOKEN_IDS
from jaxspec.models.weights import abstract_params
from jaxspec.sharding import TARGET_MESH_AXES, replicated
from jaxspec.train.__main__ import make_parser
from jaxspec.train.methods import FLOAT32
from jaxspec.train.run import make_method
from jaxspec.train.start import STREAM_SCALE
from jaxspec.train.target import Target, target_states
from jaxspec.train.trainer import Rows, Schedule, compare_passes, programs_of
from jaxspec_checkpoints.gemma.published import published_config
from tests.kernels import aot_tpu
from tests.program import hlo
from tests.program.aot_record import FOLDER, Record, markdown

TOPOLOGY, NUM_CHIPS = "v5e:2x4", 8
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Programs to compile, by the command line's options.

    Attributes:
        tensor_parallel_size: Chips that share a copy of target and head.
        rows: Rows of `length` tokens in a step.
        layers: Layers of the target to compile; None for all.
        heads: Number of Medusa heads; None for the default.
    """

    method: str
    tensor_parallel_size: int
    rows: int = 8
    length: int = 512
    layers: int | None = None
    heads: int | None = None

    @property
    def name(self) -> str:
        parts = [self.method, f"tensor parallel {self.tensor_parallel_size}"]
        if self.layers is not None:
            parts.append(f"layers {self.layers}")
        if self.heads is not None:
            parts.append(f"heads {self.heads}")
        return "/".join(parts)

    @property
    def options(self) -> argparse.Namespace:
        """Options as the trainer's command line parses them."""
        words = [self.method, "--target", "9b", "--data", "prompts", "--out", "out"]
        words += ["--rows", str(self.rows), "--length", str(self.length)]
        words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.heads is not None:
            words += ["--heads", str(self.heads)]
        return make_parser().parse_args(words)


# The long suite compiles only the first two, because a whole model takes minutes.
_CELLS = [
    Cell(
        method="medusa",
        tensor_parallel_size=4,
        rows=2,
        length=128,
        layers=2,
        heads=1,
    ),
    Cell(method="eagle3", tensor_parallel_size=4, layers=6),
    Cell(method="eagle3", tensor_parallel_size=4),
    Cell(method="eagle3", tensor_parallel_size=8),
    Cell(method="medusa", tensor_parallel_size=8),
]
CELLS = {cell.name: cell for cell in _CELLS}
EXAMPLE, SHORT = (cell.name for cell in _CELLS[:2])
RECORD = Record("aot_train", CELLS, package="tests.train")


def describe(cell: Cell) -> Target:
    """Return 9B on the chips: the shapes of its weights, and their placement."""
    content = published_config("9b")
    if cell.layers is not None:
        content["num_hidden_layers"] = cell.layers
    config = config_from_hf(content)
    parts = cell.tensor_parallel_size
    mesh = aot_tpu.mesh(TOPOLOGY, (NUM_CHIPS // parts, 1, parts))
    return Target(
        name="9b",
        folder=FOLDER,
        config=config,
        params=abstract_params(config, dtype=DTYPE, mesh=mesh),
        mesh=mesh,
        dtype=DTYPE,
    )


def forms_of(state: TrainState, params: Any, target: Target) -> TrainState:
    """Return the shapes of a state, with the placement that the trainer gives it."""
    whole = replicated(target.mesh)

    def place(form: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)

    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    return state.replace(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        params=params,
        opt_state=optax.tree_utils.tree_map_params(
            state.tx,
            place,
            state.opt_state,
            placed,
            transform_non_params=partial(place, sharding=whole),
        ),
    )


def measure(name: str) -> dict[str, Any]:
    """Compile both programs; return the compiler's report for one chip."""
    cell = CELLS[name]
    target, options = describe(cell), cell.options
    method: Any = make_method(options, target.config, FOLDER)
    by_row = NamedSharding(target.mesh, PartitionSpec("data"))

    def rows_of(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((cell.rows, *shape), dtype, sharding=by_row)

    tokens = rows_of(cell.length)
    reader = jax.jit(
        lambda params, tokens: target_states(target, params, tokens, method.layers),
        out_shardings=by_row,
    )
    states = jax.tree.map(
        lambda form: rows_of(*form.shape[1:], dtype=form.dtype),
        jax.eval_shape(reader, target.params, tokens),
    )
    schedule, fixed = Schedule(rows=cell.rows), {}
    params = abstract_head(
        method.config, dtype=FLOAT32, mesh=target.mesh, mesh_axes=TARGET_MESH_AXES
    )
    if params.pop(TOKEN_IDS, None) is not None:
        fixed[TOKEN_IDS] = np.arange(method.config.draft_vocab_size, dtype=np.int32)
    if method.layers:
        shape = len(method.layers), target.config.hidden_size
        fixed[STREAM_SCALE] = np.ones(shape, np.float32)
    create = partial(
        TrainState.create, apply_fn=compare_passes, tx=schedule.optimizer()
    )
    state = forms_of(
        jax.eval_shape(lambda params: create(params=params), params), params, target
    )
    update, _ = programs_of(method, target.config, fixed, schedule)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(update, donate_argnums=0, out_shardings=(placed, None))
    batch = Rows(tokens=tokens, sizes=rows_of(), starts=rows_of())
    row: dict[str, Any] = dict(
        name=name,
        topology=TOPOLOGY,
        rows=cell.rows,
        length=cell.length,
        target_bytes=hlo.local_bytes(target.params),
        state_bytes=hlo.local_bytes(state),
        states_bytes=hlo.local_bytes(states),
    )
    programs = {
        "states": (reader, (target.params, tokens)),
        "step": (step, (state, target.shared, batch, states)),
    }
    with jax.numpy_dtype_promotion("standard"):  # for optax
        for program, (function, given) in programs.items():
            row[program] = compile_one(function, given)
    return row


def compile_one(function: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """Compile one program; return the compiler's report."""
    start = time.process_time()
    lowered = function.lower(*given)
    with aot_tpu.no_compilation_cache():
        compiled = lowered.compile()
    elapsed, facts = time.process_time() - start, hlo.facts(compiled)
    names = "executables", "argument_bytes", "temp_bytes", "donated_bytes", "hbm_bytes"
    row = {name: facts[name] for name in (*names, "collectives")}
    return row | dict(compile_cpu_s=round(elapsed, 1))


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows, in GiB of one chip."""
    head = (
        "training", "target", "head and moments", "states", "temporaries of the pass",
        "of the step", "most in use",
    )  # fmt: skip
    lines = []
    for name, row in rows.items():
        sizes = [row[part] for part in ("target_bytes", "state_bytes", "states_bytes")]
        sizes += [row[program]["temp_bytes"] for program in ("states", "step")]
        lines.append([name, *(f"{size / 2**30:.2f}" for size in (*sizes, peak(row)))])
    return markdown(head, *lines)


def peak(row: dict[str, Any]) -> int:
    """Peak bytes of a chip: all arrays, and the larger program's temporaries.

    The training step uses only the target's embedding; the pass uses no head.
    """
    held = row["target_bytes"] + row["state_bytes"] + row["states_bytes"]
    return held + max(row[name]["temp_bytes"] for name in ("states", "step"))


def main() -> None:
    RECORD.main(measure, make_table, str(__doc__))


if __name__ == "__main__":
    main()
