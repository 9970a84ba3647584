"""The GPU kernel compiles for an H200: nothing spills, and all shares run at once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec_kernels.paged_attention.cases import REAL_CASES
from jaxspec_kernels.paged_attention.gpu_tiles import Tiles
from tests.batteries import members
from tests.kernels import aot_gpu
from tests.kernels.aot_gpu import PROGRAMS, Program, compile_program
from tests.kernels.test_paged_attention import tiles_of

needs_compiler = pytest.mark.skipif(
    aot_gpu.missing() is not None, reason=str(aot_gpu.missing())
)
RECORDED = json.loads(aot_gpu.RESULTS.read_text())
# Equal programs once, by the first of their names.
UNEQUAL = {program: name for name, program in reversed(PROGRAMS.items())}
EXAMPLE = "9b/tp1/verify"


def test_recorded_programs_are_those_that_exist():
    assert list(RECORDED["programs"]) == list(PROGRAMS)


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
    "name",
    members("attention_gpu", UNEQUAL.values(), is_example=lambda name: name == EXAMPLE),
)
def test_program_fits_an_h200(name):
    """Nothing spills, all shares run at once, pages come in wide copies."""
    program = PROGRAMS[name]
    case, compiled = program.case, compile_program(program)
    own = [kernel for kernel in compiled.kernels if "paged" in kernel.name]
    assert not any(kernel.spilled_bytes for kernel in own)
    assert own[0].wide_copies and not own[0].narrow_loads
    assert own[0].shared_bytes <= aot_gpu.SHARED_BYTES // 2
    splits = tiles_of(case, itemsize=jnp.dtype(program.dtype).itemsize).splits
    if program.chips == 1:
        names = ["paged_attention", "paged_attention_combine"]
        assert [kernel.name for kernel in own] == names[: 1 if splits == 1 else 2]
    if splits > 1:
        assert np.prod(own[0].grid) <= 132 * own[0].resident
    if program.chips == 1 and not program.is_tree:
        assert len(own) == len(compiled.kernels)
        # The shares and their statistics, in float32: no copy of a page.
        rows = splits * case.seqs * case.queries * case.q_heads
        assert compiled.temp_bytes <= rows * (case.head_dim + 1) * 4 + 4096
    if aot_gpu.versions() == RECORDED["versions"]:  # else: RECORDED["command"]
        assert compiled.row() == RECORDED["programs"][name]


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize("kept", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    "name",
    members(
        "attention_gpu",
        [EXAMPLE, "9b/tp1/prefill", "27b/tp8/decode", "2b/tp8/decode"],
        is_example=lambda name: name == EXAMPLE,
    ),
)
def test_pages_of_eight_bits_are_read_where_they_lie(name, kept):
    compiled = compile_program(Program(case=REAL_CASES[name], kept=kept))
    of_whole_numbers = compile_program(PROGRAMS[name])
    assert compiled.temp_bytes == of_whole_numbers.temp_bytes
    own, other = compiled.kernels[0], of_whole_numbers.kernels[0]
    assert own.wide_copies and not own.narrow_loads and not own.spilled_bytes
    assert own.shared_bytes < 0.7 * other.shared_bytes


@pytest.mark.aot
@needs_compiler
@pytest.mark.battery(name="attention_gpu")
def test_chips_that_divide_the_heads_exchange_nothing():
    """The program of eight chips is that of one with an eighth of the heads."""
    divided = compile_program(PROGRAMS["9b/tp1/verify on 8 chips"])
    assert divided == compile_program(PROGRAMS["9b/tp8/verify"])


@pytest.mark.aot
@needs_compiler
@pytest.mark.battery(name="attention_gpu")
def test_tiles_beyond_shared_memory_do_not_compile(monkeypatch):
    monkeypatch.setenv("LLVM_DISABLE_SYMBOLIZATION", "1")  # of the error: minutes
    tiles = Tiles(rows=64, keys=128, splits=1, num_stages=5)
    case = REAL_CASES["9b/tp1/prefill"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit"):
        compile_program(Program(case=case, tiles=tiles))
