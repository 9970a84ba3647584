"""Rounds of trees move no page, and say in bits which drafts see which."""

import dataclasses
import json

import pytest

from tests.kernels import aot_gpu, aot_tpu
from tests.program import aot_trees
from tests.program.aot_record import FOLDER
from tests.program.aot_trees import CASES, Report

README = FOLDER.parent / "README.md"
RECORDED = aot_trees.RECORD.read()
EIGHT_BITS = ("chain", "int8"), ("leaves", "int8"), ("chain", "fp8")
NODES = {"chain": 5, "leaves": 10, "tree": 16}


def report_of(name: str) -> Report:
    return Report(**RECORDED[name])


def test_every_program_is_recorded():
    assert list(RECORDED) == list(CASES)
    for name in CASES:
        report = report_of(name)
        aot_trees.check_report(report)
        assert report.nodes == NODES[CASES[name].kind]
    assert aot_trees.table(RECORDED) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        {"donated_bytes": 0},
        {"copied": ["copy bf16[4096,16,16,256]"]},
        # A byte, or a number of an MXU's, for each pair of rows.
        {"who_sees_whom": {"s32[8,17,17]": 4 * 8 * 17 * 17}},
        {"squares": {"bf16[8,34,17]": 2 * 8 * 34 * 17}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_program_that_does_more_is_refused(change):
    report = report_of("v6e-1/9b/tree")
    aot_trees.check_report(report)
    with pytest.raises(AssertionError):
        aot_trees.check_report(dataclasses.replace(report, **change))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("device", "kept"),
    [
        *((device, "auto") for device in aot_trees.DEVICES),
        ("h200", "int8"),
        ("v6e-1", "int8"),
    ],
)
def test_what_stayed_is_moved_in_place(device, kept):
    skip_without_compiler(device)
    copied, in_place, page_bytes = aot_trees.moved_in_place(device, kept)
    assert copied == []
    assert in_place >= page_bytes


@pytest.mark.aot
@pytest.mark.battery(name="trees")
@pytest.mark.parametrize("name", [one for one in CASES if not one.endswith("/chain")])
def test_it_compiles(name):
    skip_without_compiler(CASES[name].device)
    report = aot_trees.measure(CASES[name])
    print(json.dumps(vars(report)))
    aot_trees.check_report(report)


@pytest.mark.aot
@pytest.mark.battery(name="trees")
@pytest.mark.parametrize(
    ("name", "kept"),
    [(f"v6e-1/9b/{kind}", kept) for kind, kept in EIGHT_BITS],
)
def test_a_whole_round_keeps_eight_bits_in_place(name, kept):
    """Pages of both models, and scales, are written and read where they lie.

    Where a layer's pages fit into on-chip memory, XLA may bring them there and back:
    that is no copy in HBM, and `hlo.copied` leaves out what goes there. These do not
    fit: the draft's take 134 MB, a v6e has 128.
    """
    case = CASES[name]
    skip_without_compiler(case.device)
    report = aot_trees.measure(case, kv_cache_dtype=kept)
    print(json.dumps(vars(report)))
    aot_trees.check_report(report)
    # In place are as many numbers as in bfloat16, in half the bytes; int8 has scales.
    wide = report_of(name).state_bytes
    assert 0.5 * wide < report.state_bytes < 0.51 * wide
    # A second layer's pages of either model would not go unnoticed as another shape.
    smallest = aot_trees.NUM_PAGES * case.config().page_size * 8 * 256
    assert max(report.moves.values()) < smallest


def skip_without_compiler(device: str) -> None:
    reason = aot_gpu.missing() if device == "h200" else aot_tpu.MISSING
    if reason is not None:
        pytest.skip(reason)
