"""What an engine would run, before there are weights, and where there are no devices.

Owns the devices that can be described to a compiler, and the forms of parameters and
state: shapes, types and placement. What is compiled for these is what an engine finds
that starts on such devices with the same arguments.
"""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxspec.config import EngineConfig
from jaxspec.engine.program_cache import Arguments
from jaxspec.engine.runner import (
    build_mesh,
    choose_dtype,
    device_forms,
    pool_of,
    program_of,
    proposer_params,
)
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.models.weights import abstract_params
from jaxspec.program.rows import init_rows
from jaxspec.program.state import EngineState, init_token_pages
from jaxspec.program.step import ProgramConfig
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh, replicated

_TARGETS = Path(__file__).parent / "targets"
# What jax adds to LIBTPU_INIT_ARGS where there is a TPU: programs' names have them.
_TPU_ARGUMENT = "--xla_tpu_use_enhanced_launch_barrier=true"


@dataclass(frozen=True)
class Tpu:
    """A slice of TPUs that one host has."""

    topology: str
    host: tuple[int, int, int]


TPUS = {
    f"{kind}-{count}": Tpu(f"{kind}:{host[0]}x{host[1]}", host)
    for kind in ("v5e", "v6e")
    for count, host in ((1, (1, 1, 1)), (4, (2, 2, 1)), (8, (2, 4, 1)))
}
_GPU = re.compile(r"(h200)(?:-([1-8]))?")
DEVICES = (*TPUS, "h200", "h200-2 to h200-8")


def check_device(name: str) -> None:
    """Refuse devices that nothing here can compile for.

    Raises:
        ConfigError: They are not known, or their compiler is not installed.
    """
    if name in TPUS:
        lacks, extra = find_spec("libtpu") is None, "tpu"
        compiler = "libtpu, the compiler for TPUs,"
    elif _GPU.fullmatch(name):
        plugins = find_spec("jax_plugins")
        lacks = plugins is None or not any(
            find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13)
        )
        compiler, extra = "jax's CUDA plugin, the compiler for these GPUs,", "cuda"
    else:
        hint = "Where the devices are, leave it out."
        allowed = "one of " + ", ".join(DEVICES)
        raise wrong_argument(ConfigError, "--device", allowed, name, hint)
    if lacks:
        raise ConfigError(
            f"--device {name} needs {compiler} and it is not installed: "
            f"pip install 'jax[{extra}]', or run this where the devices are, without "
            "--device.",
            parameter="device",
            value=name,
        )


def describe_mesh(name: str | None, config: EngineConfig) -> Mesh:
    """The mesh of a configuration on devices that are here (None) or described.

    Describing sets variables of the environment that only compilers read; which of
    jax's platforms run anything is the caller's to say.

    Raises:
        ConfigError: As `check_device`, or the devices are too few.
    """
    if name is None:
        return build_mesh(config)
    check_device(name)
    options: dict[str, Any]
    if name in TPUS:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        if _TPU_ARGUMENT.partition("=")[0] not in given:
            os.environ["LIBTPU_INIT_ARGS"] = f"{given} {_TPU_ARGUMENT}"
        platform, tpu = "tpu", TPUS[name]
        options = dict(topology_name=tpu.topology, chips_per_host_bounds=tpu.host)
    else:
        found = _GPU.fullmatch(name)
        assert found is not None
        kind, count = found.groups("1")
        target = (_TARGETS / f"{kind}.txtpb").read_text()
        platform = "cuda"
        options = dict(target_config=target, topology=f"1x1x{count}")
    topology = topologies.get_topology_desc(platform=platform, **options)
    draft = config.speculative and config.speculative.draft_tensor_parallel_size
    devices = topology.devices
    return make_mesh(config.tensor_parallel_size, draft or None, devices)


def describe(config: EngineConfig, mesh: Mesh) -> tuple[ProgramConfig, Arguments]:
    """What all programs of an engine share, and the forms of what they are given."""
    pool = pool_of(config)
    dtype = choose_dtype(config.dtype, mesh)
    options: dict[str, Any] = dict(dtype=dtype, mesh=mesh)
    target = abstract_params(config.model_config, **options)
    draft = None
    if config.draft_model_config is not None:
        options |= dict(mesh_axes=DRAFT_MESH_AXES)
        draft = abstract_params(config.draft_model_config, **options)
    program = program_of(config, mesh)
    params = target, proposer_params(program, draft)

    def form(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh))

    chances = config.speculative and config.speculative.forced_acceptance
    forms: Any = EngineState  # of arrays that are not there
    state = forms(
        rows=jax.tree.map(form, init_rows(pool)),
        token_pages=form(init_token_pages(pool)),
        **device_forms(program, dtype),
        forced_acceptance=form(np.array(chances, np.float32)) if chances else None,
    )
    return program, (*params, state)
