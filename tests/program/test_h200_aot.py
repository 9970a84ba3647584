"""What the GPU benchmark runs compiles, fits, and copies neither pages nor weights."""

import dataclasses
import json
import re

import pytest

from jaxspec.sharding import make_mesh
from tests.batteries import members
from tests.kernels import aot_gpu
from tests.program import aot_h200
from tests.program.aot_h200 import Report

RECORDED = json.loads(aot_h200.RESULTS.read_text())
# One of every kind: a minute on a core. The parts of a program repeat by layer.
LAYERS = 1, 1
PROGRAMS = (
    "plain/27b/batch 8",
    "pass/9b/batch 1/K 0",
    "round/9b-2b/K 8",
)


def report_of(row: dict) -> Report:
    return Report(**{name: row[name] for name in row if name != "fits"})


def test_all_programs_of_the_benchmark_are_recorded_and_fit():
    wanted = aot_h200.programs(mesh=make_mesh(1))
    assert [row["name"] for row in RECORDED["rows"]] == list(wanted)
    assert RECORDED["memory_fraction"] == aot_h200.full_size.MEMORY_FRACTION
    for row in RECORDED["rows"]:
        report = report_of(row)
        assert report.layers == list(wanted[report.name].layers)
        assert report.fits == row["fits"]
        # On an H100 as well, 27B beside 2B with the pages of eight sequences.
        assert all(report.fits.values())
        aot_h200.check_report(report)


@pytest.mark.parametrize(
    "change",
    [
        {"pair_bytes": 126 * 2**30},
        {"donated_bytes": 0},
        {"copied": ["copy bf16[256000,3584]"]},
        {"moves": {"copy f32[8,6,256000]": 1 << 40}},
        {"peak_bytes": 1 << 40},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_program_that_does_more_is_refused(change):
    report = report_of(RECORDED["rows"][0])
    aot_h200.check_report(report)
    with pytest.raises(AssertionError):
        aot_h200.check_report(dataclasses.replace(report, **change))


@pytest.mark.aot
@pytest.mark.skipif(aot_gpu.missing() is not None, reason=str(aot_gpu.missing()))
@pytest.mark.parametrize(
    "name", members("h200", PROGRAMS, is_example=lambda name: name == PROGRAMS[1])
)
def test_it_compiles(name):
    program = aot_h200.programs(mesh=aot_h200.gpu(), layers=LAYERS)[name]
    report, text = aot_h200.compile_program(name, program)
    print(report)
    aot_h200.check_report(report)
    # One attention per layer: the target's, and the draft's first and looped pass.
    num_passes = sum(program.layers) + sum(program.layers[1:])
    attention = re.findall(r'op_name="[^"]*/paged_attention[/"]', text)
    assert len(attention) >= num_passes
    # The vocabulary is computed, also where nobody reads the token.
    assert re.search(r"= \w+\[(?:\d+,)*256000\]", text)
