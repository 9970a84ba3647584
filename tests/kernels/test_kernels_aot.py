"""Kernels compile for real chips, fit their memory, and copy no pool of pages.

Nothing runs: compilers for TPUs and GPUs report memory, collectives and moves.
`aot_tpu`, `aot_gpu` and `rejection_aot` compile, and write the records.
"""

import functools
import itertools
import json
import math
import re
import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.kernels import work as bench_work
from benchmarks.kernels.clock import loop_of
from jaxspec_kernels.bits import scaled_form
from jaxspec_kernels.paged_attention import gpu, tpu
from jaxspec_kernels.paged_attention.cases import REAL_CASES
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles, gpu_of
from jaxspec_kernels.rejection_sampling.cases import CASES as SAMPLING_CASES
from jaxspec_kernels.rejection_sampling.cases import Case as SamplingCase
from jaxspec_kernels.write_kv_pages import cases as writes
from jaxspec_kernels.write_kv_pages import reference
from jaxspec_kernels.write_kv_pages import tpu as tpu_writes
from tests.kernels import aot_gpu, aot_tpu
from tests.kernels import rejection_aot as rejection
from tests.kernels.aot_reports import compile_lowered
from tests.kernels.aot_tpu import CHIPS, SCOPED_VMEM_BYTES, Compiled
from tests.kernels.attention_base import tiles_of
from tests.long_suites import members

for_tpu = pytest.mark.skipif(aot_tpu.MISSING is not None, reason=str(aot_tpu.MISSING))
for_gpu = pytest.mark.skipif(
    aot_gpu.missing() is not None, reason=str(aot_gpu.missing())
)

TPUS = ("v5e", "v6e", "v7x")

# Attention on a TPU.

ON_TPU = json.loads(aot_tpu.RESULTS.read_text())["paged_attention"]
# Long pools of heads of 64, which XLA stores in a layout that the kernel must copy: see
# the docstring of tpu.py.
COPIED = ("8-to-1/64", "tiny/verify/long")


def check_fits(result: Compiled, chip: str) -> None:
    # Half of the VMEM limit is left for longer blocks, which tuning may choose.
    assert result.vmem_bytes <= SCOPED_VMEM_BYTES[chip] // 2


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    ("name", "chip"),
    members(
        "attention_tpu",
        itertools.product(aot_tpu.PROGRAMS, CHIPS),
        is_example=lambda both: both == ("2b/tp8/verify-window", "v5e"),
    ),
)
def test_attention_fits_a_tpu(name, chip):
    result = aot_tpu.compile_attention(aot_tpu.PROGRAMS[name], chip)
    check_fits(result, chip)
    assert not result.collectives
    assert bool(result.whole_copies) == (name in COPIED)


def test_every_program_for_a_tpu_is_recorded_and_fits():
    assert list(ON_TPU) == list(aot_tpu.PROGRAMS)
    for name, chips in ON_TPU.items():
        assert list(chips) == list(CHIPS)
        for chip, row in chips.items():
            check_fits(Compiled(**row), chip)
            assert bool(row["whole_copies"]) == (name in COPIED)


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    ("name", "chip", "kept"),
    members(
        "attention_tpu",
        itertools.product(
            ("9b/tp1/verify", "27b/tp1/prefill", "27b/tp8/decode", "2b/tp8/decode"),
            CHIPS,
            ("float8_e4m3fn", "int8"),
        ),
        is_example=lambda one: one[:2] == ("2b/tp8/decode", "v5e"),
    ),
)
def test_attention_on_a_tpu_reads_eight_bits_in_place(name, chip, kept):
    """8-bit pages are read in place, and so are their scales.

    The exception is the scales of a single KV head, which the engine rejects.
    """
    case = REAL_CASES[name]
    result = aot_tpu.compile_attention(aot_tpu.Program(case=case, kept=kept), chip)
    check_fits(result, chip)
    assert bool(result.whole_copies) == (case.kv_heads == 1)


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    ("name", "topology", "shape", "of_one_chip"),
    members(
        "attention_tpu",
        [
            ("9b/tp1/verify-window", "v5e:2x4", (1, 1, 8), "9b/tp8/verify-window"),
            # A draft model has fewer KV heads than there are chips, so each head has
            # two copies.
            ("2b/tp1/decode-two", "v5e:2x4", (1, 2, 4), "2b/tp4/decode-two"),
        ],
        is_example=lambda one: one[2] == (1, 2, 4),
    ),
)
def test_chips_of_a_mesh_run_the_kernel_of_their_part(
    name, topology, shape, of_one_chip
):
    """Under `shard_map` with KV heads split, no chip exchanges data with another."""
    split = aot_tpu.compile_split(REAL_CASES[name], topology, shape)
    program = aot_tpu.PROGRAMS[of_one_chip]
    assert split == aot_tpu.compile_attention(program, "v5e")
    assert not split.collectives and not split.whole_copies


@pytest.mark.aot
@for_tpu
@pytest.mark.long_suite(name="attention_tpu")
@pytest.mark.parametrize(("chip", "block_tokens"), [("v5e", 1024), ("v6e", 1536)])
def test_oversized_block_does_not_compile(chip, block_tokens):
    """The compiler's error names the VMEM limit that the other tests use."""
    program = replace(aot_tpu.PROGRAMS["9b/tp1/decode"], block_tokens=block_tokens)
    limit = SCOPED_VMEM_BYTES[chip] // 2**20
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"limit {limit}.00M exceeded"):
        aot_tpu.compile_attention(program, chip)


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    "chip", members("attention_tpu", CHIPS, is_example=lambda chip: chip == "v7x")
)
def test_limit_of_vmem_is_that_of_the_compiler(chip):
    """A kernel that uses slightly less VMEM compiles; one that uses more does not."""

    def copy(given: Any, result: Any, scratch: Any) -> None:
        scratch[:8] = given[...]
        result[...] = scratch[:8] + scratch[-8:]

    def compile_copy(num_bytes: int) -> None:
        one = aot_tpu.sharding(chip)
        tile = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=one)
        call = pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct(tile.shape, tile.dtype),
            scratch_shapes=[pltpu.VMEM((num_bytes // 512, 128), jnp.float32)],
        )
        with aot_tpu.no_compilation_cache():
            compile_lowered(jax.jit(call).lower(tile))

    limit = SCOPED_VMEM_BYTES[chip]
    compile_copy(limit - 2**16)
    message = f"limit {limit // 2**20}.00M exceeded"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        compile_copy(limit + 2**18)


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    ("chip", "seqs", "pages"),
    members(
        "attention_tpu",
        # 131,072 tokens in pages of 16; the fewest rows that are padded to 8.
        [*((chip, 256, 8192) for chip in TPUS), ("v7x", 5, 39_296)],
        is_example=lambda one: one[0] == "v5e",
    ),
)
def test_page_table_larger_than_smem_compiles(chip, seqs, pages, monkeypatch):
    """In groups of sequences, without a copy of the pool; in one call it does not."""
    case = replace(REAL_CASES["9b/tp8/decode"], seqs=seqs, context=16 * pages)
    case = replace(case, page_size=16)

    def compile_attention() -> Compiled:
        one = aot_tpu.sharding(chip)
        shapes = aot_tpu.arguments(case, jnp.bfloat16, [one] * 4, num_pages=4096)

        def attend(*given: Any) -> Any:  # a new function, so that jax traces it again
            return aot_tpu.attend(case)(*given)

        return aot_tpu.compile_kernel(attend, shapes, pool=1)

    result = compile_attention()
    check_fits(result, chip)
    assert not result.whole_copies
    monkeypatch.setattr(tpu, "_max_seqs", lambda _: seqs)
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem"):
        compile_attention()


# Attention on a GPU.

ON_GPU = json.loads(aot_gpu.RESULTS.read_text())
NUM_SMS = 132  # of an H100 and an H200; a B200 has 148
# Programs without duplicates: equal programs are listed once, under the first one's
# name.
UNEQUAL = {program: name for name, program in reversed(aot_gpu.PROGRAMS.items())}


def test_every_program_for_a_gpu_is_recorded():
    assert list(ON_GPU["programs"]) == list(aot_gpu.ALL)
    for name, row in ON_GPU["programs"].items():
        assert not any(one["spilled_bytes"] for one in row["kernels"]), name


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize(
    "name",
    members(
        "attention_gpu",
        UNEQUAL.values(),
        is_example=lambda name: (
            name.startswith("9b/tp1/verify on a b200") or name == "9b/tp1/verify"
        ),
    ),
)
def test_attention_fits_a_gpu(name):
    """No spills, all splits run at once, and page loads are 16 bytes wide."""
    program = aot_gpu.PROGRAMS[name]
    case, compiled = program.case, aot_gpu.compile_program(program)
    own = [kernel for kernel in compiled.kernels if "paged" in kernel.name]
    assert not any(kernel.spilled_bytes for kernel in own)
    assert own[0].wide_copies and not own[0].narrow_loads
    assert own[0].shared_bytes <= aot_gpu.SHARED_BYTES // 2
    device_kind = aot_gpu.device_kind(program.device)
    itemsize = jnp.dtype(program.dtype).itemsize
    splits = tiles_of(case, itemsize=itemsize, device_kind=device_kind).splits
    if program.chips == 1:
        names = ["paged_attention", "paged_attention_combine"]
        assert [kernel.name for kernel in own] == names[: 1 if splits == 1 else 2]
    if splits > 1:
        num_sms = gpu_of(device_kind).num_sms
        assert np.prod(own[0].grid) <= num_sms * own[0].resident
    if program.chips == 1 and not program.is_tree:
        assert len(own) == len(compiled.kernels)
        # Temporaries hold only the float32 results and statistics of splits: no copy of
        # a page.
        rows = splits * case.seqs * case.queries * case.q_heads
        assert compiled.temp_bytes <= rows * (case.head_dim + 1) * 4 + 4096
    if aot_gpu.versions() == ON_GPU["versions"]:  # else: ON_GPU["command"]
        assert compiled.row() == ON_GPU["programs"][name]


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize(
    "name",
    members(
        "attention_gpu",
        aot_gpu.PRODUCTS,
        is_example=lambda name: name.endswith(
            ("int4, 8 rows on h200", "Q4_K, 512 rows on b200")
        ),
    ),
)
def test_quantized_product_reads_values_once_on_a_gpu(name):
    """No spills, and temporaries hold only the float32 sums of splits."""
    product = aot_gpu.PRODUCTS[name]
    compiled = aot_gpu.compile_product(product)
    [own] = [kernel for kernel in compiled.kernels if "grouped" in kernel.name]
    assert not own.spilled_bytes and not own.narrow_loads
    assert own.shared_bytes <= 99 * 1024  # an L4's limit for a thread block
    splits = own.grid[2]
    assert np.prod(own.grid) <= 3 * NUM_SMS or splits == 1
    sums = splits * product.outputs + product.features // 16
    assert compiled.temp_bytes <= 4 * product.rows * sums + 4096
    # Sums of splits take less than a widened matrix.
    widened = product.features * product.outputs * 2
    assert product.rows > 8 or compiled.temp_bytes < widened / 10
    if aot_gpu.versions() == ON_GPU["versions"]:  # else: ON_GPU["command"]
        assert compiled.row() == ON_GPU["programs"][name]


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize("kept", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    "name",
    members(
        "attention_gpu",
        ["9b/tp1/verify", "9b/tp1/prefill", "27b/tp8/decode", "2b/tp8/decode"],
        is_example=lambda name: name == "9b/tp1/verify",
    ),
)
def test_attention_on_a_gpu_reads_eight_bits_in_place(name, kept):
    program = aot_gpu.Program(case=REAL_CASES[name], kept=kept)
    compiled = aot_gpu.compile_program(program)
    wide = aot_gpu.compile_program(aot_gpu.PROGRAMS[name])
    assert compiled.temp_bytes == wide.temp_bytes
    own, other = compiled.kernels[0], wide.kernels[0]
    assert own.wide_copies and not own.narrow_loads and not own.spilled_bytes
    assert own.shared_bytes < 0.7 * other.shared_bytes


@pytest.mark.aot
@for_gpu
@pytest.mark.long_suite(name="attention_gpu")
def test_gpus_that_divide_the_heads_exchange_nothing():
    """With heads split over GPUs, each runs the program of its own heads.

    It equals the program of one GPU for a model with only these heads.
    """
    divided = aot_gpu.compile_program(aot_gpu.PROGRAMS["9b/tp1/verify on 8 chips"])
    assert divided == aot_gpu.compile_program(aot_gpu.PROGRAMS["9b/tp8/verify"])


@pytest.mark.aot
@for_gpu
@pytest.mark.long_suite(name="attention_gpu")
@pytest.mark.parametrize(
    "name", ["2b/tp1/decode", "9b/tp1/verify", "27b/tp1/prefill", "9b/tp1/tree of 40"]
)
def test_an_h100_runs_the_programs_of_an_h200(name):
    """The record has no rows for an H100, because its machine code is the same."""
    program = aot_gpu.PROGRAMS[name]
    of_h100 = aot_gpu.compile_program(replace(program, device="h100"))
    assert of_h100 == aot_gpu.compile_program(program)


@pytest.mark.aot
@for_gpu
@pytest.mark.long_suite(name="attention_gpu")
def test_tiles_larger_than_shared_memory_do_not_compile(monkeypatch):
    # Without this, LLVM would take minutes to print the error's stack with symbols.
    monkeypatch.setenv("LLVM_DISABLE_SYMBOLIZATION", "1")
    tiles = Tiles(rows=64, keys=128, splits=1, num_stages=5)
    case = REAL_CASES["9b/tp1/prefill"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit"):
        aot_gpu.compile_program(aot_gpu.Program(case=case, tiles=tiles))


@pytest.mark.aot
@for_gpu
@pytest.mark.long_suite(name="attention_gpu")
@pytest.mark.parametrize("kept", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("num_pages", "is_wide"), [(20_000, False), (200_000, True)])
def test_offsets_in_large_arrays_have_64_bits_on_a_gpu(kept, num_pages, is_wide):
    """Attention and XLA's kernels multiply pages and slots by their bytes in 64 bits.

    They do so in arrays of more than 2**32 bytes: `MemoryFacts.addressable` in
    jaxspec/engine/memory/plan.py relies on it.
    """
    sharding = NamedSharding(aot_gpu.mesh(), PartitionSpec())
    form = partial(jax.ShapeDtypeStruct, sharding=sharding)
    pages = form((num_pages, 16, 8, 256), kept)
    rows, slots = form((40, 4, 256), "bfloat16"), form((40,), "int32")
    attend = partial(
        gpu.paged_attention, scale=1, soft_cap=None, window=1024, ancestor_mask=None
    )
    of_seqs = form((8, 5, 8, 256), "bfloat16"), form((8, 512), "int32")
    row_bytes = 8 * 256 * pages.dtype.itemsize
    for function, shapes, unit_bytes, num_kernels in (
        (
            attend,
            (of_seqs[0], pages, of_seqs[1], form((8,), "int32")),
            16 * row_bytes,
            1,
        ),
        (reference.write_kv_pages, (pages, rows, rows, slots), row_bytes, 1),
        (reference.copy_kv_rows, (pages, slots, slots), row_bytes, 2),
    ):
        found = aot_gpu.assembly(function, shapes)
        product = rf"mul\.wide\.u32\s+%rd\d+, %r\d+, {unit_bytes};"
        wide = [name for name, text in found.items() if re.search(product, text)]
        assert len(wide) == (num_kernels if is_wide else 0), (wide, found.keys())


# Page writes, on TPUs and GPUs.

CHIP_MARKS = {"v5e": for_tpu, "v6e": for_tpu, "v7x": for_tpu, "h200": for_gpu}
PAGES = 4096  # pages per pool: no other array is nearly as large
WRITES = writes.CASES | writes.REAL_CASES
# Cases without duplicates: cases of one shape are listed once, under the first one's
# name. A chip of the 2B at TP 2 has the shape of one of the 9B at TP 4.
NAMES = {
    (case.tokens, case.kv_heads, case.head_dim): name
    for name, case in reversed(WRITES.items())
}
LARGE_ROWS = sorted(name for shape, name in NAMES.items() if shape[2] % 128 == 0)
SMALL_ROWS = sorted(name for shape, name in NAMES.items() if shape[2] % 128)


def chips(*names: str, in_suite: tuple[str, ...] = ("v6e", "v7x")) -> list[Any]:
    """Return parameters for these chips; those in `in_suite` are in the long suite.

    All TPUs get the same kernel, so `make test` compiles only for the first.
    """
    suite = [pytest.mark.long_suite(name="page_writes")]
    return [
        pytest.param(
            name,
            marks=[pytest.mark.aot, CHIP_MARKS[name], *suite * (name in in_suite)],
        )
        for name in names
    ]


ALL_CHIPS = (*TPUS, "h200")
BOTH_TPUS = ("v5e", "v6e")  # of a v7x, jax cannot parse programs of small rows


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the compiler reports about one program that writes pages."""

    pool_bytes: int  # bytes, with the padding of tiles
    alias_bytes: int
    temp_bytes: int
    # For the pool's values and for its scales: operations whose result is as large as
    # the array.
    whole_pools: list[list[str]]
    num_fusions: int

    @property
    def is_in_place(self) -> bool:
        """Whether the memory of each array is written by one operation and no other."""
        # A bitcast is another name for the same memory.
        made = [[one for one in ones if one != "bitcast"] for ones in self.whole_pools]
        # A fusion writes the array. On a TPU, a kernel's call writes scales.
        is_once = all(ones in (["fusion"], ["custom-call"]) for ones in made)
        return is_once and self.alias_bytes == self.pool_bytes


def write_only(pool, key, value, slots):
    return reference.write_kv_pages(pool, key, value, slots)


def write_and_attend(chip: str, pool, key, value, slots, *rest):
    kernel = gpu if chip == "h200" else tpu
    pool = (reference if chip == "h200" else tpu_writes).write_kv_pages(
        pool, key, value, slots
    )
    query, page_table, kv_len = rest
    settings: Any = dict(scale=1 / 16, soft_cap=50.0, window=4096, ancestor_mask=None)
    return pool, kernel.paged_attention(query, pool, page_table, kv_len, **settings)


@cache
def compile_write(
    chip: str,
    name: str,
    *,
    attends: bool = False,
    is_row_major: bool = False,
    write: Any = write_only,
    kept: str = "bfloat16",
) -> Written:
    case = WRITES[name]
    is_gpu = chip == "h200"
    one: Any = aot_tpu.sharding(chip) if not is_gpu else None
    if is_gpu:
        one = NamedSharding(aot_gpu.mesh(), PartitionSpec())
    whole = Format(Layout((0, 1, 2, 3)), one) if is_row_major else one
    shape = partial(jax.ShapeDtypeStruct, sharding=one)
    pool = (PAGES, case.page_size, 2 * case.kv_heads, case.head_dim)
    rows = shape((case.tokens, case.kv_heads, case.head_dim), jnp.bfloat16)
    pages: Any = jax.ShapeDtypeStruct(pool, jnp.dtype(kept), sharding=whole)
    if kept == "int8":
        pages = scaled_form(pages, "gpu" if is_gpu else "tpu")
    given = [pages, rows, rows, shape((case.tokens,), jnp.int32)]
    results: Any = whole
    if attends:
        write, results = partial(write_and_attend, chip), (whole, one)
        queries = next(size for size in (6, 32, 1) if case.tokens % size == 0)
        seqs = case.tokens // queries
        heads = (seqs, queries, 2 * case.kv_heads, case.head_dim)
        given += [shape(heads, jnp.bfloat16)]
        given += [shape((seqs, 512), jnp.int32), shape((seqs,), jnp.int32)]
    abstract = one.mesh.abstract_mesh if is_gpu else jax.sharding.get_abstract_mesh()
    with (
        aot_tpu.no_compilation_cache(),
        warnings.catch_warnings(),
        jax.sharding.use_abstract_mesh(abstract),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        jitted = jax.jit(write, donate_argnums=0, out_shardings=results)
        compiled = compile_lowered(jitted.lower(*given))
        return describe(compiled, jax.tree.leaves(pages), rows)


def describe(compiled: Any, arrays: list[Any], rows: Any) -> Written:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    entry = text[text.index("\nENTRY") :]
    row_bytes = rows.size * rows.dtype.itemsize
    # The padding of tiles adds a few kB to the small arguments. A second layout of a
    # pool would double its memory.
    plain = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
    factor = round((memory.argument_size_in_bytes - 2 * row_bytes) / plain)
    return Written(
        pool_bytes=factor * plain,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        whole_pools=[_made(entry, one.shape) for one in arrays],
        num_fusions=len(re.findall(r" fusion\(", entry)),
    )


def _made(entry: str, shape: tuple[int, ...]) -> list[str]:
    """Return operations whose result is a whole pool, in any of its shapes."""
    pages, page_size, *rest = shape
    shapes = [shape, (pages * page_size, *rest), (pages, *rest)]
    shapes += [(math.prod(shape) // 128, 128), (math.prod(shape),)]
    sizes = "|".join(",".join(map(str, shape)) for shape in shapes)
    made = re.findall(rf"= \(?\w+\[(?:{sizes})\]\S* ([\w-]+)\(", entry)
    return [name for name in made if name != "parameter"]


@pytest.mark.long_suite(name="page_writes")
@pytest.mark.parametrize("chip", chips(*ALL_CHIPS, in_suite=()))
@pytest.mark.parametrize("name", LARGE_ROWS)
def test_write_is_in_place(name, chip):
    program = compile_write(chip, name)
    assert program.is_in_place, program
    # On a TPU the joined keys and values are in VMEM, which `temp_bytes` does not
    # count.
    assert program.temp_bytes == 0
    # On a GPU the write is one fusion. A TPU also has fusions for the slots that are in
    # range and for the joined rows.
    assert program.num_fusions <= (1 if chip == "h200" else 4), program


@pytest.mark.parametrize("chip", chips(*ALL_CHIPS))
@pytest.mark.parametrize(
    "name",
    members(
        "page_writes",
        ["9b/tp8/verify", "27b/tp1/decode"],
        is_example=lambda name: name == "9b/tp8/verify",
    ),
)
def test_the_kernel_reads_the_pool_where_it_was_written(name, chip):
    """The kernel reads the layout that is written; another would need a copy."""
    program = compile_write(chip, name, attends=True)
    assert program.is_in_place, program
    assert program.temp_bytes < program.pool_bytes / 10


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize(
    "name",
    members("page_writes", SMALL_ROWS, is_example=lambda name: name == "tiny/verify"),
)
def test_small_rows_are_written_in_place_on_gpu(name):
    program = compile_write("h200", name, attends=True)
    assert program.is_in_place, program


@pytest.mark.long_suite(name="page_writes")
@pytest.mark.parametrize("chip", chips(*BOTH_TPUS, in_suite=()))
@pytest.mark.parametrize("name", SMALL_ROWS)
def test_small_rows_on_tpu_need_the_row_major_layout(name, chip):
    case, given = (
        WRITES[name],
        compile_write(chip, name, attends=True, is_row_major=True),
    )
    assert given.is_in_place, given
    assert given.temp_bytes == 0
    # Half of every tile is padding.
    assert given.pool_bytes == 2 * PAGES * case.page_size * case.kv_heads * 2 * 64 * 2


@pytest.mark.parametrize("chip", chips(*BOTH_TPUS))
def test_small_rows_on_tpu_are_copied_otherwise(chip):
    """In XLA's own layout, small rows are copied on a TPU, so engines request another.

    If this test fails, engines need not request a layout.
    """
    program = compile_write(chip, "tiny/verify")
    assert not program.is_in_place
    assert program.whole_pools[0].count("copy") == 3


@pytest.mark.parametrize("chip", chips(*ALL_CHIPS))
def test_fp8_is_written_in_place(chip):
    program = compile_write(chip, "9b/tp1/verify", kept="float8_e4m3fn")
    assert program.is_in_place, program


@pytest.mark.parametrize("chip", chips(*TPUS))
@pytest.mark.parametrize(
    "name",
    members(
        "page_writes",
        [name for name in LARGE_ROWS if WRITES[name].kv_heads > 1],
        is_example=lambda name: name == "2b/tp2/verify",
    ),
)
def test_int8_and_its_scales_are_written_in_place_and_read_there(name, chip):
    """Except with a single KV head, which the engine rejects.

    All scales of these pools would fit in VMEM, but XLA does not copy them there.
    """
    program = compile_write(chip, name, attends=True, kept="int8")
    assert len(program.whole_pools) == 2
    assert program.is_in_place, program
    assert program.temp_bytes < program.pool_bytes / 10


@pytest.mark.aot
@for_tpu
def test_int8_rows_of_an_accepted_path_are_moved_in_place():
    """Twelve levels of 256 sequences, in 23 pairs of layers that share their pages.

    Scales of all these rows' pages together do not fit in VMEM. For a v6e it compiles
    too, and the text cannot be read: jax knows no such asynchronous gather.
    """
    one = aot_tpu.sharding("v5e")
    values = jax.ShapeDtypeStruct((23 * 256, 16, 32, 128), jnp.int8, sharding=one)
    pages: Any = scaled_form(values, "tpu")
    slots = jax.ShapeDtypeStruct((23 * 256 * 12,), jnp.int32, sharding=one)
    with aot_tpu.no_compilation_cache():
        moved = jax.jit(tpu_writes.copy_kv_rows, donate_argnums=0)
        compiled = compile_lowered(moved.lower(pages, slots, slots))
    program = describe(compiled, jax.tree.leaves(pages), slots)
    assert program.is_in_place, program


@pytest.mark.parametrize("chip", chips(*ALL_CHIPS))
def test_write_that_is_not_in_place_is_detected(chip):
    """A program that copies the pool fails the checks above."""

    def rewrite(pool, key, value, slots):
        written: Any = reference.write_kv_pages(pool, key, value, slots)
        return jnp.flip(written, axis=0)

    program = compile_write(chip, "9b/tp8/verify", write=rewrite)
    assert not program.is_in_place, program


# Rejection sampling, on TPUs and GPUs.

# Operations that copy an argument to VMEM before it is used. The custom call joins
# slices there.
PREFETCHES = {"copy-done", "slice-done", "custom-call"}


@pytest.mark.aot
@for_tpu
@pytest.mark.parametrize(
    ("name", "chip"),
    members(
        "rejection",
        itertools.product(SAMPLING_CASES, CHIPS),
        is_example=lambda both: both == ("9b/tp1", "v5e"),
    ),
)
def test_first_pass_of_sampling_fits_a_tpu(name, chip):
    """A copy of all logits to VMEM is allowed: the kernel reads each of them once."""
    found = rejection.tpu_kernel(SAMPLING_CASES[name], chip)
    assert found.vmem_bytes < SCOPED_VMEM_BYTES[chip]
    assert found.whole_copies == found.prefetches <= 1
    assert not found.collectives


@pytest.mark.aot
@pytest.mark.long_suite(name="rejection")
@for_tpu
@pytest.mark.parametrize(
    ("name", "chip"),
    [("9b/tp1", "v5e"), ("9b/tp1", "v5p"), ("9b/tp1", "v6e"), ("9b/tp1", "v7x")]
    + [("27b/tp1", "v5e")],
)
def test_sampling_on_a_tpu_writes_tiles_only(name, chip):
    found = rejection.for_tpu(SAMPLING_CASES[name], chip)
    assert {one.split()[0] for one in found.made} <= PREFETCHES
    assert found.temp_bytes < found.logits_bytes / 3


@pytest.mark.aot
@pytest.mark.long_suite(name="rejection")
@for_tpu
@pytest.mark.parametrize("name", ["27b/tp2", "9b/tp4", "9b/tp8"])
def test_sampling_on_eight_tpus_exchanges_few_numbers(name):
    case = SAMPLING_CASES[name]
    found, sizes = rejection.split_for_tpu(case)
    rows = case.seqs * (case.drafts + 1)
    assert {one.split()[0] for one in found.made} <= PREFETCHES
    assert sizes and max(sizes) == 15 * rows
    # Two collectives are of searches; the others have single numbers per row, draft or
    # device.
    few = max(rows, case.seqs * case.shards)
    assert sum(size > few for size in sizes) == 2


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize(
    ("kind", "device"),
    members(
        "rejection",
        itertools.product(rejection.KINDS, rejection.GPUS),
        is_example=lambda both: both == ("greedy", "h200"),
    ),
)
def test_sampling_on_a_gpu_writes_one_row_per_sequence(kind, device):
    found = rejection.for_gpu(kind, device=device)
    case = rejection.GOAL
    row = case.seqs * case.columns
    assert set(found.made) <= {f"fusion f32[{case.seqs},{case.columns}]"}
    # Temporaries hold the probabilities of the row from which a token is drawn, and the
    # residual.
    assert found.temp_bytes < (2.1 * row * 4 if kind != "greedy" else 10_000)
    assert kind != "greedy" or found.launches <= 7
    assert found.kernels
    for kernel in found.kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.resident >= 2
    # All programs of a pass are on the chip at once.
    first = found.kernels[0]
    assert first.grid[0] * first.grid[1] <= NUM_SMS * first.resident


def test_arrays_and_collectives_are_found_in_hlo():
    text = """%fused_add (p: f32[4,99]) -> f32[4,99] {
  ROOT %a = f32[4,99]{1,0} add(%p, %p)
}

ENTRY %main (p: f32[4,99]) -> f32[4,99] {
  %p = f32[4,99]{1,0} parameter(0)
  %f = f32[4,99]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  ROOT %g = f32[990]{0} negate(%f)
}"""
    assert rejection.arrays(text, 99) == ("fusion f32[4,99]",)
    line = "  %a = (f32[4,16]{1,0}, s32[]) all-reduce(%b, %c), replica_groups={}"
    assert rejection.collectives(line) == [64, 1]
    assert rejection.collectives("  %a = f32[4,16]{1,0} add(%b, %c)") == []
    line = "  ROOT %g = f32[8,4]{1,0} all-gather(%b)"
    assert rejection.collectives(line) == [32]


@pytest.mark.aot
@for_gpu
@pytest.mark.parametrize(
    "controls",
    members(
        "kernel_benchmark",
        bench_work.CONTROLS,
        is_example=lambda name: name == "greedy",
    ),
)
def test_benchmark_reads_logits_in_every_call_on_a_gpu(controls):
    """Otherwise XLA could read the logits once and reuse them in all calls."""
    case = SamplingCase(seqs=1, drafts=5, vocab_size=32_768, columns=32_768)
    one = NamedSharding(aot_gpu.mesh(), PartitionSpec())
    work = bench_work.sampling(case, controls, "float32", logit_bytes=2 * 6 * 4 * 32768)
    assert len(work.turns) == 2
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        (work.carry, *work.turns),
    )
    run = functools.partial(work.run, implementation="reference")
    loop = loop_of(work.step(run), 2)
    with (
        aot_tpu.no_compilation_cache(),
        jax.sharding.use_abstract_mesh(one.mesh.abstract_mesh),
    ):
        lowered = jax.jit(loop, donate_argnums=0).lower(*shapes)
        text = compile_lowered(lowered).as_text()
    assert text is not None
    entry = text[text.index("\nENTRY") :].splitlines()[2:]
    names = "parameter|tuple|get-tuple-element|bitcast|while"
    made = [line for line in entry if not re.search(rf" ({names})\(", line)]
    assert any(" while(" in line for line in entry)
    reads = [line for line in made if re.search(r"\[[0-9,]*32768\]", line)]
    assert not reads
