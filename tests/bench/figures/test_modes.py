"""The figure of one workload: a bar for every mode, a panel for every measure."""

import pytest

from jaxspec.bench.figures import form
from jaxspec.bench.figures.modes import draw_modes
from tests.bench.figures.views import heights_of, labels_of, spans_of, ticks_of
from tests.bench.results import run_result


def panels_of(result):
    figure = form.new_figure(8, 4, "")
    draw_modes(figure, result)
    return figure, {axes.get_title(): axes for axes in figure.axes}


@pytest.mark.parametrize("benchmark", ["latency", "throughput"])
def test_modes_stand_side_by_side(benchmark):
    figure, panels = panels_of(run_result(benchmark))
    # There is no time between outputs, of which there is one.
    assert list(panels) == [
        "tokens/s, whole",
        "tokens/s, decoding",
        "TTFT, ms",
        "TPOT, ms",
    ]
    assert heights_of(panels["tokens/s, whole"]) == [100, 200]
    assert heights_of(panels["tokens/s, decoding"]) == [120, 240]
    assert heights_of(panels["TTFT, ms"]) == pytest.approx([50, 50])
    assert heights_of(panels["TPOT, ms"]) == pytest.approx([10, 5])
    tpot = panels["TPOT, ms"]
    assert labels_of(tpot) == ["10", "5"]
    spans = spans_of(tpot)
    assert spans[0] == pytest.approx([9, 20])
    assert spans[1] == pytest.approx([4.5, 10])
    assert ticks_of(tpot) == ["plain", "drafts"]
    assert figure.get_suptitle() != ""


def test_without_drafts_there_is_one_bar():
    _, panels = panels_of(run_result("latency", has_drafts=False))
    assert heights_of(panels["tokens/s, whole"]) == [100]


def test_forced_acceptance_is_told():
    figure, _ = panels_of(run_result("latency", forced_acceptance=[0.7] * 5))
    assert "SYNTHETIC: acceptance forced to 0.7" in figure.get_suptitle()
