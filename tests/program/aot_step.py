"""Compile the step program at full size without the devices.

`PYTHONPATH=.venv/aot python -m tests.program.aot_step` compiles each place that
`benchmarks/results/aot_step.json` lacks, and adds to that file what the compiler
reports: memory, kernels, collectives, copies. Places named as arguments are compiled
again. Nothing runs: no figure is a speed. jax looks for its compilers when it starts,
so the path must be set before.
"""

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.engine import ModelConfig
from jaxspec.models.families import config_from_hf, published_config
from jaxspec.models.weights import abstract_params
from jaxspec.program.plan import PoolShape, StepShape
from jaxspec.program.propose.draft_model import DraftModel
from jaxspec.program.rows import init_rows
from jaxspec.program.state import EngineState, init_token_pages, page_forms
from jaxspec.program.step import lower_step
from jaxspec.program.step_context import ProgramConfig
from jaxspec.sharding import (
    DRAFT_MESH_AXES,
    TARGET_MESH_AXES,
    make_mesh,
    replicated,
)
from tests.kernels import aot_gpu, aot_tpu
from tests.kernels.aot_reports import compile_lowered
from tests.program import hlo
from tests.program.aot_record import Record, markdown

GIB = 2**30
PAGE_SIZE = 16
SHAPE = StepShape(num_seqs=8, num_levels=4, max_prompt_tokens=0)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices, the placement of the pair on them, and pages that fill them.

    Attributes:
        pair: Published names of the target and the draft model.
        hbm: Bytes that a program may use on one chip.
    """

    pair: tuple[str, str] = ("google/gemma-2-9b", "google/gemma-2-2b")
    platform: str
    topology: str
    devices: int
    draft_devices: int
    num_pages: int
    hbm: int


# 4,096 pages are 8 sequences of 8,192 tokens.
PLACES = {
    "v5e-8": Place(
        platform="tpu", topology="v5e:2x4", devices=8, draft_devices=8,
        num_pages=4096, hbm=int(15.75 * GIB),
    ),
    "v5e-8/draft-2": Place(
        platform="tpu", topology="v5e:2x4", devices=8, draft_devices=2,
        num_pages=4096, hbm=int(15.75 * GIB),
    ),
    "v6e-1": Place(
        platform="tpu", topology="v6e:1x1", devices=1, draft_devices=1,
        num_pages=768, hbm=int(31.25 * GIB),
    ),
    "h200": Place(
        platform="cuda", topology="1x1x1", devices=1, draft_devices=1,
        num_pages=4096, hbm=141 * 10**9,
    ),
    # The largest Gemma 3 pair that fits each chip. An H200 runs the H100's program.
    "v5e-1/gemma-3": Place(
        pair=("google/gemma-3-4b-it", "google/gemma-3-270m-it"),
        platform="tpu", topology="v5e:1x1", devices=1, draft_devices=1,
        num_pages=3072, hbm=int(15.75 * GIB),
    ),
    "v6e-1/gemma-3": Place(
        pair=("google/gemma-3-12b-it", "google/gemma-3-270m-it"),
        platform="tpu", topology="v6e:1x1", devices=1, draft_devices=1,
        num_pages=1152, hbm=int(31.25 * GIB),
    ),
    "v5e-8/gemma-3": Place(
        pair=("google/gemma-3-27b-it", "google/gemma-3-270m-it"),
        platform="tpu", topology="v5e:2x4", devices=8, draft_devices=4,
        num_pages=4096, hbm=int(15.75 * GIB),
    ),
    "h100/gemma-3": Place(
        pair=("google/gemma-3-4b-it", "google/gemma-3-270m-it"),
        platform="cuda", topology="1x1x1", devices=1, draft_devices=1,
        num_pages=4096, hbm=78 * GIB,
    ),
}  # fmt: skip


RECORD = Record("aot_step", PLACES)


def describe(place: Place) -> Mesh:
    """Return a mesh of the place's devices, for compilation only."""
    if place.platform == "cuda":
        devices = list(aot_gpu.mesh(place.devices).devices.flat)
    else:
        host = (1, 1, 1) if place.devices == 1 else None
        devices = aot_tpu.described_devices(place.topology, host)
    return make_mesh(place.devices, place.draft_devices, devices)


def models(
    place: Place, layers: tuple[int | None, int | None] = (None, None)
) -> tuple[ModelConfig, ModelConfig]:
    """Return the configs of a place's pair, with fewer layers if given."""
    target, draft = (_model(*both) for both in zip(place.pair, layers, strict=True))
    return target, draft


def _model(name: str, num_layers: int | None) -> ModelConfig:
    config = published_config(name)
    assert config is not None, name
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return config_from_hf(config)


def num_attentions(text: str) -> int:
    """Return the number of operations that belong to calls of attention."""
    return len(re.findall(r'op_name="[^"]*/paged_attention[/"]', text))


def pool_of(place: Place, target: ModelConfig) -> PoolShape:
    """A pool for eight sequences of the model's maximum length."""
    return PoolShape(
        num_rows=8,
        num_pages=place.num_pages,
        page_size=PAGE_SIZE,
        max_model_len=target.max_position_embeddings,
        vocab_size=target.vocab_size,
    )


def lower_pair(
    name: str,
    shape: StepShape = SHAPE,
    *,
    layers: tuple[int | None, int | None] = (None, None),
) -> tuple[jax.stages.Lowered, tuple[Any, Any], EngineState]:
    """Trace a place's pair: the program, and the shapes of its arguments."""
    place = PLACES[name]
    mesh = describe(place)
    target, draft = models(place, layers)
    pool = pool_of(place, target)
    dtype = jnp.dtype(jnp.bfloat16)
    form: Any = partial(abstract_params, dtype=dtype, mesh=mesh)
    params = form(target), form(draft, mesh_axes=DRAFT_MESH_AXES)
    forms: Any = EngineState  # filled with shapes instead of arrays
    rows, token_pages = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=replicated(mesh)
        ),
        jax.eval_shape(lambda: (init_rows(pool), init_token_pages(pool))),
    )
    state = forms(
        rows=rows,
        token_pages=token_pages,
        target_pages=page_forms(target, dtype, pool, mesh, TARGET_MESH_AXES),
        proposers=(page_forms(draft, dtype, pool, mesh, DRAFT_MESH_AXES),),
    )
    config = ProgramConfig(
        target=target, proposers=(DraftModel(config=draft),), pool=pool, mesh=mesh
    )
    arguments = params[0], (params[1],), state
    return lower_step(config, shape, arguments), params, state


def compile_pair(
    name: str,
    shape: StepShape = SHAPE,
    *,
    layers: tuple[int | None, int | None] = (None, None),
) -> tuple[dict[str, Any], str]:
    """Compile the step program for a place's target and draft.

    By default K = 4, with 8 sequences. Returns the figures that the compiler reports,
    as a row, and the text of the compiled program.
    """
    start = time.monotonic()
    lowered, params, state = lower_pair(name, shape, layers=layers)
    with aot_tpu.no_compilation_cache():
        compiled = compile_lowered(lowered)
    elapsed = time.monotonic() - start
    kept = params, state.target_pages, state.proposers
    facts = hlo.facts(compiled, state=state, kept=kept)
    names = (
        *("argument_bytes", "temp_bytes", "peak_bytes", "hbm_bytes", "donated_bytes"),
        *("state_bytes", "kernels", "all_reduces", "moves", "copied"),
    )
    row = {
        "name": name,
        "place": name,
        "layers": [one.num_layers for one in models(PLACES[name], layers)],
        **{one: facts[one] for one in names},
        "compile_s": round(elapsed, 1),
    }
    return row, compiled.as_text()


def make_table(rows: dict[str, dict[str, Any]]) -> str:
    """Make a table of all rows."""
    head = "place", "layers", "of a chip, GiB", "temporaries, MiB", "kernels"
    lines = [
        [name, " + ".join(map(str, row["layers"])), f"{row['hbm_bytes'] / GIB:.2f}"]
        + [f"{row['temp_bytes'] / 2**20:.0f}", str(row["kernels"])]
        for name, row in rows.items()
    ]
    return markdown(head, *lines)


if __name__ == "__main__":
    RECORD.main(lambda name: compile_pair(name)[0], make_table, str(__doc__))
