"""Machine code for an H200 where there is none, and what it needs of the chip.

`python -m tests.kernels.aot_gpu [CASE ...]` prints one JSON line for every case: for
every kernel its grid, threads, registers, spilled and shared bytes. The CUDA plugin
compiles for a described chip; `ptxas -v` tells what a kernel needs.
"""

import contextlib
import dataclasses
import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec_kernels.paged_attention import gpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES, Case
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles

TARGET = Path(__file__).parent / "data" / "h200_target_config.txtpb"
# Of one multiprocessor; a program also takes 1 kB of shared memory for the driver.
REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 233472, 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one launch needs; `registers` is for a thread."""

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def resident(self) -> int:
        """Programs that one multiprocessor holds at once."""
        # Registers are given out in eights.
        registers = -(-self.registers // 8) * 8 * self.threads
        shared = self.shared_bytes + RESERVED_BYTES
        return min(REGISTERS // registers, SHARED_BYTES // shared, 32)


def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    if not any(find_spec(f"jax_plugins.xla_cuda{major}") for major in (12, 13)):
        return "no CUDA plugin of jax is installed"
    if shutil.which("ptxas") is None:
        return "no ptxas on the path"
    return None


@functools.cache
def mesh() -> Mesh:
    """One H200 that can be compiled for and not run on."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    )
    return Mesh(np.array(topology.devices[:1]), ("x",))


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Write nothing to jax's cache: a program for a described chip cannot be read."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def compile_for_h200(
    function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct
) -> tuple[list[Kernel], Any]:
    """Return the kernels of the program in order of launch, and its memory."""
    sharding = NamedSharding(mesh(), PartitionSpec())
    with (
        tempfile.TemporaryDirectory() as folder,
        uncached(),
        warnings.catch_warnings(),
        # jax asks this mesh, not a device, for the chip's generation.
        jax.sharding.use_abstract_mesh(mesh().abstract_mesh),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        lowered = jax.jit(function, in_shardings=sharding).lower(*shapes)
        # `.*`: from jax 0.11 on, the assembly of all kernels has to be asked for.
        compiled = lowered.compile(
            compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
        )
        kernels = _read_dump(Path(folder))
    return kernels, compiled.memory_analysis()


def _read_dump(folder: Path) -> list[Kernel]:
    needs = {}
    for source in folder.glob("*.ptx"):
        if source.stat().st_size:
            needs |= _assemble(source)
    [launches] = folder.glob("*.thunk_sequence.txt")
    kernels = []
    for line in launches.read_text().splitlines():
        found = re.search(
            r"(\S+) grid: \[(.*?)\] threads: \[(\d+), 1, 1\]"
            r"\s+shared_memory: (\d+) bytes",
            line,
        )
        # A copy, a library's call: not what these programs are made of.
        assert found is not None, f"not a kernel: {line}"
        name, grid, threads, shared = found.groups()
        registers, spilled = needs[name]
        kernels.append(
            Kernel(
                name=name,
                grid=tuple(int(size) for size in grid.split(",")),
                threads=int(threads),
                registers=registers,
                spilled_bytes=spilled,
                shared_bytes=int(shared),
            )
        )
    return kernels


def _assemble(source: Path) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of every kernel in a file."""
    command = ["ptxas", "-v", "-arch=sm_90a", source, "-o", source.with_suffix(".o")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(
        r"entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: (int(registers), int(spilled)) for name, spilled, registers in found}


def paged_attention(
    case: Case,
    *,
    dtype: str = "bfloat16",
    is_tree: bool = False,
    tiles: Tiles | None = None,
) -> tuple[list[Kernel], Any]:
    """Compile one case with the pages of all its sequences."""
    table = -(-case.context // case.page_size)
    query = (case.seqs, case.queries, case.q_heads, case.head_dim)
    pages = (case.seqs * table, case.page_size, 2 * case.kv_heads, case.head_dim)
    shapes = [
        jax.ShapeDtypeStruct(query, dtype),
        jax.ShapeDtypeStruct(pages, dtype),
        jax.ShapeDtypeStruct((case.seqs, table), jnp.int32),
        jax.ShapeDtypeStruct((case.seqs,), jnp.int32),
    ]
    attend = partial(
        gpu.paged_attention,
        scale=case.scale,
        soft_cap=case.soft_cap,
        window=case.window,
        tiles=tiles,
    )
    if is_tree:
        nodes = (case.seqs, case.queries, case.queries)
        shapes.append(jax.ShapeDtypeStruct(nodes, jnp.bool_))
        return compile_for_h200(
            lambda *arrays: attend(*arrays[:4], ancestor_mask=arrays[4]), *shapes
        )
    return compile_for_h200(partial(attend, ancestor_mask=None), *shapes)


def report(name: str, kernels: list[Kernel]) -> str:
    """One JSON line."""
    return json.dumps(
        {
            "case": name,
            "device": "H200, not run",
            "jax": jax.__version__,
            "kernels": [
                dataclasses.asdict(kernel) | {"resident": kernel.resident}
                for kernel in kernels
            ],
        }
    )


def main(names: list[str]) -> None:
    """Print a line for every case named, for every case if none is."""
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    cases = CASES | REAL_CASES
    for name in names or cases:
        print(report(name, paged_attention(cases[name])[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
