"""The full-size step is one executable that fits its chips and copies no page."""

import re

import pytest

from tests.program import aot_step
from tests.program.aot_step import PLACES

# Of a chip. Rounds need logits, hidden rows and what the compiler fetches ahead.
TEMP_BYTES = {"v5e-8": 2**26, "v5e-8/draft-2": 2**27, "v6e-1": 2**29, "h200": 2**29}
# Activations of a round are below it, a layer's pages and all matrices far above.
LARGEST_MOVE = {"v5e-8": 2**20, "v5e-8/draft-2": 2**20, "v6e-1": 2**22, "h200": 2**20}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_9b_with_a_2b_draft_compiles_for(name):
    place = PLACES[name]
    reason = aot_step.missing(place)
    if reason is not None:
        pytest.skip(reason)
    # The parts of a program repeat by layer; whole models are compiled for two places.
    layers = (None, None) if name in ("v5e-8", "v6e-1") else (4, 6)
    report, text = aot_step.compile_pair(name, layers=layers)
    print(report)
    target_layers, draft_layers = report.layers

    assert report.hbm_bytes < place.hbm
    assert report.temp_bytes < TEMP_BYTES[name]
    # The state is updated in place: pages and rows, to the last byte but padding.
    assert report.donated_bytes >= report.state_bytes
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
