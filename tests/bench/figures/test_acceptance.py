"""The figure of acceptance by position: of the highest K, over batch sizes."""

import pytest

from jaxspec.bench.figures import form
from jaxspec.bench.figures.acceptance import draw_acceptance, kept_by_position
from tests.bench.figures.views import labels_of, xs_of, ys_of
from tests.bench.results import spec_result


def told(rates, num_drafts):
    return {"acceptance_rate_per_position": rates, "num_drafts": num_drafts}


def test_runs_count_by_their_rounds():
    first, second = kept_by_position([told([0.8, 0.4], 30), told([0.4], 10)], 2)
    assert first == pytest.approx({"median": 0.7, "least": 0.4, "most": 0.8})
    # The second run kept nothing so deep.
    assert second == pytest.approx({"median": 0.3, "least": 0.0, "most": 0.4})
    assert kept_by_position([], 2) == []
    (only,) = kept_by_position([told([0.5, 0.25], 4)], 1)
    assert only == form.single(0.5)


def test_a_line_for_every_temperature():
    result = spec_result(counts=(2, 5))
    # Of the other batch sizes it is 0.8 and 0.64 and so on.
    cell = result["points"][0]["by_num_draft_tokens"]["5"]
    cell["acceptance"]["acceptance_rate_per_position"] = [0.5]
    figure = form.new_figure(8, 4, "")
    draw_acceptance(figure, result)
    (axes,) = figure.axes
    greedy, sampled = (ys_of(line) for line in axes.lines)
    rates = [0.8**place for place in range(1, 6)]
    assert greedy[0] == pytest.approx((0.5 + 2 * 0.8) / 3)
    assert greedy[1:] == pytest.approx([rate * 2 / 3 for rate in rates[1:]])
    assert sampled == pytest.approx([0.64**place for place in range(1, 6)])
    assert [round(x) for x in xs_of(axes.lines[0])] == [1, 2, 3, 4, 5]
    assert "K = 5" in axes.get_xlabel()
    assert labels_of(axes) == ["temperature 0", "temperature 0.8"]


def test_a_temperature_at_which_nothing_was_drafted_has_no_line():
    result = spec_result(sizes=(1,))
    for cell in result["points"][1]["by_num_draft_tokens"].values():
        del cell["acceptance"]
    figure = form.new_figure(8, 4, "")
    draw_acceptance(figure, result)
    assert labels_of(figure.axes[0]) == ["temperature 0"]
