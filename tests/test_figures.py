"""The figures in git are those of the results in git, and a README shows them all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import figures
from jaxspec.bench.figures import form
from tests.bench.figures.views import (
    assert_in_view,
    heights_of,
    labels_of,
    spans_of,
    ticks_of,
    xs_of,
    ys_of,
)
from tests.bench.results import serve_entry, spec_result, spread

ROOT = Path(__file__).parents[1]
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
PAIR = max((ROOT / "benchmarks" / "results").glob("cpu_pair-*.json"))


def description_of(path: Path) -> str | None:
    (told,) = ElementTree.parse(path).iter(DESCRIPTION)
    return told.text


def test_the_committed_figures_are_those_of_the_committed_results():
    found, _ = figures.draw_all(figures.RESULTS)
    committed = {path.stem: path for path in figures.FIGURES.glob("*.svg")}
    hint = "run make figures, and remove what it no longer draws"
    assert committed.keys() == found.keys(), hint
    # In words and numbers: where glyphs and lines lie depends on a machine's fonts.
    for name, path in committed.items():
        assert description_of(path) == form.described(found[name]), f"{name}: {hint}"


def test_every_figure_is_in_a_readme():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for path in figures.FIGURES.glob("*.svg"):
        assert f"figures/{path.name})" in text, path.name


def test_what_is_not_there_is_told_and_the_rest_drawn(tmp_path, capsys):
    results, output = tmp_path / "results", tmp_path / "figures"
    results.mkdir()
    figures.main(["--results", str(results), "--output", str(output)])
    told = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in told] == [
        ["Not there", "serve-cpu.json"],
        ["Not there", "spec-cpu.json"],
        ["Not there", "cpu_pair-*.json"],
        ["Not there", "gpu-*.json"],
    ]
    assert not list(output.iterdir())
    lines = [json.dumps(serve_entry(limit)) for limit in (1, 4)]
    (results / figures.SERVE).write_text("\n".join(lines) + "\n")
    (results / figures.SPEC).write_text(json.dumps(spec_result()) + "\n")
    (results / "cpu_pair-1.json").write_text(PAIR.read_text())
    figures.main(["--results", str(results), "--output", str(output)])
    *drawn, missing = capsys.readouterr().out.splitlines()
    names = ["load", *figures.SPEC_NAMES.values(), "acceptance-by-domain"]
    assert drawn == [f"Drawn: {name}.svg" for name in names]
    assert missing.startswith("Not there: gpu-")
    assert {path.stem for path in output.iterdir()} == set(names)
    assert "1 | 4" in (description_of(output / "load.svg") or "")


def test_one_load_on_one_line_is_still_a_sweep(tmp_path):
    (tmp_path / figures.SERVE).write_text(json.dumps(serve_entry(1)) + "\n")
    found, _ = figures.draw_all(tmp_path)
    assert list(found) == ["load"]


def test_domains_are_those_of_the_newest_full_result(tmp_path):
    result = json.loads(PAIR.read_text())
    quick = result["arguments"] | {"quick": True}
    changes = (
        {"date": "2026-01-01T00:00:00", "commit": "older"},
        {"date": "2027-01-01T00:00:00", "commit": "newest"},
        {"date": "2028-01-01T00:00:00", "commit": "short", "arguments": quick},
    )
    for number, one in enumerate(changes):
        path = tmp_path / f"cpu_pair-{number}.json"
        path.write_text(json.dumps(result | one))
    found, _ = figures.draw_all(tmp_path)
    figure = found["acceptance-by-domain"]
    assert "commit newest" in figure.get_supxlabel()
    rates, speeds = figure.axes
    greedy = result["modes"]["greedy"]["rows"]
    told = [row["acceptance_rate"] for row in greedy.values()]
    assert heights_of(rates)[: len(greedy)] == told
    assert ticks_of(rates) == list(greedy)
    for span, row in zip(spans_of(speeds), greedy.values(), strict=False):
        assert span == pytest.approx(row["speed_up_range"])


def gpu_result(**changes: Any) -> dict[str, Any]:
    """As `benchmarks.h200` writes it, with made-up values."""
    rounds = [
        {
            "what": "round",
            "pair": pair,
            "batch": 1,
            "acceptance": "synthetic",
            "num_drafts": count,
            "forced_acceptance": chance,
            "round_us": spread(100.0 * (1 + count * cost)),
            "speed_up": 0.9 * best,
            "ceiling": best,
        }
        for pair, cost in (("9b-2b", 0.3), ("27b-2b", 0.1))
        for count in (8, 1, 4, 2)
        for chance in (0.6, 0.8, 0.9)
        for best in [sum(chance**i for i in range(count + 1)) / (1 + count * cost)]
    ]
    steps = [
        {
            "what": "plain",
            "model": model,
            "batch": batch,
            "step_us": spread(1000.0, 0.05),
            "share_of_bandwidth": share / batch**0.1,
        }
        for model, share in (("9b", 0.8), ("2b", 0.7), ("27b", 0.85), ("2b", 0.1))
        for batch in (1, 8)
    ]
    other = [
        {"what": "copy", "device": "a GPU"},
        {"what": "round", "pair": "9b-2b", "batch": 1, "acceptance": "standard"},
        {"what": "ended early", "code": 1},
    ]
    return {
        "is_dry_run": False,
        "date": "2026-11-22T08:00:00+00:00",
        "commit": "0123456789ab",
        "has_changes": False,
        "versions": {"jax": "0.10.2"},
        "goals": {"plain_share_of_bandwidth": 0.75},
        "rows": [*other, *rounds, *steps],
    } | changes


def test_a_gpu_is_drawn_with_its_ceilings_and_the_goal(tmp_path):
    (tmp_path / "gpu-a.json").write_text(json.dumps(gpu_result(), indent=1))
    found, missing = figures.draw_all(tmp_path)
    assert list(found) == ["gpu-a-speed-up", "gpu-a-bandwidth"]
    assert not any(told.startswith("gpu") for told in missing)
    speed, bandwidth = found.values()
    assert "SYNTHETIC: acceptance forced" in speed.get_suptitle()
    assert "a GPU; jax 0.10.2" in speed.get_supxlabel()
    titles = [axes.get_title() for axes in speed.axes]
    assert titles == ["9B with 2B, batch 1", "27B with 2B, batch 1"]
    axes = speed.axes[1]
    plain, ceiling, ours, *_ = axes.lines
    assert ys_of(plain) == [1, 1]
    assert xs_of(ceiling) == xs_of(ours) == [1, 2, 4, 8]
    assert ys_of(ceiling)[0] == pytest.approx(1.6 / 1.1)
    assert ys_of(ours) == pytest.approx([0.9 * one for one in ys_of(ceiling)])
    # A round that took a tenth less was faster.
    span = [0.9 * 1.6 / 1.1 / 1.1, 0.9 * 1.6 / 1.1 / 0.9]
    assert spans_of(axes)[0] == pytest.approx(span)
    assert labels_of(axes) == [
        "acceptance 0.6",
        "acceptance 0.8",
        "acceptance 0.9",
    ]
    (axes,) = bandwidth.axes
    assert ticks_of(axes) == ["2B", "9B", "27B"]
    # Of the 2B, which is measured twice, the first.
    assert heights_of(axes)[:3] == pytest.approx([0.7, 0.8, 0.85])
    assert ys_of(axes.lines[-1]) == [0.75, 0.75]
    for figure in found.values():
        assert_in_view(figure)
        form.save(figure, tmp_path / "new.svg")  # a layout without room would warn


def test_a_gpu_run_that_came_to_little_draws_what_there_is(tmp_path):
    rows = [row for row in gpu_result()["rows"] if row["what"] != "plain"]
    (tmp_path / "gpu-a.json").write_text(json.dumps(gpu_result(rows=rows)))
    (tmp_path / "gpu-b.json").write_text(json.dumps(gpu_result(rows=[])))
    assert list(figures.draw_all(tmp_path)[0]) == ["gpu-a-speed-up"]


def test_a_dry_run_draws_nothing(tmp_path):
    (tmp_path / "gpu-a.json").write_text(json.dumps(gpu_result(is_dry_run=True)))
    found, missing = figures.draw_all(tmp_path)
    assert not found
    assert missing[-1].startswith("gpu-")


def test_figures_need_no_jax_and_no_pyplot():
    code = (
        "import sys, benchmarks.figures as figures\n"
        "figures.draw_all(figures.RESULTS)\n"
        "assert not {'jax', 'matplotlib.pyplot'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
