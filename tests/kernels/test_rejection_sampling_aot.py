"""Compilers for TPUs and GPUs take every case, and write no array of the vocabulary."""

import itertools

import pytest

from jaxspec_kernels.rejection_sampling.cases import CASES
from tests.batteries import members
from tests.kernels import aot_gpu, aot_tpu
from tests.kernels import rejection_aot as aot

tpu_only = pytest.mark.skipif(aot_tpu.MISSING is not None, reason=str(aot_tpu.MISSING))
gpu_only = pytest.mark.skipif(
    aot_gpu.missing() is not None, reason=str(aot_gpu.missing())
)
SPLIT = [name for name, case in CASES.items() if case.shards > 1 and case.drafts]
# What brings an argument into VMEM ahead of its use; the call joins slices in place.
PREFETCHES = {"copy-done", "slice-done", "custom-call"}


@pytest.mark.aot
@tpu_only
@pytest.mark.parametrize(
    ("name", "chip"),
    members(
        "rejection",
        itertools.product(CASES, aot_tpu.CHIPS),
        is_example=lambda both: both == ("9b/tp1", "v5e"),
    ),
)
def test_first_pass_fits_a_tpu(name, chip):
    found = aot.tpu_kernel(CASES[name], chip)
    assert found.vmem_bytes < aot_tpu.SCOPED_VMEM_BYTES[chip]
    assert not found.whole_copies and not found.collectives


@pytest.mark.aot
@pytest.mark.battery(name="rejection")
@tpu_only
@pytest.mark.parametrize(
    ("name", "chip"),
    [("9b/tp1", "v5e"), ("9b/tp1", "v5p"), ("9b/tp1", "v6e"), ("27b/tp1", "v5e")],
)
def test_whole_operation_on_a_tpu_writes_tiles_only(name, chip):
    found = aot.for_tpu(CASES[name], chip)
    assert {one.split()[0] for one in found.made} <= PREFETCHES
    assert found.temp_bytes < found.logits_bytes / 3


@pytest.mark.aot
@pytest.mark.battery(name="rejection")
@tpu_only
@pytest.mark.parametrize("name", ["27b/tp2", "9b/tp4", "9b/tp8"])
def test_split_operation_on_eight_tpus_passes_few_numbers_on(name):
    case = CASES[name]
    found, sizes = aot.split_for_tpu(case)
    rows = case.seqs * (case.drafts + 1)
    assert {one.split()[0] for one in found.made} <= PREFETCHES
    assert sizes and max(sizes) == 15 * rows
    # Two searches; else single numbers per row, per draft, per device.
    few = max(rows, case.seqs * case.shards)
    assert sum(size > few for size in sizes) == 2


@pytest.mark.aot
@gpu_only
@pytest.mark.parametrize(
    "kind", members("rejection", aot.KINDS, is_example=lambda kind: kind == "greedy")
)
def test_operation_on_a_gpu_writes_one_row_per_sequence(kind):
    found = aot.for_gpu(kind)
    case = aot.GOAL
    row = case.seqs * case.columns
    assert {one for one in found.made} <= {f"fusion f32[{case.seqs},{case.columns}]"}
    # The chances of the row that is drawn from, and what is left of it.
    assert found.temp_bytes < (2.1 * row * 4 if kind != "greedy" else 10_000)
    assert found.kernels
    for kernel in found.kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.resident >= 2
    # All programs of a pass are on the chip at once.
    first = found.kernels[0]
    assert first.grid[0] * first.grid[1] <= 132 * first.resident


@pytest.mark.aot
@gpu_only
def test_greedy_batch_on_a_gpu_is_few_launches():
    assert aot.for_gpu("greedy").launches <= 7


def test_arrays_are_found_in_hlo():
    text = """%fused_add (p: f32[4,99]) -> f32[4,99] {
  ROOT %a = f32[4,99]{1,0} add(%p, %p)
}

ENTRY %main (p: f32[4,99]) -> f32[4,99] {
  %p = f32[4,99]{1,0} parameter(0)
  %f = f32[4,99]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  ROOT %g = f32[990]{0} negate(%f)
}"""
    assert aot.arrays(text, 99) == ("fusion f32[4,99]",)


def test_collectives_are_found_in_hlo():
    line = "  %a = (f32[4,16]{1,0}, s32[]) all-reduce(%b, %c), replica_groups={}"
    assert aot.collectives(line) == [64, 1]
    assert aot.collectives("  %a = f32[4,16]{1,0} add(%b, %c)") == []
