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
    "v5e-8": 3 * 2**25, "v5e-8/draft-2": 5 * 2**25, "v6e-1": 2**27, "h200": 2**27,
    "v5e-1/gemma-3": 2**27, "v6e-1/gemma-3": 2**27, "v5e-8/gemma-3": 2**27,
    "h100/gemma-3": 2**27,
}  # fmt: skip
# Where few weights are fetched ahead in slices, that is bounded as well.
TEMP_BYTES = {"v6e-1": 2**29, "h200": 2**29, "h100/gemma-3": 2**29}
# A round's logits, 8 x 5 x 256,000 floats on one chip, and nothing larger.
LOGITS = 8 * 5 * 256_000 * 4
LARGEST_MOVE = {
    "v5e-8": 2**21, "v5e-8/draft-2": 2**23, "v6e-1": LOGITS, "h200": LOGITS,
    "v5e-1/gemma-3": 2**21, "v6e-1/gemma-3": LOGITS, "v5e-8/gemma-3": 2**23,
    "h100/gemma-3": 8 * 5 * 262_144 * 4,
}  # fmt: skip
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
    for row in rows:
        whole = aot_step.models(PLACES[row["place"]])
        assert row["layers"] == [model.num_layers for model in whole]
        check_report(Report(**row))


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    members("step", PLACES, is_example=lambda name: name == EXAMPLE),
)
def test_a_pair_compiles_for(name):
    place = PLACES[name]
    reason = aot_step.missing(place)
    if reason is not None:
        pytest.skip(reason)
    # The parts of a program repeat by layer, so the place that is always compiled for
    # sees one of each model, and nothing that draws: a third of the time is left. The
    # test above has the whole of every place.
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
        target, draft = (model.hidden_size for model in aot_step.models(place))
        assert of_width(report, "f32", target, draft) == {
            f"f32[40,{target}]": 2 * target_layers,
            f"f32[16,{draft}]": 2 * draft_layers,
            f"f32[8,{draft}]": 2 * draft_layers,
        }
        assert of_width(report, "bf16", target, draft) == {
            f"bf16[40,{target}]": 1, f"bf16[16,{draft}]": 1, f"bf16[8,{draft}]": 1
        }  # fmt: skip
        largest = hlo.largest_collective(text, but=(target, draft))
        assert largest <= LARGEST_COLLECTIVE


def of_width(report: Report, kind: str, *widths: int) -> dict[str, int]:
    """Return the sums over chips of hidden rows of a type, by shape."""
    pattern = rf"^{kind}\[\d+,({'|'.join(map(str, widths))})\]"
    found = report.all_reduces.items()
    return {shape: count for shape, count in found if re.search(pattern, shape)}
