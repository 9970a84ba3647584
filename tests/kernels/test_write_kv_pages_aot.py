"""Page writes compiled for TPU and GPU are in place: no copy, no temporary."""

import math
import re
import warnings
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec_kernels.bits import scaled_form
from jaxspec_kernels.paged_attention import gpu, tpu
from jaxspec_kernels.write_kv_pages import reference
from jaxspec_kernels.write_kv_pages import tpu as tpu_writes
from jaxspec_kernels.write_kv_pages.cases import CASES, REAL_CASES, Case
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu

INSTALL = "install the compilers with `make .venv/.installed-test`"
HAS_PLUGIN = bool(find_spec("jax_plugins")) and bool(
    find_spec("jax_plugins.xla_cuda12")
)
ON_TPU = pytest.mark.skipif(find_spec("libtpu") is None, reason=f"no libtpu; {INSTALL}")
ON_GPU = pytest.mark.skipif(not HAS_PLUGIN, reason=f"no CUDA plugin; {INSTALL}")
CHIPS = [
    pytest.param("v5e", marks=[pytest.mark.aot, ON_TPU]),
    pytest.param("v6e", marks=[pytest.mark.aot, ON_TPU]),
    pytest.param("h200", marks=[pytest.mark.aot, ON_GPU]),
]
TPU_CHIPS = CHIPS[:2]
# Both TPUs are given one kernel: of the second, all is in the battery.
SECOND = pytest.param(
    "v6e", marks=[pytest.mark.aot, ON_TPU, pytest.mark.battery(name="page_writes")]
)
EXAMPLES = [CHIPS[0], SECOND, CHIPS[2]]
PAGES = 4096  # of every pool here; no other array is nearly as large

# One case for every shape, by its first name: a chip of the 2B at TP 2 is one of the
# 9B at TP 4.
NAMES = {
    (case.tokens, case.kv_heads, case.head_dim): name
    for name, case in reversed((CASES | REAL_CASES).items())
}
LARGE_ROWS = sorted(name for shape, name in NAMES.items() if shape[2] % 128 == 0)
SMALL_ROWS = sorted(name for shape, name in NAMES.items() if shape[2] % 128)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler says about one program."""

    pool_bytes: int  # with the padding of tiles
    alias_bytes: int
    temp_bytes: int
    # Operations that make an array as large as the pool, and as large as its scales.
    whole_pools: list[list[str]]
    num_fusions: int

    @property
    def is_in_place(self) -> bool:
        """The memory of each array is written by one fusion, and by nothing else."""
        # A bitcast is another name for the same memory.
        made = [[one for one in ones if one != "bitcast"] for ones in self.whole_pools]
        # Of a TPU's scales it is a kernel's call.
        is_once = all(ones in (["fusion"], ["custom-call"]) for ones in made)
        return is_once and self.alias_bytes == self.pool_bytes


def sharding(chip: str) -> Any:
    if chip != "h200":
        return aot_tpu.sharding(chip)
    return NamedSharding(aot_gpu.mesh(), PartitionSpec())


def write_only(pool, key, value, slots):
    return reference.write_kv_pages(pool, key, value, slots)


def write_and_attend(chip: str, pool, key, value, slots, *rest):
    kernel = gpu if chip == "h200" else tpu
    writes = reference if chip == "h200" else tpu_writes
    pool = writes.write_kv_pages(pool, key, value, slots)
    query, page_table, kv_len = rest
    attended = kernel.paged_attention(
        query,
        pool,
        page_table,
        kv_len,
        scale=1 / 16,
        soft_cap=50.0,
        window=4096,
        ancestor_mask=None,
    )
    return pool, attended


@cache
def compile_for(
    chip: str,
    case: Case,
    *,
    attends: bool = False,
    is_row_major: bool = False,
    write: Any = write_only,
    kept: str = "bfloat16",
) -> Program:
    one = sharding(chip)
    whole = Format(Layout((0, 1, 2, 3)), one) if is_row_major else one
    shape = partial(jax.ShapeDtypeStruct, sharding=one)
    pool = (PAGES, case.page_size, 2 * case.kv_heads, case.head_dim)
    rows = shape((case.tokens, case.kv_heads, case.head_dim), jnp.bfloat16)
    pages: Any = jax.ShapeDtypeStruct(pool, jnp.dtype(kept), sharding=whole)
    if kept == "int8":
        pages = scaled_form(pages, "gpu" if chip == "h200" else "tpu")
    given = [
        pages,
        rows,
        rows,
        shape((case.tokens,), jnp.int32),
    ]
    results: Any = whole
    if attends:
        write, results = partial(write_and_attend, chip), (whole, one)
        queries = next(size for size in (6, 32, 1) if case.tokens % size == 0)
        seqs = case.tokens // queries
        heads = (seqs, queries, 2 * case.kv_heads, case.head_dim)
        given += [shape(heads, jnp.bfloat16)]
        given += [shape((seqs, 512), jnp.int32), shape((seqs,), jnp.int32)]
    with (
        aot_tpu.no_compilation_cache(),
        warnings.catch_warnings(),
        jax.sharding.use_abstract_mesh(one.mesh.abstract_mesh)
        if chip == "h200"
        else warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        jitted = jax.jit(write, donate_argnums=0, out_shardings=results)
        compiled = jitted.lower(*given).compile()
        return describe(compiled, jax.tree.leaves(pages), rows)


def describe(compiled: Any, arrays: list[Any], rows: Any) -> Program:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    row_bytes = rows.size * rows.dtype.itemsize
    # Tiles round up the small arguments by a few kB; whole layouts double the pool.
    plain = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
    factor = round((memory.argument_size_in_bytes - 2 * row_bytes) / plain)
    return Program(
        pool_bytes=factor * plain,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        whole_pools=[_made(entry, one.shape) for one in arrays],
        num_fusions=len(re.findall(r" fusion\(", entry)),
    )


def _made(entry: str, shape: tuple[int, ...]) -> list[str]:
    """Operations whose result is a whole array: as pages, as slots, as rows of 128."""
    pages, page_size, *rest = shape
    shapes = [shape, (pages * page_size, *rest), (pages, *rest)]
    shapes += [(math.prod(shape) // 128, 128), (math.prod(shape),)]
    sizes = "|".join(",".join(map(str, shape)) for shape in shapes)
    made = re.findall(rf"= \(?\w+\[(?:{sizes})\]\S* ([\w-]+)\(", entry)
    return [name for name in made if name != "parameter"]


def case_named(name: str) -> Case:
    return (CASES | REAL_CASES)[name]


@pytest.mark.battery(name="page_writes")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", LARGE_ROWS)
def test_write_is_in_place(name, chip):
    program = compile_for(chip, case_named(name))
    assert program.is_in_place, program
    # On TPU the joined rows are in VMEM, which does not count.
    assert program.temp_bytes == 0
    # GPU: the write itself. TPU: also the slots that are in range, and the joined rows.
    assert program.num_fusions <= (1 if chip == "h200" else 4), program


@pytest.mark.parametrize("chip", EXAMPLES)
@pytest.mark.parametrize(
    "name",
    members(
        "page_writes",
        ["9b/tp8/verify", "27b/tp1/decode"],
        is_example=lambda name: name == "9b/tp8/verify",
    ),
)
def test_the_kernel_reads_the_pool_where_it_was_written(name, chip):
    """Another layout for the kernel would be a copy of the pool."""
    program = compile_for(chip, case_named(name), attends=True)
    assert program.is_in_place, program
    assert program.temp_bytes < program.pool_bytes / 10


@pytest.mark.aot
@ON_GPU
@pytest.mark.parametrize(
    "name",
    members("page_writes", SMALL_ROWS, is_example=lambda name: name == "tiny/verify"),
)
def test_small_rows_on_gpu(name):
    program = compile_for("h200", case_named(name), attends=True)
    assert program.is_in_place, program


@pytest.mark.battery(name="page_writes")
@pytest.mark.parametrize("chip", TPU_CHIPS)
@pytest.mark.parametrize("name", SMALL_ROWS)
def test_small_rows_on_tpu_need_the_row_major_layout(name, chip):
    case = case_named(name)
    given = compile_for(chip, case, attends=True, is_row_major=True)
    assert given.is_in_place, given
    assert given.temp_bytes == 0
    # Half of every tile is padding.
    assert given.pool_bytes == 2 * PAGES * case.page_size * case.kv_heads * 2 * 64 * 2


@pytest.mark.parametrize("chip", EXAMPLES[:2])
def test_small_rows_on_tpu_are_copied_otherwise(chip):
    """Why the layout is asked for; when this fails, it need not be any more."""
    program = compile_for(chip, case_named("tiny/verify"))
    assert not program.is_in_place
    assert program.whole_pools[0].count("copy") == 3


@pytest.mark.parametrize("chip", EXAMPLES)
def test_fp8_is_written_in_place(chip):
    program = compile_for(chip, case_named("9b/tp1/verify"), kept="float8_e4m3fn")
    assert program.is_in_place, program


@pytest.mark.parametrize("chip", EXAMPLES[:2])
@pytest.mark.parametrize(
    "name",
    members(
        "page_writes",
        [name for name in LARGE_ROWS if case_named(name).kv_heads > 1],
        is_example=lambda name: name in ("9b/tp1/prefill", "2b/tp2/verify"),
    ),
)
def test_int8_and_its_scales_are_written_in_place_and_read_there(name, chip):
    """But with a single KV head, which an engine refuses.

    All scales of these pools would fit in VMEM: XLA does not bring them there.
    """
    program = compile_for(chip, case_named(name), attends=True, kept="int8")
    assert len(program.whole_pools) == 2
    assert program.is_in_place, program
    assert program.temp_bytes < program.pool_bytes / 10


@pytest.mark.aot
@ON_TPU
def test_as_many_rows_of_int8_as_a_tree_may_keep_are_moved_in_place():
    """Twelve levels of 256 sequences, in 23 pairs of layers that share their pages.

    Scales of all these rows' pages together do not fit in VMEM. For a v6e it compiles
    too, and the text cannot be read: jax knows no such asynchronous gather.
    """
    one = sharding("v5e")
    values = jax.ShapeDtypeStruct((23 * 256, 16, 32, 128), jnp.int8, sharding=one)
    pages: Any = scaled_form(values, "tpu")
    slots = jax.ShapeDtypeStruct((23 * 256 * 12,), jnp.int32, sharding=one)
    with aot_tpu.no_compilation_cache():
        moved = jax.jit(tpu_writes.copy_kv_rows, donate_argnums=0)
        compiled = moved.lower(pages, slots, slots).compile()
    program = describe(compiled, jax.tree.leaves(pages), slots)
    assert program.is_in_place, program


@pytest.mark.parametrize("chip", EXAMPLES)
def test_a_write_that_is_not_in_place_is_seen(chip):
    """The checks above can fail."""

    def rewrite(pool, key, value, slots):
        written: Any = reference.write_kv_pages(pool, key, value, slots)
        return jnp.flip(written, axis=0)

    program = compile_for(chip, case_named("9b/tp8/verify"), write=rewrite)
    assert not program.is_in_place, program
