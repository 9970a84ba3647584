"""The figure of a server under load: by concurrency or rate, repeats as whiskers."""

import math

import pytest

from jaxspec.bench.figures import form
from jaxspec.bench.figures.load import draw_load, num_rows, positions
from tests.bench.figures.views import labels_of, spans_of, ticks_of, xs_of, ys_of
from tests.bench.results import serve_entry


def panels_of(entries):
    figure = form.new_figure(8, 4, "")
    draw_load(figure, entries)
    assert len(figure.axes) == 3 * num_rows(entries)
    return figure.axes


def test_both_modes_by_concurrency():
    entries = [serve_entry(limit) for limit in (4, 1, 16)]
    speed, time, ttft = panels_of(entries)
    assert xs_of(speed.lines[0]) == [0, 2, 4]
    assert ys_of(speed.lines[0]) == pytest.approx([200, 400, 800])
    assert ys_of(speed.lines[1]) == pytest.approx([100, 200, 400])
    assert ys_of(time.lines[0]) == pytest.approx([0.5, 1, 2])
    assert ys_of(time.lines[1]) == pytest.approx([1, 2, 4])
    assert ys_of(ttft.lines[0]) == pytest.approx([22, 28, 52])
    assert ys_of(ttft.lines[1]) == pytest.approx([17, 23, 47])
    assert ticks_of(ttft) == ["1", "4", "16"]
    assert labels_of(ttft) == ["speculative", "plain"]
    assert not speed.texts
    assert not speed.collections
    assert {line.get_linestyle() for line in speed.lines} == {"-", "--"}


def test_a_load_that_was_measured_again_has_whiskers():
    entries = [serve_entry(1, factor=f) for f in (1.0, 0.5, 2.0)]
    speed, *_ = panels_of([*entries, serve_entry(4)])
    assert ys_of(speed.lines[0]) == pytest.approx([200, 400])
    first, second, *_ = spans_of(speed)
    assert first == pytest.approx([100, 400])
    assert second == pytest.approx([400, 400])


def test_a_peer_has_one_line_and_a_mark_of_its_own_name():
    entries = [serve_entry(limit) for limit in (1, 2)]
    for entry in entries:
        del entry["plain"], entry["spec_decode_num_drafts"]
    *_, ttft = panels_of(entries)
    assert len(ttft.lines) == 1
    assert labels_of(ttft) == ["as served"]


def test_a_load_under_which_nothing_was_drafted_is_on_the_same_line():
    entries = [serve_entry(1), serve_entry(64)]
    del entries[1]["spec_decode_num_drafts"]
    speed, _, ttft = panels_of(entries)
    assert [len(xs_of(line)) for line in speed.lines] == [2, 2]
    assert labels_of(ttft) == ["speculative", "plain"]


def test_a_server_that_forces_acceptance_is_told_of():
    entries = [serve_entry(limit) for limit in (1, 64)]
    entries[1]["forced_acceptance"] = [0.7, 0.7]
    figure = form.new_figure(8, 4, "")
    draw_load(figure, entries)
    assert "SYNTHETIC: acceptance forced to 0.7" in figure.get_suptitle()


def test_a_sweep_over_rates_goes_by_rate():
    speed, *_ = panels_of([serve_entry(None, rate=rate) for rate in (2.0, "inf", 0.5)])
    assert speed.get_xlabel() == "requests/s"
    assert ticks_of(speed) == ["0.5", "2", "all"]
    assert xs_of(speed.lines[0]) == [-1, 1, 2]


def test_a_sweep_over_both_has_a_row_for_every_rate():
    entries = [serve_entry(limit, rate=rate) for rate in (1, 4) for limit in (1, None)]
    panels = panels_of(entries)
    assert [axes.get_ylabel().splitlines()[-1] for axes in panels[::3]] == [
        "1 requests/s",
        "4 requests/s",
    ]
    assert panels[-1].get_xlabel() == "requests at a time"
    assert ticks_of(panels[-1]) == ["1", "all"]


def test_one_load_is_one_mark():
    speed, *_ = panels_of([serve_entry(None)])
    assert speed.get_xlabel() == "requests at a time"
    assert (ticks_of(speed), num_rows([serve_entry(None)])) == (["all"], 1)


def test_no_limit_stands_one_step_beyond_the_most():
    assert positions([1, 8, math.inf]) == {1: 0, 8: 3, math.inf: 4}
    assert positions([math.inf]) == {math.inf: 0}
