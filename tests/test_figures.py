"""Committed figures match the committed results, and every figure is in a README."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from benchmarks import drawing, figures
from benchmarks.panels import kept_by_position, load_figure, spec_figures
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
PAIR = max((ROOT / "benchmarks" / "results").glob("cpu_pair-*.json"))


def committed(name: str) -> list[dict[str, Any]]:
    """Return the results in a file, which is one result or has one per line."""
    return figures._lines(figures.RESULTS / name)


def description_of(path: Path) -> str | None:
    (found,) = ElementTree.parse(path).iter(DESCRIPTION)
    return found.text


def xs_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def spans_of(axes: Axes) -> list[list[float]]:
    """Return both ends of every whisker (error bar) in the axes."""
    paths = [path for one in axes.collections for path in one.get_paths()]
    return [np.asarray(path.vertices)[:, 1].tolist() for path in paths]


def heights_of(axes: Axes) -> list[float]:
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [bar.get_height() for bar in bars]


def labels_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def ticks_of(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def test_committed_figures_match_the_results():
    found, _ = figures.draw_all(figures.RESULTS)
    paths = {path.stem: path for path in figures.FIGURES.glob("*.svg")}
    hint = "run make figures, and remove what it no longer draws"
    assert paths.keys() == found.keys(), hint
    # Only the figures' descriptions are compared: positions depend on fonts.
    for name, path in paths.items():
        assert description_of(path) == drawing.described(found[name]), f"{name}: {hint}"


def test_every_figure_is_in_a_readme():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    pages += (ROOT / "docs").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for path in figures.FIGURES.glob("*.svg"):
        assert f"figures/{path.name})" in text, path.name


def test_missing_results_are_reported_and_the_rest_drawn(tmp_path, capsys):
    results, output = tmp_path / "results", tmp_path / "figures"
    results.mkdir()
    arguments = ["--results", str(results), "--output", str(output)]
    figures.main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in printed] == [
        *("serve-cpu.json", "spec-cpu.json", "cpu_pair-*.json"),
        *("control-cpu.json", "methods-*.json", "draft-costs.json"),
        *("training-270m.json", "drafts-270m-cpu.json"),
        *("peers-real-cpu.json", "device-*.json"),
    ]
    assert not list(output.iterdir())
    (results / figures.SERVE).write_text(json.dumps(committed(figures.SERVE)[0]))
    figures.main(arguments)
    assert capsys.readouterr().out.startswith("Drawn: load.svg\nMissing: spec-cpu")
    assert [path.name for path in output.iterdir()] == ["load.svg"]


def test_sweep_figures_match_the_results():
    (result,) = committed(figures.SPEC)
    found = spec_figures(result)
    (axes,) = found["acceptance"].axes
    assert labels_of(axes) == ["temperature 0", "temperature 0.8"]
    heights = [heights_of(axes) for axes in found["parts"].axes]
    parts = [part for part in result["parts"] if part["num_seqs"] == 1]
    drafts = [1e3 * part["draft_s"] for part in parts]
    assert heights[0][: len(parts)] == pytest.approx(drafts)
    assert "parts" not in spec_figures(result | {"parts": []})
    forced = spec_figures(result | {"forced_acceptance": [0.7, 0.7]})["speed_up"]
    assert "SYNTHETIC: acceptance forced to 0.7" in forced.get_suptitle()


def test_acceptance_is_weighted_by_rounds():
    runs = [
        {"acceptance_rate_per_position": [0.8, 0.4], "num_drafts": 30},
        {"acceptance_rate_per_position": [0.4], "num_drafts": 10},
    ]
    first, second = kept_by_position(runs, 2)
    assert first == pytest.approx({"median": 0.7, "least": 0.4, "most": 0.8})
    # The second run accepted no drafts at this position.
    assert second == pytest.approx({"median": 0.3, "least": 0.0, "most": 0.4})


def test_server_under_load_has_both_modes_and_whiskers():
    entries = committed(figures.SERVE)
    speed, _, ttft = load_figure(entries).axes
    assert ticks_of(ttft) == ["1", "2", "4", "8", "16"]
    assert labels_of(ttft) == ["speculative", "plain"]
    runs = [e["output_throughput"] for e in entries if e["max_concurrency"] == 1]
    assert ys_of(speed.lines[0])[0] == np.median(runs)
    assert spans_of(speed)[0] == pytest.approx([min(runs), max(runs)])
    plain = [
        e["plain"]["output_throughput"] for e in entries if e["max_concurrency"] == 16
    ]
    assert ys_of(speed.lines[1])[-1] == np.median(plain)
    # Results by request rate, of a server without drafts, and without a plain run.
    rates = [dict(entries[0], max_concurrency=None) for _ in range(3)]
    for entry, rate in zip(rates, (2.0, "inf", 0.5), strict=True):
        entry["request_rate"] = rate
        del entry["plain"], entry["spec_decode_num_drafts"]
    speed, _, ttft = load_figure(rates).axes
    assert (ticks_of(speed), speed.get_xlabel()) == (["0.5", "2", "all"], "requests/s")
    assert labels_of(ttft) == ["as served"]


def test_domains_come_from_the_newest_full_result(tmp_path):
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
    assert ticks_of(figure.axes[0]) == list(result["modes"]["greedy"]["rows"])


def test_training_is_drawn_with_the_acceptance_that_the_goal_needs():
    (result,) = committed(figures.TRAINING)
    runs = {run["name"]: run for run in result["runs"]}
    names = ["EAGLE-3", "DFlash"]
    rows = [
        {"name": name, "acceptance": {figures.TRAINING_GOAL: needed}}
        for name, needed in zip(names, (0.45, None), strict=True)
    ]
    drawn = result | {
        "runs": [*(runs[name] for name in names), runs["EAGLE-3"] | {"name": "other"}],
        "needed": {"rows": rows},
    }
    (axes,) = figures.training_curves(drawn).axes
    # A curve for each named draft, and a line at the acceptance that one of them needs.
    assert labels_of(axes) == names
    eagle3, needed, dflash = axes.lines
    for line, name in ((eagle3, "EAGLE-3"), (dflash, "DFlash")):
        log, settings = runs[name]["log"], runs[name]["settings"]
        assert ys_of(line) == [entry["sampled"][0] for entry in log]
        tokens = settings["rows"] * runs[name]["texts"]["length"]
        assert xs_of(line) == [entry["step"] * tokens / 1e3 for entry in log]
    assert ys_of(needed) == [0.45, 0.45]
    assert needed.get_color() == eagle3.get_color() != dflash.get_color()


def test_acceptance_by_text_is_drawn_up_to_the_text_that_the_goal_needs():
    (result,) = committed(figures.TRAINING)
    run = next(one for one in result["runs"] if one["name"] == "EAGLE-3")
    rates = {8000: 0.2, 16_000: 0.25}
    runs = [
        run | {"texts": {"num_tokens": tokens}, "log": [{"step": 9, "sampled": [rate]}]}
        for tokens, rate in rates.items()
    ]
    row = {"name": "EAGLE-3", "acceptance": {figures.TRAINING_GOAL: 0.35}}
    drawn = {"by_text": runs, "needed": {"rows": [row]}}
    (axes,) = figures.text_sizes(drawn).axes
    points, needed, fit = axes.lines
    assert xs_of(points) == list(rates)
    assert ys_of(points) == pytest.approx([0.2, 0.25])
    assert ys_of(needed) == [0.35, 0.35]
    assert xs_of(fit) == pytest.approx([8000, 64_000])
    assert ys_of(fit) == pytest.approx([0.2, 0.35])
    assert labels_of(axes) == ["EAGLE-3"]


def test_drafts_are_drawn_by_batch_over_all_kinds_of_prompts():
    (result,) = committed(figures.REAL_DRAFTS_FILE)
    method = result["methods"][0]
    first = next(one for one in method["points"] if one["batch_size"] == 1)

    def cell(speed: float, size: int, temperature: float) -> dict[str, Any]:
        chosen = {"decode_speed_up": spread(speed)}
        at = {"batch_size": size, "temperature": temperature}
        return first | at | {"chosen": chosen}

    points = [cell(speed, 1, 0.0) for speed in (1.2, 1.6, 3.0)]
    methods = [
        method | {"points": [*points, cell(0.9, 1, 0.8), cell(1.1, 4, 0.0)]},
        method | {"name": "eagle3 head", "points": [cell(0.7, 4, 0.0)]},
    ]
    figure = figures.real_drafts(result | {"methods": methods})
    one, four = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["batch 1", "batch 4"]
    assert ticks_of(one) == ticks_of(four) == [method["name"], "eagle3"]
    # Medians over kinds of prompts, and the head is not measured at batch 1.
    assert heights_of(one) == [1.6, 0.9]
    assert spans_of(one)[0] == pytest.approx([1.2, 3.0])
    assert heights_of(four) == [1.1, 0.7]
    assert len(one.lines) == len(four.lines) + 1, "only batch 1 has a goal"


def test_control_has_a_figure_for_every_part_that_was_run():
    (result,) = committed(figures.CONTROL)
    found = figures.control_figures(result)
    assert list(found) == ["adaptive", "adaptive-step", "adaptive-ramp"]
    assert "SYNTHETIC: acceptance forced" in found["adaptive"].get_suptitle()

    part = {name: result[name] for name in result if name not in ("cells", "ramp")}
    assert list(figures.control_figures(part)) == ["adaptive-step"]
    quick = part | {"arguments": part["arguments"] | {"quick": True}}
    assert not figures.control_figures(quick)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "least": 0.9 * median, "most": 1.1 * median}


def gpu_result() -> dict[str, Any]:
    """Return a measured result, with rounds of another pair and the 2B once more."""
    (result,) = committed("gpu-nvidia-h200.json")
    rows = result["rows"]
    rounds = [row | {"pair": "27b-2b"} for row in rows[::-1] if "ceiling" in row]
    again = [row | {"share_of_bandwidth": 0.1} for row in rows if "bytes_read" in row]
    again = [row for row in again if row["model"] == "2b"]
    rows = [*rows, *rounds, *again, {"what": "ended early", "code": 1}]
    return result | {"rows": rows}


def test_gpu_is_drawn_with_its_ceilings_and_the_goal(tmp_path):
    result = gpu_result()
    (tmp_path / "device-a.json").write_text(json.dumps(result, indent=1))
    found, missing = figures.draw_all(tmp_path)
    assert list(found) == ["device-a-speed-up", "device-a-bandwidth"]
    assert not any(line.startswith("device") for line in missing)
    speed, bandwidth = found.values()
    assert "SYNTHETIC: acceptance forced" in speed.get_suptitle()
    assert "NVIDIA H200; jax 0." in speed.get_supxlabel()
    axes = speed.axes[1]
    assert axes.get_title() == "27B with 2B, batch 1"
    _, ceiling, ours, *_ = axes.lines
    rows = [row for row in result["rows"] if row.get("forced_acceptance") == 0.6][:2]
    assert xs_of(ceiling) == xs_of(ours) == [row["num_drafts"] for row in rows]
    assert ys_of(ceiling) == [row["ceiling"] for row in rows]
    assert ys_of(ours) == [row["speed_up"] for row in rows]
    # The round with the shorter time has the higher speed.
    time = rows[0]["round_us"]
    by_median = rows[0]["speed_up"] * time["median"]
    span = [by_median / time["most"], by_median / time["least"]]
    assert spans_of(axes)[0] == pytest.approx(span)
    assert labels_of(axes) == ["acceptance 0.6", "acceptance 0.8"]
    (axes,) = bandwidth.axes
    assert ticks_of(axes) == ["2B", "9B"]
    # Of two measurements of the 2B, the figure shows the first.
    assert heights_of(axes)[:2] == pytest.approx([0.437, 0.678], abs=1e-3)
    assert ys_of(axes.lines[-1]) == [0.75, 0.75]
    for figure in found.values():
        drawing.save(figure, tmp_path / "new.svg")  # warns if labels do not fit
    # Incomplete and dry runs draw the available figures.
    rounds = [row for row in result["rows"] if row["what"] != "plain"]
    for changes, names in (
        ({"is_dry_run": True}, []),
        ({"rows": []}, []),
        ({"rows": rounds}, ["device-a-speed-up"]),
    ):
        (tmp_path / "device-a.json").write_text(json.dumps(result | changes))
        assert list(figures.draw_all(tmp_path)[0]) == names


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([30, 0], [30, 0]),
        # To get two labels apart, each moves by half of the missing distance.
        ([12, 10], [16, 6]),
        ([10, 10, 10], [0, 10, 20]),
        # Two labels push the third one up, and it pushes them down.
        ([0, 4, 12, 90], [-14 / 3, 16 / 3, 46 / 3, 90]),
    ],
)
def test_labels_are_separated_with_small_moves(heights, placed):
    assert drawing.parted(heights, 10) == pytest.approx(placed)


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_figures_are_reproducible_under_any_settings(suffix, tmp_path):
    def draw() -> Figure:
        return load_figure(committed(figures.SERVE)[:1])

    drawing.save(draw(), tmp_path / f"first{suffix}")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        drawing.save(draw(), tmp_path / f"second{suffix}")
    first = (tmp_path / f"first{suffix}").read_bytes()
    assert (tmp_path / f"second{suffix}").read_bytes() == first


def test_figures_need_no_jax_and_no_pyplot():
    code = (
        "import sys, benchmarks.figures as figures\n"
        "figures.draw_all(figures.RESULTS)\n"
        "assert not {'jax', 'matplotlib.pyplot'} & sys.modules.keys()\n"
    )
    run_python("-c", code, check=True)
