"""Compile kernels for TPUs that this machine lacks, with libtpu from PyPI.

`python -m tests.kernels.aot_tpu` compiles every program in `PROGRAMS` for every chip in
`CHIPS` and writes `benchmarks/results/aot_tpu.json`; with names of chips, only for
these, and keeps the reports on the others. Nothing runs: no figure here is a time.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike

from jaxspec_kernels import tpu_memory
from jaxspec_kernels.bits import scaled_form
from jaxspec_kernels.paged_attention import tpu
from jaxspec_kernels.paged_attention.cases import CASES, REAL_CASES, Case
from tests.kernels.aot_reports import compile_lowered

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "aot_tpu.json"
# Topology name of one chip of each kind, and its shape; jax's kind of its devices.
CHIPS = {
    "v5e": ("v5e:1x1", (1, 1, 1)),
    "v5p": ("v5p:1x1x1", (1, 1, 1)),
    "v6e": ("v6e:1x1", (1, 1, 1)),
    "v7x": ("tpu7x:1x1x1", (1, 1, 1)),
}
KINDS = {
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "v7x": "TPU7x",
}
SCOPED_VMEM_BYTES = {
    chip: tpu_memory.SCOPED_VMEM_BYTES[kind] for chip, kind in KINDS.items()
}
MISSING = (
    None
    if importlib.util.find_spec("libtpu")
    else "libtpu is not installed: make .venv/.installed-test"
)
_COLLECTIVES = r" (?:all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's report on a program with one kernel."""

    vmem_bytes: int  # scoped VMEM: buffers, scratch and Mosaic's own
    whole_copies: int  # operations whose result is as large as a chip's pool of pages
    collectives: int
    prefetches: int = 0  # whole copies to VMEM that start before the kernel


@dataclass(frozen=True, kw_only=True)
class Program:
    """One call of `paged_attention`.

    `is_row_major` requests the pool in row-major layout instead of XLA's choice.
    """

    case: Case
    dtype: str = "bfloat16"
    kept: str | None = None  # type of the pages if not that of the queries
    has_tree: bool = False
    is_row_major: bool = False
    block_tokens: int | None = None


def _programs() -> dict[str, Program]:
    programs = {name: Program(case=case) for name, case in (CASES | REAL_CASES).items()}
    for name in ("9b/tp1/verify-window", "2b/tp8/verify"):
        case = REAL_CASES[name]
        programs[f"{name}/tree"] = Program(case=case, has_tree=True)
        programs[f"{name}/float32"] = Program(case=case, dtype="float32")
    for name in ("2b/tp1/verify-window", "27b/tp1/verify-window", "27b/tp8/verify"):
        programs[f"{name}/tree"] = Program(case=REAL_CASES[name], has_tree=True)
    base = REAL_CASES["9b/tp8/verify-window"]
    for head_dim in (64, 128, 256):
        case = replace(base, q_heads=8, kv_heads=1, head_dim=head_dim)
        programs[f"8-to-1/{head_dim}"] = Program(case=case)
    # The layout decides how a long pool of narrow heads is compiled.
    case = replace(CASES["tiny/verify"], context=8192)
    programs["tiny/verify/long"] = Program(case=case)
    programs["tiny/verify/long/row-major"] = Program(case=case, is_row_major=True)
    return programs


PROGRAMS = _programs()


def described_devices(name: str, host: tuple[int, ...] | None = None) -> list[Any]:
    """Return the chips of a topology, for compilation only."""
    # libtpu would ask a metadata server, which is missing here. Other test processes
    # may load libtpu at the same time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    settings = {} if host is None else {"chips_per_host_bounds": host}
    return topologies.get_topology_desc(
        platform="tpu", topology_name=name, **settings
    ).devices


@cache
def sharding(chip: str) -> SingleDeviceSharding:
    """Return a sharding on a described chip, for compilation only."""
    return SingleDeviceSharding(described_devices(*CHIPS[chip])[0])


@cache
def mesh(topology: str, shape: tuple[int, int, int]) -> Mesh:
    """Return a mesh of described chips with the axes of step programs."""
    devices = np.array(described_devices(topology)).reshape(shape)
    return Mesh(devices, ("data", "replica", "model"))


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Disable jax's cache in this context.

    jax stores executables for described chips, but fails to read them.
    """
    was_enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides once whether it uses the cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", was_enabled)
        compilation_cache.reset_cache()


def compile_kernel(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    *,
    pool: int,
) -> Compiled:
    """Compile a function with one Pallas kernel.

    Args:
        shapes: Shapes of the arguments. The argument with index `pool` may be
            `ScaledPages`, whose two arrays both count.

    Raises:
        jax.errors.JaxRuntimeError: the compiler refuses it.
    """
    with no_compilation_cache():
        text = compile_lowered(jax.jit(function).lower(*shapes)).as_text()
    assert text is not None
    (call,) = (line for line in text.splitlines() if '"tpu_custom_call"' in line)
    used = re.search(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"',
        call,
    )
    assert used, call
    made = []
    for leaf in jax.tree.leaves(shapes[pool]):
        dimensions = ",".join(map(str, leaf.sharding.shard_shape(leaf.shape)))
        made += re.findall(rf"= \(?\w+\[{dimensions}\](\S*) ([\w-]+)\(", text)
    # An element of a loop's tuple is another name for the same memory.
    made = [one for one in made if one[1] not in ("parameter", "get-tuple-element")]
    return Compiled(
        vmem_bytes=int(used[1]),
        whole_copies=len(made),
        # S(1) is VMEM.
        prefetches=sum(
            operation == "copy-done" and "S(1)" in layout for layout, operation in made
        ),
        collectives=len(re.findall(_COLLECTIVES, text)),
    )


def arguments(
    case: Case,
    dtype: DTypeLike,
    placements: Sequence[Sharding | Format],
    *,
    num_pages: int | None = None,
) -> list[Any]:
    """Return the shapes of query, pool, page table, lengths and, if requested, mask.

    Args:
        num_pages: Of the pool; None: a page for every entry of the page table.
    """
    table_len = -(-case.context // case.page_size)
    num_pages = num_pages or case.seqs * table_len
    pool = (num_pages, case.page_size, 2 * case.kv_heads, case.head_dim)
    made = [
        ((case.seqs, case.queries, case.q_heads, case.head_dim), dtype),
        (pool, dtype),
        ((case.seqs, table_len), jnp.int32),
        ((case.seqs,), jnp.int32),
        ((case.seqs, case.queries, case.queries), jnp.bool_),
    ]
    return [
        jax.ShapeDtypeStruct(shape, kind, sharding=placement)
        for (shape, kind), placement in zip(made, placements, strict=False)
    ]


@cache
def attend(case: Case, block_tokens: int | None = None) -> Callable[..., jax.Array]:
    """Return the call; it is one function for all chips, so that jax traces it once."""

    def attend(query, kv_pages, page_table, kv_len, mask=None):
        return tpu.paged_attention(
            query,
            kv_pages,
            page_table,
            kv_len,
            scale=case.scale,
            soft_cap=case.soft_cap,
            window=case.window,
            ancestor_mask=mask,
            block_tokens=block_tokens,
        )

    return attend


@cache
def compile_attention(program: Program, chip: str) -> Compiled:
    """Compile `paged_attention` for one chip; reuse the result of equal programs."""
    one = sharding(chip)
    pool = Format(Layout((0, 1, 2, 3)), one) if program.is_row_major else one
    placements = [one, pool, one, one, *[one] * program.has_tree]
    shapes = arguments(program.case, program.dtype, placements)
    shapes[1] = shapes[1].update(dtype=jnp.dtype(program.kept or program.dtype))
    if program.kept == "int8":
        shapes[1] = scaled_form(shapes[1], "tpu")
    return compile_kernel(attend(program.case, program.block_tokens), shapes, pool=1)


def compile_split(case: Case, topology: str, shape: tuple[int, int, int]) -> Compiled:
    """Compile a case of the whole model under `shard_map`, as step programs do.

    Sequences are split over `data`, heads over `model`.
    """
    heads = PartitionSpec("data", None, "model", None)
    pages = PartitionSpec(None, None, "model", None)
    table, lengths = PartitionSpec("data", None), PartitionSpec("data")
    specs = (heads, pages, table, lengths)
    chips = mesh(topology, shape)
    split = jax.shard_map(
        attend(case), mesh=chips, in_specs=specs, out_specs=heads, check_vma=False
    )
    placements = [NamedSharding(chips, spec) for spec in specs]
    return compile_kernel(split, arguments(case, jnp.bfloat16, placements), pool=1)


def versions() -> dict[str, str]:
    """Return the versions on which the figures depend."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def use_compilers() -> None:
    """Let this process find the compilers: see `aot` in the Makefile."""
    sys.path.append(str(Path(sys.prefix) / "aot"))
    jax.config.update("jax_platforms", "cpu")


def write_record(
    path: Path, key: str, rows: Iterable[tuple[str, Any]], **head: Any
) -> None:
    """Print and write rows, a line for each, so that diffs show which ones changed."""
    lines = []
    for name, row in rows:
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
        print(lines[-1], flush=True)
    start = f"{json.dumps(head)[:-1]}, {json.dumps(key)}: {{\n"
    path.write_text(start + ",\n".join(lines) + "\n}}\n")


def chosen_chips() -> list[str]:
    """Return the chips that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Compile kernels for TPUs.")
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=", ".join(CHIPS))
    chosen = parser.parse_args().chips or list(CHIPS)
    return [chip for chip in CHIPS if chip in chosen]


def main() -> None:
    """Compile every program for every chip, and write the compiler's reports."""
    chips = chosen_chips()
    use_compilers()
    found = json.loads(RESULTS.read_text())["paged_attention"]

    def row(name: str, program: Program) -> dict[str, Any]:
        new = {chip: asdict(compile_attention(program, chip)) for chip in chips}
        both = found.get(name, {}) | new
        return {chip: both[chip] for chip in CHIPS if chip in both}

    rows = ((name, row(name, program)) for name, program in PROGRAMS.items())
    write_record(
        RESULTS,
        "paged_attention",
        rows,
        command="python -m tests.kernels.aot_tpu",
        versions=versions(),
        scoped_vmem_bytes=SCOPED_VMEM_BYTES,
    )


if __name__ == "__main__":
    main()
