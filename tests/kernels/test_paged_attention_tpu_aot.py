"""The TPU kernel compiles for real chips, within half of what they give a kernel."""

import itertools
import json
from dataclasses import replace

import jax
import pytest

from jaxspec_kernels.paged_attention.cases import REAL_CASES
from tests.batteries import members
from tests.kernels import aot_tpu
from tests.kernels.aot_tpu import (
    CHIPS,
    PROGRAMS,
    SCOPED_VMEM_BYTES,
    Compiled,
    Program,
)

RECORDED = json.loads(aot_tpu.RESULTS.read_text())["paged_attention"]
EXAMPLE = ("2b/tp8/verify-window", "v5e")
# Long pools of heads of 64 in the layout that XLA prefers: see the docstring of tpu.py.
COPIED = ("8-to-1/64", "tiny/verify/long")

needs_libtpu = pytest.mark.skipif(
    aot_tpu.MISSING is not None, reason=str(aot_tpu.MISSING)
)


def check_fits(result: Compiled, chip: str) -> None:
    # The other half is for longer blocks, found by tuning.
    assert result.vmem_bytes <= SCOPED_VMEM_BYTES[chip] // 2


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chip"),
    members(
        "attention_tpu",
        itertools.product(PROGRAMS, CHIPS),
        is_example=lambda both: both == EXAMPLE,
    ),
)
def test_program_compiles_and_fits(name, chip):
    result = aot_tpu.compile_attention(PROGRAMS[name], chip)
    check_fits(result, chip)
    assert not result.collectives
    assert bool(result.whole_copies) == (name in COPIED)


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chip"),
    members(
        "attention_tpu",
        itertools.product(
            ("9b/tp1/verify", "27b/tp1/prefill", "27b/tp8/decode", "2b/tp8/decode"),
            CHIPS,
        ),
        is_example=lambda both: both[0] != "27b/tp1/prefill" and both[1] == "v5e",
    ),
)
@pytest.mark.parametrize("kept", ["float8_e4m3fn", "int8"])
def test_pages_of_eight_bits_are_read_where_they_lie(name, chip, kept):
    """With their scales, but those of a single KV head, which an engine refuses."""
    case = REAL_CASES[name]
    result = aot_tpu.compile_attention(Program(case=case, kept=kept), chip)
    check_fits(result, chip)
    assert bool(result.whole_copies) == (case.kv_heads == 1)


def test_every_program_is_recorded_and_fits():
    assert list(RECORDED) == list(PROGRAMS)
    for name, chips in RECORDED.items():
        assert list(chips) == list(CHIPS)
        for chip, row in chips.items():
            check_fits(Compiled(**row), chip)
            assert bool(row["whole_copies"]) == (name in COPIED)


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "topology", "shape", "of_one_chip"),
    members(
        "attention_tpu",
        [
            ("9b/tp1/verify-window", "v5e:2x4", (1, 1, 8), "9b/tp8/verify-window"),
            # A draft whose heads are fewer than the chips: two copies of each.
            ("2b/tp1/decode-two", "v5e:2x4", (1, 2, 4), "2b/tp4/decode-two"),
        ],
        is_example=lambda one: one[2] == (1, 2, 4),
    ),
)
def test_chips_of_a_mesh_run_the_kernel_of_their_part(
    name, topology, shape, of_one_chip
):
    """Under `shard_map`, with the KV heads split: no chip needs another's."""
    split = aot_tpu.compile_split(REAL_CASES[name], topology, shape)
    assert split == aot_tpu.compile_attention(PROGRAMS[of_one_chip], "v5e")
    assert not split.collectives and not split.whole_copies


@pytest.mark.aot
@needs_libtpu
@pytest.mark.battery(name="attention_tpu")
@pytest.mark.parametrize(("chip", "block_tokens"), [("v5e", 1024), ("v6e", 1536)])
def test_block_that_does_not_fit_is_refused(chip, block_tokens):
    """And names the limit that the other tests go by."""
    program = replace(PROGRAMS["9b/tp1/decode"], block_tokens=block_tokens)
    limit = SCOPED_VMEM_BYTES[chip] // 2**20
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"limit {limit}.00M exceeded"):
        aot_tpu.compile_attention(program, chip)
