"""The full-size step is one executable that fits its chips and copies no page."""

import re

import pytest

from tests.program import aot_step
from tests.program.aot_step import PLACES

# Of a chip. Rounds need logits, hidden rows and what the compiler fetches ahead.
TEMP_BYTES = {"v5e-8": 2**27, "v5e-8/draft-2": 2**28, "v6e-1": 2**29, "h200": 2**29}
# The drafts' probabilities, 8 x 4 x 256,000 floats on one chip, and nothing larger.
LARGEST_MOVE = {"v5e-8": 2**20, "v5e-8/draft-2": 2**23, "v6e-1": 2**25, "h200": 2**26}
# Of numbers: a few per row and candidate. A vocabulary is 256,000 per row.
LARGEST_COLLECTIVE = 2**13


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_9b_with_a_2b_draft_compiles_for(name):
    place = PLACES[name]
    reason = aot_step.missing(place)
    if reason is not None:
        pytest.skip(reason)
    # The parts of a program repeat by layer, so one place sees a part of the models.
    layers = (4, 6) if name == "v5e-8/draft-2" else (None, None)
    report, text = aot_step.compile_pair(name, layers=layers)
    print(report)
    target_layers, draft_layers = report.layers

    assert report.hbm_bytes < place.hbm
    assert report.temp_bytes < TEMP_BYTES[name]
    # The state is updated in place: pages and rows, to the last byte but padding.
    assert report.donated_bytes >= report.state_bytes
    assert report.copied == []
    assert max(report.moves.values()) <= LARGEST_MOVE[name], report.moves

    # One attention per layer: the target's, and the draft's first and looped pass.
    attention = re.findall(r'op_name="[^"]*/paged_attention"', text)
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
        assert aot_step.largest_collective(text, but=(2304, 3584)) <= LARGEST_COLLECTIVE
