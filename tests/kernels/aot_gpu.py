"""Compile kernels for GPUs that this machine lacks, and report their resources.

`python -m tests.kernels.aot_gpu` compiles every program in `ALL` and writes
`benchmarks/results/aot_gpu.json`; with names as arguments, it prints those. The CUDA
plugin compiles for a described chip; `ptxas -v` reports a kernel's resources. Nothing
runs: no figure here is a time.
"""

import dataclasses
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec_kernels.bits import ScaledPages
from jaxspec_kernels.grouped_matmul import gpu as grouped_matmul
from jaxspec_kernels.paged_attention import gpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES, Case
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from tests.kernels.aot_reports import compile_lowered
from tests.kernels.aot_tpu import no_compilation_cache, use_compilers, write_record

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "jaxspec" / "engine" / "memory" / "targets"
# Architectures by jax's kind of the device, up to its memory.
ARCHITECTURES = {
    "NVIDIA H100": "sm_90a",
    "NVIDIA H200": "sm_90a",
    "NVIDIA B200": "sm_100a",
}
RESULTS = ROOT / "benchmarks" / "results" / "aot_gpu.json"
# Resources of one multiprocessor; the driver takes 1 kB of shared memory per thread
# block.
REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 233472, 1024
_WIDE_COPY = re.compile(r"cp\.async\.cg\.shared\.global.*?, (?:0x10|16)\b")
_NARROW_LOAD = re.compile(r"\bld\.global\S*\.b(?:8|16)\s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """Resources of one kernel launch; `registers` is per thread."""

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_copies: int  # asynchronous 16-byte copies to shared memory
    narrow_loads: int  # instructions that load less than 4 bytes

    @property
    def resident(self) -> int:
        """Number of thread blocks that one multiprocessor runs at once."""
        # Registers are allocated in groups of eight.
        registers = -(-self.registers // 8) * 8 * self.threads
        shared = self.shared_bytes + RESERVED_BYTES
        return min(REGISTERS // registers, SHARED_BYTES // shared, 32)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The kernels in order of launch, and the bytes of their intermediate results."""

    kernels: tuple[Kernel, ...]
    temp_bytes: int

    def row(self) -> dict[str, Any]:
        """Return all values for JSON."""
        kernels = [
            dataclasses.asdict(kernel)
            | {"grid": list(kernel.grid), "resident": kernel.resident}
            for kernel in self.kernels
        ]
        return {"temp_bytes": self.temp_bytes, "kernels": kernels}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One call of paged attention, with the pages of all its sequences."""

    case: Case
    dtype: str = "bfloat16"
    kept: str | None = None  # type of the pages if not that of the queries
    is_tree: bool = False
    device: str = "h200"
    chips: int = 1  # devices over which KV heads are split
    tiles: Tiles | None = None


_VERIFY = REAL_CASES["9b/tp1/verify"]
_TREE, *_OTHER_TREES = (
    dataclasses.replace(REAL_CASES[f"{size}/tp1/verify-window"], queries=40)
    for size in ("9b", "2b", "27b")
)
PROGRAMS = {name: Program(case=case) for name, case in (CASES | REAL_CASES).items()} | {
    "9b/tp1/verify on 8 chips": Program(case=_VERIFY, chips=8),
    # Page addresses do not fit in 32 bits: the pages take 5.4 GB.
    "9b/tp1/verify, 80 sequences": Program(case=dataclasses.replace(_VERIFY, seqs=80)),
    "9b/tp1/tree of 6": Program(case=_VERIFY, is_tree=True),
    "9b/tp1/tree of 40": Program(case=_TREE, is_tree=True),
    "9b/tp1/tree of 40, float32": Program(case=_TREE, dtype="float32", is_tree=True),
    "2b/tp1/tree of 40": Program(case=_OTHER_TREES[0], is_tree=True),
    "27b/tp1/tree of 40": Program(case=_OTHER_TREES[1], is_tree=True),
    **{
        f"{name}, float32": Program(case=REAL_CASES[name], dtype="float32")
        for name in ("2b/tp1/verify", "2b/tp1/prefill", "27b/tp1/prefill")
    },
    **{
        f"{name} on a b200": Program(case=case, device="b200")
        for name, case in REAL_CASES.items()
        if "/tp1/" in name
    },
    "9b/tp1/tree of 40 on a b200": Program(case=_TREE, is_tree=True, device="b200"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One product of rows with a quantized matrix.

    Attributes:
        kind: Type of the values.
        group: Features that share a scale.
    """

    rows: int
    kind: str
    group: int
    has_minima: bool = False
    features: int = 3584
    outputs: int = 4096
    dtype: str = "bfloat16"
    device: str = "h200"


# The query matrix of 9B in the types of `--quantization int4` and of GGUF files.
_TYPES: dict[str, dict[str, Any]] = {
    "int4": dict(kind="int4", group=128),
    "AWQ": dict(kind="uint4", group=128, has_minima=True),
    "Q4_0": dict(kind="int4", group=32),
    "Q4_K": dict(kind="uint4", group=32, has_minima=True),
    "Q3_K": dict(kind="int4", group=16),
    "Q2_K": dict(kind="uint4", group=16, has_minima=True),
    "GPTQ of 8 bits": dict(kind="int8", group=128),
    "Q8_0": dict(kind="int8", group=32),
    "Q5_K": dict(kind="int8", group=32, has_minima=True),
    "Q6_K": dict(kind="int8", group=16),
}
PRODUCTS: dict[str, Product] = {
    f"9b/q_proj/{name}, {rows} rows on {device}": Product(
        rows=rows, device=device, **settings
    )
    for name, settings in _TYPES.items()
    for device in ("h200", "b200")
    for rows in (8, 512)
} | {
    f"9b/q_proj/{name}, 8 rows, float32": Product(
        rows=8, dtype="float32", **_TYPES[name]
    )
    for name in ("int4", "Q4_K")
}
ALL = (*PROGRAMS, *PRODUCTS)


def missing() -> str | None:
    """Return why this machine cannot compile for the GPU, or None."""
    lacks = None
    if not any(_has_module(f"jax_plugins.xla_cuda{major}") for major in (12, 13)):
        lacks = "no CUDA plugin of jax is installed"
    elif _ptxas() is None:
        lacks = "no ptxas is installed"
    return lacks and f"{lacks}: make .venv/.installed-test"


def _has_module(name: str) -> bool:
    """Return whether a module exists; `find_spec` raises if its package does not."""
    return find_spec(name.partition(".")[0]) is not None and find_spec(name) is not None


def _ptxas() -> Path | None:
    """Return the path of ptxas in NVIDIA's wheel, or else on PATH."""
    wheels = find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        for found in Path(folder).glob("*/bin/ptxas"):
            return found
    found = shutil.which("ptxas")
    return Path(found) if found else None


@functools.cache
def mesh(chips: int = 1, device: str = "h200") -> Mesh:
    """Return a mesh of described GPUs, for compilation only."""
    target = (TARGETS / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{chips}"
    )
    return Mesh(np.array(topology.devices), ("x",))


def device_kind(device: str) -> str:
    """Return jax's kind of a described GPU."""
    return mesh(1, device).devices.flat[0].device_kind


def compile_for_gpu(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    mesh: Mesh,
    *,
    prefix: str = "",
) -> tuple[Any, tuple[Kernel, ...], int]:
    """Compile a program; return it, its kernels, and its number of launches.

    Args:
        shapes: Shapes and shardings of the arguments.
        prefix: Return only kernels whose names have this prefix, each once. Without a
            prefix, the program must consist of kernels, which are returned in order of
            launch.

    Raises:
        jax.errors.JaxRuntimeError: The program does not fit the chip.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = _compile_into(Path(folder), function, shapes, mesh)
        kernels, launches = _read_dump(Path(folder), prefix, _architecture(mesh))
    return compiled, kernels, launches


def assembly(function: Callable[..., Any], shapes: Sequence[Any]) -> dict[str, str]:
    """Compile a program for one GPU; return the PTX of its kernels, by name."""
    with tempfile.TemporaryDirectory() as folder:
        _compile_into(Path(folder), function, shapes, mesh())
        texts = [source.read_text() for source in Path(folder).glob("*.ptx")]
    entries = [entry for text in texts for entry in text.split(".entry ")[1:]]
    return {entry.partition("(")[0]: entry for entry in entries}


def _compile_into(
    folder: Path, function: Callable[..., Any], shapes: Sequence[Any], mesh: Mesh
) -> Any:
    """Compile a program; write its kernels to a folder."""
    # From jax 0.11 on, assembly must be requested; before, a request takes 8 s per
    # program.
    wanted = {"xla_dump_emitter_re": "ptx"} if jax.__version_info__ >= (0, 11) else {}
    with (
        no_compilation_cache(),
        warnings.catch_warnings(),
        # jax reads the chip's generation from this mesh, not from a device.
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        lowered = jax.jit(function).lower(*shapes)
        return compile_lowered(lowered, wanted, dump=folder)


def _architecture(mesh: Mesh) -> str:
    kind = mesh.devices.flat[0].device_kind
    [found] = [arch for name, arch in ARCHITECTURES.items() if kind.startswith(name)]
    return found


def _read_dump(
    folder: Path, prefix: str, architecture: str
) -> tuple[tuple[Kernel, ...], int]:
    needs = {}
    for source in folder.glob("*.ptx"):
        text = source.read_text()
        if text and prefix in text:
            needs |= _assemble(source, architecture)
    [listed] = folder.glob("*.thunk_sequence.txt")
    text = listed.read_text()
    found = re.findall(
        rf"({prefix}\S+) grid: \[(.*?)\] threads: \[(\d+), 1, 1\]"
        r"\s+shared_memory: (\d+) bytes",
        text,
    )
    # Anything else would be a copy, a collective or a library call, which these
    # programs must not have.
    assert prefix or len(found) == len(text.splitlines()), f"not only kernels: {text}"
    kernels = [
        Kernel(
            name=name,
            grid=tuple(int(size) for size in grid.split(",")),
            threads=int(threads),
            shared_bytes=int(shared),
            **needs[name],
        )
        for name, grid, threads, shared in found
    ]
    if prefix:
        kernels = {kernel.name: kernel for kernel in kernels}.values()
    launches = re.findall(r": k(?:CustomKernel|Copy|Kernel)\b", text)
    return tuple(kernels), len(launches)


def _assemble(source: Path, architecture: str) -> dict[str, dict[str, int]]:
    """Assemble a file; return the resources of every kernel in it."""
    ptxas = _ptxas()
    assert ptxas is not None
    target = source.with_suffix(".o")
    command = [ptxas, "-v", f"-arch={architecture}", source, "-o", target]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(
        r"entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    _, *entries = source.read_text().split(".entry ")
    bodies = {entry.partition("(")[0]: entry for entry in entries}
    return {
        name: {
            "registers": int(registers),
            "spilled_bytes": int(spilled),
            "wide_copies": len(_WIDE_COPY.findall(bodies[name])),
            "narrow_loads": len(_NARROW_LOAD.findall(bodies[name])),
        }
        for name, spilled, registers in found
    }


@functools.cache
def compile_program(program: Program) -> Compiled:
    """Compile paged attention; equal programs compile once."""
    case, chips = program.case, mesh(program.chips, program.device)
    table = -(-case.context // case.page_size)
    query = (case.seqs, case.queries, case.q_heads, case.head_dim)
    pages = (case.seqs * table, case.page_size, 2 * case.kv_heads, case.head_dim)
    heads, whole = PartitionSpec(None, None, "x"), PartitionSpec()
    arguments = [
        (query, program.dtype, heads),
        (pages, program.kept or program.dtype, heads),
        ((case.seqs, table), jnp.int32, whole),
        ((case.seqs,), jnp.int32, whole),
    ]
    if program.is_tree:
        arguments.append(((case.seqs, case.queries, case.queries), jnp.bool_, whole))

    def attend(query, kv_pages, page_table, kv_len, mask=None):
        return gpu.paged_attention(
            query,
            kv_pages,
            page_table,
            kv_len,
            scale=case.scale,
            soft_cap=case.soft_cap,
            window=case.window,
            ancestor_mask=mask,
            tiles=program.tiles,
            device_kind=device_kind(program.device),
        )

    if program.chips > 1:
        attend = jax.shard_map(
            attend,
            mesh=chips,
            in_specs=tuple(spec for _, _, spec in arguments),
            out_specs=heads,
            check_vma=False,  # the result of a kernel has no varying-axes annotation
        )
    shapes: list[Any] = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(chips, spec))
        for shape, dtype, spec in arguments
    ]
    if program.kept == "int8":
        scales = shapes[1].update(shape=pages[:3], dtype=jnp.dtype(jnp.float32))
        shapes[1] = ScaledPages(shapes[1], scales)
    compiled, kernels, _ = compile_for_gpu(attend, shapes, chips)
    return Compiled(kernels, compiled.memory_analysis().temp_size_in_bytes)


@functools.cache
def compile_product(product: Product) -> Compiled:
    """Compile a product with a quantized matrix."""
    chips = mesh(1, product.device)
    groups = product.features // product.group
    scales = (*(2,) * product.has_minima, groups, product.outputs)
    shapes = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(chips, PartitionSpec())
        )
        for shape, dtype in (
            ((product.rows, product.features), product.dtype),
            ((groups, product.group, product.outputs), product.kind),
            (scales, "float32"),
        )
    ]
    compiled, kernels, _ = compile_for_gpu(grouped_matmul.grouped_matmul, shapes, chips)
    return Compiled(kernels, compiled.memory_analysis().temp_size_in_bytes)


def versions() -> dict[str, str]:
    """Return the versions of the tools that generate the machine code."""
    [plugin] = [
        found.version
        for found in importlib.metadata.distributions()
        if re.fullmatch(r"jax-cuda\d+-pjrt", found.name)
    ]
    log = subprocess.run([str(_ptxas()), "--version"], capture_output=True, text=True)
    [ptxas] = re.findall(r"V(\d[\d.]*)", log.stdout)
    return {"jax": jax.__version__, "plugin": plugin, "ptxas": ptxas}


def compile_named(name: str) -> Compiled:
    """Compile a program of `ALL`."""
    if name in PRODUCTS:
        return compile_product(PRODUCTS[name])
    return compile_program(PROGRAMS[name])


def main(names: list[str]) -> None:
    """Compile the named programs and print them; without names, write the file."""
    use_compilers()
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    rows = ((name, compile_named(name).row()) for name in names or ALL)
    write_record(
        Path(os.devnull) if names else RESULTS,
        "programs",
        rows,
        device="NVIDIA H200, and B200 where named; compiled for and not run",
        command="python -m tests.kernels.aot_gpu",
        versions=versions(),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
