"""The full-size step is one executable that fits its chips and copies no page."""

import dataclasses
import json
import math
import re

import pytest

from jaxspec.program.plan import Features
from tests.batteries import members
from tests.program import aot_step, hlo
from tests.program.aot_step import PLACES, Report

EXAMPLE = "v5e-8/draft-2"
# Of a chip, beside arguments. Rounds need logits, hidden rows and what the compiler
# fetches ahead. Not `temp_bytes`: on TPU that counts the record of each such copy (XLA
# slices a weight into four) twice, and doubles where more weights are fetched ahead.
PEAK_BYTES = {
    "v5e-8": 3 * 2**25, "v5e-8/draft-2": 5 * 2**25, "v6e-1": 2**27, "h200": 2**27
}  # fmt: skip
# Where few weights are fetched ahead in slices, that is bounded as well.
TEMP_BYTES = {"v6e-1": 2**29, "h200": 2**29}
# A round's logits, 8 x 5 x 256,000 floats on one chip, and nothing larger.
LOGITS = 8 * 5 * 256_000 * 4
LARGEST_MOVE = {"v5e-8": 2**21, "v5e-8/draft-2": 2**23, "v6e-1": LOGITS, "h200": LOGITS}
# Of numbers: a few per row and candidate. A vocabulary is 256,000 per row.
LARGEST_COLLECTIVE = 2**13


def check_report(report: Report) -> None:
    name = report.place
    assert report.hbm_bytes < PLACES[name].hbm
    assert report.peak_bytes < PEAK_BYTES[name]
    assert report.temp_bytes < TEMP_BYTES.get(name, math.inf)
    # The state is updated in place: pages and rows, to the last byte but padding.
    assert report.donated_bytes >= report.state_bytes
    assert report.copied == []
    assert max(report.moves.values()) <= LARGEST_MOVE[name], report.moves


def test_whole_models_are_recorded_for_every_place_and_fit():
    rows = json.loads(aot_step.RESULTS.read_text())["rows"]
    assert [row["place"] for row in rows] == list(PLACES)
    whole = [aot_step.model(size).num_layers for size in ("9b", "2b")]
    for row in rows:
        assert row["layers"] == whole
        check_report(Report(**row))


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    members("step", PLACES, is_example=lambda name: name == EXAMPLE),
)
def test_9b_with_a_2b_draft_compiles_for(name):
    place = PLACES[name]
    reason = aot_step.missing(place)
    if reason is not None:
        pytest.skip(reason)
    # The parts of a program repeat by layer, so the place that is always compiled for
    # sees one of each model, and nothing that draws: a third of the time is left. The
    # test above has the whole of all four.
    layers, shape = (None, None), aot_step.SHAPE
    if name == EXAMPLE:
        layers = 1, 1
        shape = dataclasses.replace(shape, features=Features(is_greedy=True))
    report, text = aot_step.compile_pair(name, shape, layers=layers)
    print(report)
    check_report(report)
    target_layers, draft_layers = report.layers

    # One attention per layer: the target's, and the draft's first and looped pass.
    attention = re.findall(r'op_name="[^"]*/paged_attention[/"]', text)
    assert len(attention) >= target_layers + 2 * draft_layers
    if place.devices > 1:
        # One after attention and one after the feed-forward part, in every layer.
        hidden = {
            shape: count
            for shape, count in report.all_reduces.items()
            if re.search(r"^f32\[\d+,(2304|3584)\]", shape)
        }
        assert hidden == {
            "f32[40,3584]": 2 * target_layers,
            "f32[16,2304]": 2 * draft_layers,
            "f32[8,2304]": 2 * draft_layers,
        }
        embedding = {
            shape: count
            for shape, count in report.all_reduces.items()
            if re.search(r"^bf16\[\d+,(2304|3584)\]", shape)
        }
        assert embedding == {"bf16[40,3584]": 1, "bf16[16,2304]": 1, "bf16[8,2304]": 1}
        assert hlo.largest_collective(text, but=(2304, 3584)) <= LARGEST_COLLECTIVE
