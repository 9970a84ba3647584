"""The figures in git are those of the results in git, and a README shows them all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.patches import Rectangle

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
    pages += (ROOT / "docs").glob("*.md")
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
        ["Not there", "control-cpu.json"],
        ["Not there", "methods-*.json"],
        ["Not there", "gpu-*.json"],
    ]
    assert not list(output.iterdir())
    lines = [json.dumps(serve_entry(limit)) for limit in (1, 4)]
    (results / figures.SERVE).write_text("\n".join(lines) + "\n")
    (results / figures.SPEC).write_text(json.dumps(spec_result()) + "\n")
    (results / "cpu_pair-1.json").write_text(PAIR.read_text())
    figures.main(["--results", str(results), "--output", str(output)])
    *drawn, _, _, missing = capsys.readouterr().out.splitlines()
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


def test_ways_to_propose_drafts_are_drawn_beside_each_other(tmp_path):
    def point(size: int, temperature: float, speed: float) -> dict[str, Any]:
        place = {"batch_size": size, "temperature": temperature}
        return place | {"decode_speed_up": spread(speed)}

    methods = [
        {
            "name": name,
            "points": [
                point(8, 0.0, 9.0),
                point(1, 0.8, speed - 0.5),
                point(1, 0.0, speed),
            ],
        }
        for name, speed in (("ngram", 1.5), ("medusa tiny-medusa", 2.0))
    ]
    for name, path in (("copy-cpu", "in/copy_prompts.jsonl"), ("cpu", None)):
        result = spec_result(dataset_path=path) | {"methods": methods}
        (tmp_path / f"methods-{name}.json").write_text(json.dumps(result))
    found, _ = figures.draw_all(tmp_path)
    figure = found["methods"]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["copy prompts", "bundled prompts"]
    for axes in figure.axes:
        assert ticks_of(axes) == ["ngram", "medusa"]
        assert heights_of(axes) == [1.5, 2.0, 1.0, 1.5]
        assert spans_of(axes)[1] == pytest.approx([1.8, 2.2])
    assert_in_view(figure)


def control_result(**changes: Any) -> dict[str, Any]:
    """As `benchmarks.control` writes it, with made-up values."""
    cells = [
        {
            "batch": size,
            "acceptance": chance,
            "adaptive_by_plain": spread(1 + chance, 0.05),
            "fixed_by_plain": spread(0.5 + 2 * chance, 0.05),
        }
        for size in (1, 4, 8, 16)
        for chance in (0.0, 0.5, 0.9)
    ]
    phases = [
        {"acceptance": chance, "tokens_per_s": 100.0, "settle_s": 0.2}
        for chance in (0.9, 0.0)
    ]
    step = {
        "phases": phases,
        "plain_tokens_per_s": [50.0] * 100,
        "tokens_per_s": [100.0] * 50 + [50.0] * 50,
        "num_drafts": [5.0] * 50 + [None] * 50,
    }
    way = {"tokens_per_s": [10.0, 20.0, 10.0], "num_drafts": [5.0, None, 4.0]}
    ways = {name: way for name in ("plain", "5", "adaptive")}
    return {
        "benchmark": "control",
        "target": "a/target",
        "draft": "a/draft",
        "num_drafts": 5,
        "date": "2026-11-23T08:00:00",
        "commit": "0123456789ab",
        "has_changes": False,
        "arguments": {
            "quick": False,
            "num_tokens": 300,
            "repeats": 5,
            "phase_s": 5.0,
            "ramp_s": 1.5,
        },
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"jax": "0.10.2"},
        "cells": cells,
        "step": [{"batch": size} | step for size in (1, 8)],
        "ramp": {"acceptance": 0.7, "num_seqs": [1, 16, 1], "ways": ways},
    } | changes


def test_adaptive_drafts_are_drawn_beside_fixed_ones(tmp_path):
    path = tmp_path / figures.CONTROL
    path.write_text(json.dumps(control_result()))
    found, _ = figures.draw_all(tmp_path)
    assert list(found) == ["adaptive", "adaptive-step", "adaptive-ramp"]
    cells, steps, ramp = found.values()
    assert [axes.get_title() for axes in cells.axes] == ["batch 1", "batch 8"]
    assert "SYNTHETIC: acceptance forced" in cells.get_suptitle()
    assert "a/target with a/draft" in cells.get_supxlabel()
    plain, adaptive, fixed = cells.axes[1].lines
    assert ys_of(plain) == [1, 1]
    assert xs_of(adaptive) == xs_of(fixed) == [0, 0.5, 0.9]
    assert ys_of(adaptive) == [1, 1.5, 1.9]
    assert ys_of(fixed) == pytest.approx([0.5, 1.5, 2.3])
    assert labels_of(cells.axes[1]) == ["adaptive", "K = 5"]
    ours, plain = steps.axes[1].lines
    assert xs_of(ours)[:2] == pytest.approx([0.05, 0.15])
    assert ys_of(ours)[49:51] == [100, 50]
    assert ys_of(plain) == [50] * 100
    (shaded,) = steps.axes[1].patches
    assert isinstance(shaded, Rectangle)
    assert (shaded.get_x(), shaded.get_width()) == (5, 5)
    drafts, requests = ramp.axes[1].lines
    # Nothing was launched in the second bin.
    assert xs_of(drafts) == [0.25, 1.25]
    assert ys_of(requests) == [1, 16, 1]
    assert_in_view(cells)
    for figure in found.values():
        form.save(figure, tmp_path / "new.svg")


def test_of_adaptive_drafts_only_parts_that_were_run_are_drawn(tmp_path):
    path, result = tmp_path / figures.CONTROL, control_result()
    del result["cells"], result["ramp"]
    path.write_text(json.dumps(result))
    assert list(figures.draw_all(tmp_path)[0]) == ["adaptive-step"]
    result["arguments"]["quick"] = True
    path.write_text(json.dumps(result))
    assert not figures.draw_all(tmp_path)[0]


def gpu_result(**changes: Any) -> dict[str, Any]:
    """As `benchmarks.gpu` writes it, with made-up values."""
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
