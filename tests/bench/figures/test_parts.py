"""The figure of a round's parts: stacked as timed, the host beside them."""

import pytest
from matplotlib.container import BarContainer

from jaxspec.bench.figures import form
from jaxspec.bench.figures.parts import draw_parts
from tests.bench.figures.views import labels_of, ticks_of, ys_of
from tests.bench.results import spec_result


def panels_of(result):
    figure = form.new_figure(8, 4, "")
    draw_parts(figure, result)
    return figure.axes


def test_parts_lie_on_each_other_and_the_host_stands_beside():
    result = spec_result(sizes=(1, 8), counts=(1, 5))
    panels = panels_of(result)
    assert [axes.get_title() for axes in panels] == ["batch 1", "batch 8"]
    for axes, size in zip(panels, (1, 8), strict=True):
        draft, verify, accept, host = (
            one for one in axes.containers if isinstance(one, BarContainer)
        )
        parts = [part for part in result["parts"] if part["num_seqs"] == size]
        assert [part["num_draft_tokens"] for part in parts] == [0, 1, 5]
        bottoms = [0.0] * 3
        for bars, name in ((draft, "draft"), (verify, "verify"), (accept, "accept")):
            heights = [1e3 * part[f"{name}_s"] for part in parts]
            assert [bar.get_height() for bar in bars] == pytest.approx(heights)
            assert [bar.get_y() for bar in bars] == pytest.approx(bottoms)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        point = next(p for p in result["points"] if p["batch_size"] == size)
        cells = [point["plain"], *point["by_num_draft_tokens"].values()]
        hosts = [1e3 * cell["host_s"]["median"] for cell in cells]
        assert [bar.get_height() for bar in host] == pytest.approx(hosts)
        for alone, stack in zip(host, draft, strict=True):
            assert alone.get_x() > stack.get_x() + stack.get_width()
        whole = [1e3 * cell["round_s"]["median"] for cell in cells]
        assert ys_of(axes.lines[-1]) == pytest.approx(whole)
        assert ticks_of(axes) == ["0", "1", "5"]


def test_names_stand_at_the_last_bar():
    first, last = panels_of(spec_result(sizes=(1, 8)))
    assert not first.texts
    assert labels_of(last) == [
        "draft",
        "verify",
        "accept",
        "host, meanwhile",
        "round as it ran",
    ]


def test_rounds_that_were_not_timed_are_left_out():
    result = spec_result(sizes=(1,), counts=(2,))
    for point in result["points"]:
        for cell in (point["plain"], *point["by_num_draft_tokens"].values()):
            del cell["round_s"], cell["host_s"]
    (axes,) = panels_of(result)
    assert len(axes.patches) == 6
    assert not axes.lines
