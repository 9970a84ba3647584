"""Compiles the step program at full size for devices that are not there.

`PYTHONPATH=.venv/aot python -m tests.program.aot_step` writes what the compiler says of
each place to `benchmarks/results/aot_step.json`: memory, kernels, collectives, copies.
With names of places behind it, it prints those. Nothing runs: no figure is a speed.
jax looks for its compilers when it starts, so the path must be there before.
"""

import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh
from tqdm.auto import tqdm

from jaxspec.config import ModelConfig
from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import abstract_params
from jaxspec.program.plan import PoolShape, StepShape
from jaxspec.program.propose.draft_model import DraftModel
from jaxspec.program.rows import init_rows
from jaxspec.program.state import EngineState, init_token_pages, page_forms
from jaxspec.program.step import ProgramConfig, lower_step
from jaxspec.sharding import (
    DRAFT_MESH_AXES,
    TARGET_MESH_AXES,
    make_mesh,
    replicated,
)
from jaxspec_checkpoints.gemma.published import published_config
from tests.kernels import aot_gpu, aot_tpu
from tests.program import hlo

_log = logging.getLogger(__name__)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "aot_step.json"
GIB = 2**30
PAGE_SIZE = 16
SHAPE = StepShape(num_seqs=8, num_draft_tokens=4, chunk=0)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices, how the pair lies on them, and pages that fill them.

    Attributes:
        hbm: Bytes of one chip that a program may use.
    """

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
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler says about one executable, for one chip."""

    place: str
    layers: tuple[int, int]
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int  # in use at the worst moment, beside arguments
    hbm_bytes: int  # all of it: arguments, results that are not donated, temporaries
    donated_bytes: int
    state_bytes: int
    kernels: int
    all_reduces: dict[str, int]  # by shape, as often as the program's text has it
    moves: dict[str, int]  # the largest ones in HBM, with their bytes
    copied: list[str]  # those of a weight or of a layer's pages
    compile_s: float


def describe(place: Place) -> Mesh:
    """The mesh of devices that can be compiled for and not run on."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {}
    if place.platform == "cuda":
        options["target_config"] = aot_gpu.TARGET.read_text()
        options["topology"] = place.topology
    else:
        options["topology_name"] = place.topology
        if place.devices == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
    topology = topologies.get_topology_desc(platform=place.platform, **options)
    return make_mesh(place.devices, place.draft_devices, topology.devices)


def missing(place: Place) -> str | None:
    """Why nothing can be compiled for it here, or None."""
    return aot_gpu.missing() if place.platform == "cuda" else aot_tpu.MISSING


def model(name: str, num_layers: int | None = None) -> ModelConfig:
    """The config of a published size, with fewer layers where that is enough."""
    config = published_config(name)
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return config_from_hf(config)


def pool_of(place: Place, target: ModelConfig) -> PoolShape:
    """Eight sequences, as long as the model takes them."""
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
    """Trace 9B with a 2B draft: the program, and the forms of what it is given."""
    place = PLACES[name]
    mesh = describe(place)
    target, draft = model("9b", layers[0]), model("2b", layers[1])
    pool = pool_of(place, target)
    dtype = jnp.dtype(jnp.bfloat16)
    form: Any = partial(abstract_params, dtype=dtype, mesh=mesh)
    params = form(target), form(draft, mesh_axes=DRAFT_MESH_AXES)
    forms: Any = EngineState  # of arrays that are not there
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
) -> tuple[Report, str]:
    """Compile 9B with a 2B draft, K = 4, 8 sequences; the report and the program."""
    start = time.monotonic()
    lowered, params, state = lower_pair(name, shape, layers=layers)
    with aot_tpu.no_compilation_cache():
        compiled: Any = lowered.compile()
    elapsed = time.monotonic() - start
    text = compiled.as_text()
    kept = params, state.target_pages, state.proposers
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    used += memory.output_size_in_bytes - memory.alias_size_in_bytes
    report = Report(
        place=name,
        layers=(model("9b", layers[0]).num_layers, model("2b", layers[1]).num_layers),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes - memory.argument_size_in_bytes,
        hbm_bytes=used + memory.generated_code_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        state_bytes=hlo.local_bytes(state),
        kernels=hlo.num_kernels(text),
        all_reduces=hlo.all_reduces(text),
        moves=hlo.largest(hlo.moves(text)),
        copied=hlo.copied(text, kept),
        compile_s=round(elapsed, 1),
    )
    _log.info("%s", json.dumps(asdict(report)))
    return report, text


def main(names: list[str]) -> None:
    """Compile for the places that are named, or for all and write that down."""
    rows = []
    for name in tqdm(names or PLACES, unit="place"):
        report, _ = compile_pair(name)
        rows.append(asdict(report))
    if names:
        print(json.dumps(rows, indent=2))
        return
    result = {"versions": aot_tpu.versions(), "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
