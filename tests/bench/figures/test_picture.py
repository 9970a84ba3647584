"""Which figures stand in the picture of a run, and that they fit on the paper."""

import pytest

from jaxspec.bench.figures import form
from jaxspec.bench.figures.picture import picture, spec_pictures
from tests.bench.figures.views import assert_in_view
from tests.bench.results import run_result, serve_entry, spec_result

RESULTS = {
    "spec": spec_result(),
    "spec of one": spec_result(sizes=(1,), temperatures=(0.0,), counts=(1,)),
    "latency": run_result("latency"),
    "throughput": run_result("throughput", has_drafts=False),
    "serve": [serve_entry(limit) for limit in (1, 4)],
    "serve both": [serve_entry(n, rate=r) for n in (1, 4) for r in (1, 2, 8)],
}


@pytest.mark.parametrize("name", RESULTS)
def test_nothing_reaches_beyond_the_paper(name, tmp_path):
    figure = picture(RESULTS[name])
    assert_in_view(figure)
    # A layout that finds no room warns, which is an error here.
    form.save(figure, tmp_path / "new.svg")
    with form.style():
        figure.draw_without_rendering()
        inches = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert inches.x0 > -0.01
    assert inches.y0 > -0.01
    assert inches.x1 < width + 0.01
    assert inches.y1 < height + 0.01


def test_a_spec_run_has_all_three_each_alone_and_together():
    result = spec_result()
    alone = spec_pictures(result)
    together = form.described(picture(result))
    assert list(alone) == ["speed_up", "acceptance", "parts"]
    for figure in alone.values():
        assert figure.get_suptitle() in together
        assert "a/target with a/draft" in figure.get_supxlabel()
    assert sum(len(one.axes) for one in alone.values()) == len(picture(result).axes)


def test_without_parts_they_are_left_out():
    result = spec_result() | {"parts": []}
    assert list(spec_pictures(result)) == ["speed_up", "acceptance"]
    assert "Where a round's time goes" not in form.described(picture(result))


def test_every_figure_of_a_forced_run_says_so():
    result = spec_result(forced_acceptance=[0.8] * 5)
    for figure in spec_pictures(result).values():
        assert "SYNTHETIC: acceptance forced to 0.8" in figure.get_suptitle()
    together = form.described(picture(result))
    assert together.count("SYNTHETIC: acceptance forced to 0.8") == 3
