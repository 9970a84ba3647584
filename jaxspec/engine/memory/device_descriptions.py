"""Devices by name, for `plan` and `compile` where the devices are not present.

Owns the lists of devices that can be described to a compiler, or only named, and the
abstract parameters and state of an engine on them: shapes, types and placement. An
engine that starts on such devices with the same arguments loads the programs that were
compiled for the descriptions.
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

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.memory.plan import GIB
from jaxspec.engine.program_cache import Arguments
from jaxspec.engine.runner import (
    build_mesh,
    choose_dtype,
    device_forms,
    devices_of,
    has_cuda_plugin,
    pool_of,
    pool_share,
    program_of,
    proposer_params,
)
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.models.heads.weights import abstract_head
from jaxspec.models.weights import abstract_params
from jaxspec.program.rows import init_rows
from jaxspec.program.state import EngineState, init_token_pages
from jaxspec.program.step_context import ProgramConfig
from jaxspec.sharding import DRAFT_MESH_AXES, make_mesh, replicated

_TARGETS = Path(__file__).parent / "targets"
# With a TPU present, jax adds this to LIBTPU_INIT_ARGS, which is part of a program's
# digest. Adding it here gives the same digests without a TPU.
_TPU_ARGUMENT = "--xla_tpu_use_enhanced_launch_barrier=true"


@dataclass(frozen=True)
class Tpu:
    """A TPU slice of one host.

    Attributes:
        topology: libtpu's name of the slice.
        host: Chips of the host, by axis.
    """

    topology: str
    host: tuple[int, int, int]


# By kind and number of jax's devices: one for each chip, but two for each chip of a v7x
# (Ironwood), whose cores have memories of their own.
TPUS = {
    f"{kind}-{count}": Tpu(f"{kind}:{host[0]}x{host[1]}", host)
    for kind in ("v5e", "v6e")
    for count, host in ((1, (1, 1, 1)), (4, (2, 2, 1)), (8, (2, 4, 1)))
} | {
    "v7x-2": Tpu("tpu7x:1x1x1", (1, 1, 1)),
    "v7x-8": Tpu("tpu7x:2x2x1", (2, 2, 1)),
}
_DESCRIBED_GPUS = ("h100", "h200", "b200")
_GPU = re.compile(f"({'|'.join(_DESCRIBED_GPUS)})(?:-([1-8]))?")
DEVICES = (
    *TPUS,
    *_DESCRIBED_GPUS,
    *(f"{kind}-2 to {kind}-8" for kind in _DESCRIBED_GPUS),
)

# Bytes of memory of one device, as jax reports them; for GPUs, 1 GiB less than CUDA
# reports.
MEMORY_BYTES = {
    "v5e": int(15.75 * GIB),
    "v6e": int(31.25 * GIB),
    "v7x": int(94.75 * GIB),
    "t4": int(13.5 * GIB),
    "l4": 21 * GIB,
    "a100-40gb": 38 * GIB,
    "a100-80gb": 78 * GIB,
    "h100": 78 * GIB,
    "h200": 139 * GIB,
    "b200": 177 * GIB,
}
# Compute capabilities of GPUs that are too old for the kernels.
_CAPABILITIES = {"t4": "7.5"}
_TPU_KINDS = {name.partition("-")[0] for name in TPUS}
_GPU_KINDS = [kind for kind in MEMORY_BYTES if kind not in _TPU_KINDS]
_NAMED_GPU = re.compile(f"({'|'.join(_GPU_KINDS)})(?:-([1-8]))?")
NAMED_DEVICES = (*TPUS, *_GPU_KINDS, *(f"{kind}-2 to {kind}-8" for kind in _GPU_KINDS))


def check_device(name: str) -> None:
    """Reject devices for which no compiler is available.

    Raises:
        ConfigError: The name is unknown, or the devices' compiler is not installed.
    """
    if name in TPUS:
        lacks, extra = find_spec("libtpu") is None, "tpu"
        compiler = "libtpu, the compiler for TPUs,"
    elif _GPU.fullmatch(name):
        lacks = not has_cuda_plugin()
        compiler, extra = "jax's CUDA plugin, the compiler for these GPUs,", "cuda"
    else:
        hint = "Where the devices are, leave it out."
        allowed = "one of " + ", ".join(DEVICES)
        raise wrong_argument(ConfigError, "--device", allowed, name, hint)
    if lacks:
        raise ConfigError(
            f"--device {name} needs {compiler} which is not installed: pip install "
            f"'jax[{extra}]', or run this where the devices are, without --device.",
            parameter="device",
            value=name,
        )


@dataclass(frozen=True)
class NamedDevice:
    """A device that is only known by name.

    Array shardings can use it, to count bytes; nothing can be compiled for it.
    """

    id: int
    platform: str
    device_kind: str
    compute_capability: str | None = None


def named_devices(name: str) -> list[NamedDevice]:
    """Return the devices of a name: a TPU slice, or a kind of GPU and their number.

    Raises:
        ConfigError: The name is unknown.
    """
    gpu = _NAMED_GPU.fullmatch(name)
    if name not in TPUS and gpu is None:
        hint = "Where the devices are, leave it out."
        allowed = "one of " + ", ".join(NAMED_DEVICES)
        raise wrong_argument(ConfigError, "--device", allowed, name, hint)
    platform = "tpu" if gpu is None else "gpu"
    kind, count = name.split("-") if gpu is None else gpu.groups("1")
    capability = _CAPABILITIES.get(kind)
    return [NamedDevice(id_, platform, kind, capability) for id_ in range(int(count))]


def named_limit(name: str, utilization: float | None) -> int:
    """Return the bytes that jax may use of each device of a name.

    Args:
        utilization: As for `pool_share`; for GPUs only.
    """
    first = named_devices(name)[0]
    share = pool_share(utilization) if first.platform == "gpu" else 1.0
    return int(MEMORY_BYTES[first.device_kind] * share)


def named_mesh(name: str, config: EngineConfig) -> Mesh:
    """Return the mesh of a configuration on devices known by name only.

    Raises:
        ConfigError: The name is unknown, or there are too few devices.
    """
    draft = config.speculative and config.speculative.draft_tensor_parallel_size
    devices: Any = devices_of(config, named_devices(name))
    return make_mesh(config.tensor_parallel_size, draft or None, devices)


def describe_mesh(name: str | None, config: EngineConfig) -> Mesh:
    """Return the mesh of a configuration on present (None) or described (AOT) devices.

    Describing devices sets environment variables that only compilers read; the caller
    chooses jax's platforms.

    Raises:
        ConfigError: As in `check_device`, or there are too few devices.
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
        match = _GPU.fullmatch(name)
        assert match is not None
        kind, count = match.groups("1")
        target = (_TARGETS / f"{kind}.txtpb").read_text()
        platform = "cuda"
        options = dict(target_config=target, topology=f"1x1x{count}")
    topology = topologies.get_topology_desc(platform=platform, **options)
    draft = config.speculative and config.speculative.draft_tensor_parallel_size
    devices = devices_of(config, topology.devices)
    return make_mesh(config.tensor_parallel_size, draft or None, devices)


def describe(config: EngineConfig, mesh: Mesh) -> tuple[ProgramConfig, Arguments]:
    """Return the configuration of an engine's programs, and the shapes of arguments."""
    pool = pool_of(config)
    dtype = choose_dtype(config.dtype, mesh)
    options: dict[str, Any] = dict(dtype=dtype, mesh=mesh)
    target = abstract_params(config.model_config, **options)
    draft = None
    if config.draft_model_config is not None:
        options |= dict(mesh_axes=DRAFT_MESH_AXES)
        draft = abstract_params(config.draft_model_config, **options)
    elif config.head_config is not None:
        draft = abstract_head(config.head_config, **options)
    program = program_of(config, mesh)
    params = target, proposer_params(program, draft)

    def form(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh))

    rates = config.speculative and config.speculative.forced_acceptance
    forms: Any = EngineState  # of shapes in place of arrays
    state = forms(
        rows=jax.tree.map(form, init_rows(pool)),
        token_pages=form(init_token_pages(pool)),
        **device_forms(program, dtype),
        forced_acceptance=form(np.array(rates, np.float32)) if rates else None,
    )
    return program, (*params, state)
