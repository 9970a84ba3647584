"""The form of figures: labels that do not touch, marks without colour, same bytes."""

import itertools
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from jaxspec.bench.figures import form
from tests.bench.results import made_header, spread

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def drawn(median: float = 2.0, note: str = "a note") -> Figure:
    with form.style():
        figure = form.new_figure(4, 3, note)
        form.head(figure, "A title", {})
        axes = figure.subplots()
        form.line(axes, [1, 2], [form.single(1.0), spread(median)], form.PLAIN)
        form.bars(axes, [1.5], [spread(1.0)], form.SPECULATIVE)
        form.label_end(axes, median, "an end")
        axes.set_xticks([1, 2], ["one", "two"])
    return figure


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([], []),
        ([5], [5]),
        ([30, 0], [30, 0]),
        # Each moves half of what is missing.
        ([10, 12], [6, 16]),
        ([12, 10], [16, 6]),
        ([10, 10, 10], [0, 10, 20]),
        # The third is pushed by the two below, and pushes them.
        ([0, 4, 12, 90], [-14 / 3, 16 / 3, 46 / 3, 90]),
    ],
)
def test_labels_are_parted_and_move_little(heights, placed):
    assert form.parted(heights, 10) == pytest.approx(placed)


def test_labels_of_lines_that_end_together_do_not_touch(tmp_path):
    with form.style():
        figure = form.new_figure(4, 3, "")
        axes = figure.subplots()
        for number in range(4):
            axes.plot([0, 1], [0, 1 + number / 1000])
            form.label_end(axes, 1 + number / 1000, f"line {number}")
    boxes = [text.get_window_extent() for text in axes.texts]
    assert any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    form.save(figure, tmp_path / "new.png")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    # They keep the order of their lines, and lie on the paper.
    assert [box.y0 for box in boxes] == sorted(box.y0 for box in boxes)
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


def test_marks_differ_without_their_colour():
    for marks in (form.MARKS, (form.PLAIN, form.SPECULATIVE)):
        for kind in ("line", "marker", "hatch"):
            found = [getattr(mark, kind) for mark in marks]
            assert len(set(found)) == len(found), kind


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_the_same_figure_is_the_same_bytes_whatever_the_settings(suffix, tmp_path):
    form.save(drawn(), tmp_path / f"first{suffix}")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        form.save(drawn(), tmp_path / f"second{suffix}")
    first = (tmp_path / f"first{suffix}").read_bytes()
    assert (tmp_path / f"second{suffix}").read_bytes() == first
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_an_svg_says_what_it_shows(tmp_path):
    form.save(drawn(), tmp_path / "new.svg")
    (told,) = ElementTree.parse(tmp_path / "new.svg").iter(DESCRIPTION)
    assert told.text == form.described(drawn())
    assert (told.text or "").splitlines() == [
        "A title",
        "a note",
        "one | two",
        "1 1 2 2",
        "1 1 1 1",
        "2 1.8 2 2.2",
        "1.5 0.9 1.5 1.1",
        "bar 1.1 0 0.8 1 ////",
        "an end",
    ]
    assert form.described(drawn(median=2.01)) != told.text
    assert form.described(drawn(note="another")) != told.text


def test_no_whiskers_without_repeats():
    with form.style():
        axes = form.new_figure(4, 3, "").subplots()
        form.line(axes, [1, 2], [form.single(1.0)] * 2, form.PLAIN)
        form.bars(axes, [1], [form.single(1.0)], form.PLAIN)
    assert not axes.collections


@pytest.mark.parametrize(
    ("chances", "told"),
    [
        (None, ""),
        ([0.8, 0.8, 0.8], "acceptance forced to 0.8"),
        ([0.0], "acceptance forced to 0"),
        ([0.9, 0.8, 0.8], "acceptance forced to 0.9, 0.8, 0.8"),
    ],
)
def test_forced_acceptance_stands_in_the_title(chances, told):
    figure = form.new_figure(4, 3, "")
    form.head(figure, "A title", made_header("spec", forced_acceptance=chances))
    expected = f"A title\nSYNTHETIC: {told}; texts mean nothing" if told else "A title"
    assert figure.get_suptitle() == expected


def test_the_note_says_what_was_measured_where():
    result = made_header("latency", batch_size=8, output_len=128, num_iters=10)
    assert form.provenance(result) == (
        "a/target with a/draft; K = 5, batch 8, 128 new tokens, 10 runs, bfloat16 on a "
        "CPU, 2 cores; jax 0.10.2; 2026-11-22, commit 0123456789ab."
    )
    assert "K = 5" not in form.provenance(result | {"benchmark": "spec"})
    result["device"] |= {"platform": "tpu", "kind": "TPU v6e", "count": 4}
    result |= {"has_changes": True}
    told = form.provenance(result)
    assert ", bfloat16 on 4 x TPU v6e; " in told
    assert told.endswith("commit 0123456789ab with local changes.")
    unknown = {"speculative_model": None, "num_speculative_tokens": None}
    served = made_header("serve", **unknown) | {"model_id": "a/model"}
    del served["device"]
    told = form.provenance(served)
    assert told.startswith("a/model; a server, asked from a CPU, 2 cores; jax")
