"""The figure of speed-up shows the values of the result, and both ceilings."""

import pytest

from jaxspec.bench.figures import form
from jaxspec.bench.figures.speed_up import CEILINGS, draw_speed_up
from tests.bench.figures.views import labels_of, spans_of, ys_of
from tests.bench.results import spec_result


def panels_of(result):
    figure = form.new_figure(8, 4, "")
    draw_speed_up(figure, result)
    return figure.axes


def heights_of(axes):
    """Heights of the lines, but for that of plain decoding."""
    lines = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    return [ys_of(line) for line in lines]


def test_every_batch_size_and_temperature_has_a_panel():
    result = spec_result()
    panels = panels_of(result)
    assert len(panels) == len(result["points"]) == 6
    assert [axes.get_title() for axes in panels[:3]] == [
        "batch 1",
        "batch 4",
        "batch 8",
    ]
    assert panels[3].get_ylabel() == "temperature 0.8\nspeed-up"
    for axes, point in zip(panels, result["points"], strict=True):
        cells = point["by_num_draft_tokens"].values()
        ceilings = [
            [cell["ceiling"][name]["speed_up_ceiling"] for cell in cells]
            for name in CEILINGS
        ]
        ours = [cell["decode_speed_up"]["median"] for cell in cells]
        assert heights_of(axes) == [*ceilings, ours]
        assert axes.get_xticks().tolist() == [1, 2, 3, 5]
        for (least, most), cell in zip(spans_of(axes), cells, strict=True):
            assert least == pytest.approx(cell["decode_speed_up"]["least"])
            assert most == pytest.approx(cell["decode_speed_up"]["most"])


def test_lines_are_named_once_in_a_row():
    panels = panels_of(spec_result())
    told = [labels_of(axes) for axes in panels]
    names = ["plain", *(label for label, _ in CEILINGS.values()), "measured"]
    assert told == [[], [], names] * 2


def test_a_ceiling_that_is_not_known_is_not_drawn():
    result = spec_result(sizes=(1,), temperatures=(0.0,), counts=(1, 2))
    (point,) = result["points"]
    first, second = point["by_num_draft_tokens"].values()
    del first["ceiling"]["measured"], second["ceiling"]["measured"]
    first["ceiling"] = None  # nothing was drafted
    (axes,) = panels_of(result)
    bytes_alone, ours = heights_of(axes)
    assert bytes_alone == [second["ceiling"]["bytes"]["speed_up_ceiling"]]
    assert len(ours) == 2
    assert labels_of(axes) == [
        "plain",
        "ceiling, bytes alone",
        "measured",
    ]
