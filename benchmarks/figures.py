"""Draw the figures of the README from the results in git.

    python -m benchmarks.figures

writes benchmarks/figures/*.svg; missing results are reported, and the rest is drawn.
Needs the extra `bench`, not jax.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import drawing
from benchmarks.draft_tables import COSTS_FILE, GOAL, REAL_DRAFTS_FILE
from benchmarks.panels import load_figure, spec_figures
from benchmarks.readme_table import form_rows, prompts_of
from benchmarks.training import fit_curve, text_curves, tokens_for, tokens_read
from jaxspec.bench.method_report import chosen_speed
from jaxspec.bench.report import spread

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "results", HERE / "figures"
# `jaxspec.bench spec --output-json`, and `serve --save-result`: a line for every load.
SPEC, SERVE = "spec-cpu.json", "serve-cpu.json"
CONTROL = "control-cpu.json"  # of `python -m benchmarks.control`
REAL = "peers-real-cpu.json"  # of `python -m benchmarks.peers --real`
TRAINING = "training-270m.json"  # of `python -m benchmarks.training`
METHODS = "methods-*.json"  # of `jaxspec.bench spec --all-methods`
SPEC_NAMES = {
    "speed_up": "speed-up",
    "acceptance": "acceptance-by-position",
    "parts": "round-parts",
}
WIDTH, HEIGHT = 8.5, 3.2
# Panels and lines of the figure of computed costs: (target, device), and drafters.
COST_PLACES = (("4b", "v5e-1"), ("12b", "v6e-1"), ("27b", "h100"))
COST_DRAFTERS = ("DFlash", "270m model, trimmed", "EAGLE-3 head", "1b model, trimmed")
# Lines of the figure of training, by the names of runs.
TRAINED = ("EAGLE-3", "DFlash", "4 layers of the target", "EAGLE-3, random start")
TRAINING_GOAL = "1.4"
# Share of a copy's bandwidth that decoding in bfloat16 should reach.
REAL_GOAL = 0.75
GPU_LABELS = {
    "9b-2b": "9B with 2B",
    "27b-2b": "27B with 2B",
    "4b-270m": "4B with 270M",
}

Result = dict[str, Any]


def draw_all(results: Path) -> tuple[dict[str, Figure], list[str]]:
    """Return all figures that have a result, by name, and a list of missing results."""
    figures: dict[str, Figure] = {}
    missing: list[str] = []
    if lines := _lines(results / SERVE):
        figures["load"] = load_figure(lines)
    else:
        missing.append(f"{SERVE}: no figure of a server under load")
    if lines := _lines(results / SPEC):
        for name, figure in spec_figures(lines[-1]).items():
            figures[SPEC_NAMES[name]] = figure
    else:
        missing.append(f"{SPEC}: none of speed-up, acceptance and parts of a round")
    pairs = [_lines(path)[-1] for path in results.glob("cpu_pair-*.json")]
    full = [result for result in pairs if not result["arguments"]["quick"]]
    if full:
        newest = max(full, key=lambda result: result["date"])
        figures["acceptance-by-domain"] = by_domain(newest)
    else:
        missing.append("cpu_pair-*.json: none of acceptance by domain")
    if lines := _lines(results / CONTROL):
        figures |= control_figures(lines[-1])
    else:
        missing.append(f"{CONTROL}: none of how K is chosen")
    methods = [line for path in sorted(results.glob(METHODS)) for line in _lines(path)]
    if methods:
        figures["methods"] = by_method(methods)
    else:
        missing.append(f"{METHODS}: none of ways to propose drafts")
    if lines := _lines(results / COSTS_FILE):
        figures["draft-costs"] = draft_costs(lines[0])
    else:
        missing.append(f"{COSTS_FILE}: none of the computed costs of drafts")
    if lines := _lines(results / TRAINING):
        figures["training"] = training_curves(lines[0])
        if "by_text" in lines[0]:
            figures["training-text"] = text_sizes(lines[0])
    else:
        missing.append(f"{TRAINING}: none of the training of drafts")
    if lines := _lines(results / REAL_DRAFTS_FILE):
        figures["real-drafts"] = real_drafts(lines[0])
    else:
        missing.append(f"{REAL_DRAFTS_FILE}: none of drafts of Gemma 3 270M")
    real = _lines(results / REAL)
    if real and form_rows(real[0]):
        figures["real-bandwidth"] = real_bandwidth(real[0])
    else:
        missing.append(f"{REAL}: none of the bandwidth at real sizes")
    gpu = _gpu_figures(results)
    if not gpu:
        missing.append("device-*.json: none of a TPU or GPU")
    return figures | gpu, missing


def _lines(path: Path) -> list[Result]:
    """Read the results of a file: JSON, or one per line; none without the file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.split("\n") if line]


def by_domain(result: Result) -> Figure:
    """Draw acceptance and speed-up by domain, from `make bench`."""
    modes = result["modes"]
    domains = list(modes["greedy"]["rows"])
    repeats, count = result["arguments"]["repeats"], modes["greedy"]["rows"]["all"]
    note = (
        f"K = {result['arguments']['num_speculative_tokens']}, batch 1, "
        f"{count['num_prompts']} prompts, {repeats} runs. Acceptance: of all rounds. "
        "Speed-up: medians over prompts, whiskers from the lowest to the highest.\n"
    )
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note + drawing.provenance(result))
        drawing.head(figure, "Acceptance and speed-up by the kind of text", result)
        grid = figure.subplots(1, 2)
        for number, (mode, result_of) in enumerate(modes.items()):
            rows = [result_of["rows"][domain] for domain in domains]
            xs = [place + 0.4 * number - 0.2 for place in range(len(domains))]
            rates = [drawing.single(row["acceptance_rate"]) for row in rows]
            mark = drawing.MARKS[number]
            drawing.bars(
                grid[0], xs, rates, mark, width=0.4, label=_controls(mode, result_of)
            )
            drawing.bars(grid[1], xs, [_range(row) for row in rows], mark, width=0.4)
        for axes, title in zip(
            grid, ("acceptance rate", "speed-up over plain decoding"), strict=True
        ):
            axes.set_title(title)
            axes.set_xticks(range(len(domains)), domains)
        grid[0].set_ylim(0, 1)
        grid[0].yaxis.set_major_formatter("{x:.0%}")
        grid[1].axhline(1.0, color="0.35", linewidth=1.0)
        figure.legend(loc="outside upper right", ncols=len(modes))
    return figure


def _controls(mode: str, result: Result) -> str:
    controls = result["controls"]
    if not controls["temperature"]:
        return mode
    return f"temperature {controls['temperature']:g}, top-p {controls['top_p']:g}"


def _range(row: Result) -> drawing.Spread:
    least, most = row["speed_up_range"]
    return {"median": row["speed_up"], "least": least, "most": most}


def by_method(results: list[Result]) -> Figure:
    """Draw the speed-up of every proposer at batch 1, a panel per result."""
    note = "Speed-up: medians of runs in turn, whiskers from minimum to maximum.\n"
    with drawing.style():
        note += "\n".join(map(drawing.provenance, results))
        figure = drawing.new_figure(WIDTH, HEIGHT + 0.6, note)
        drawing.head(figure, "Speed-up of every proposer over plain decoding", {})
        grid = figure.subplots(1, len(results), squeeze=False)[0]
        for axes, result in zip(grid, results, strict=True):
            names = [one["name"].split()[0] for one in result["methods"]]
            points = [
                point
                for point in result["methods"][0]["points"]
                if point["batch_size"] == 1
            ]
            temperatures = sorted({point["temperature"] for point in points})
            width = 0.8 / len(temperatures)
            for number, temperature in enumerate(temperatures):
                left = (number - (len(temperatures) - 1) / 2) * width
                drawing.bars(
                    axes,
                    [place + left for place in range(len(names))],
                    [_speed_at(one, temperature) for one in result["methods"]],
                    drawing.MARKS[number],
                    width=width,
                    label=f"temperature {temperature:g}",
                )
            axes.axhline(1.0, color="0.35", linewidth=1.0)
            axes.set_title(f"{prompts_of(result).removesuffix(' prompts')} prompts")
            axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
            axes.legend()
        grid[0].set_ylabel("speed-up")
    return figure


def _speed_at(method: Result, temperature: float) -> drawing.Spread:
    (found,) = (
        point["decode_speed_up"]
        for point in method["points"]
        if (point["batch_size"], point["temperature"]) == (1, temperature)
    )
    return found


def real_drafts(result: Result) -> Figure:
    """Draw the speed-up of every proposer for Gemma 3 270M, a panel per batch size."""
    points = [point for one in result["methods"] for point in one["points"]]
    sizes = sorted({point["batch_size"] for point in points})
    temperatures = sorted({point["temperature"] for point in points})
    note = (
        "K chosen by the engine. Bars: medians over kinds of prompts, whiskers from "
        f"the slowest to the fastest kind. Dotted: the goal {GOAL:g}, for the best "
        "method at batch 1.\n"
    )
    with drawing.style():
        note += drawing.provenance(result)
        figure = drawing.new_figure(WIDTH, HEIGHT + 0.9, note)
        drawing.head(figure, "Measured speed-up of drafts of Gemma 3 270M", {})
        grid = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        width = 0.8 / len(temperatures)
        for axes, size in zip(grid, sizes, strict=True):
            for number, temperature in enumerate(temperatures):
                left = (number - (len(temperatures) - 1) / 2) * width
                speeds = {
                    place + left: found
                    for place, one in enumerate(result["methods"])
                    if (found := _chosen_speeds(one, temperature, size))
                }
                if speeds:
                    drawing.bars(
                        axes,
                        list(speeds),
                        list(map(spread, speeds.values())),
                        drawing.MARKS[number],
                        width=width,
                        label=f"temperature {temperature:g}",
                    )
            axes.axhline(1.0, color="0.35", linewidth=1.0)
            if size == 1:
                axes.axhline(GOAL, color="0.35", linewidth=1.0, linestyle=":")
            axes.set_title(f"batch {size}")
            names = [one["name"].split()[0] for one in result["methods"]]
            axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        grid[0].set_ylabel("speed-up")
        grid[0].legend()
    return figure


def _chosen_speeds(method: Result, temperature: float, size: int) -> list[float]:
    """Return the speed-ups with the chosen K, one for each kind of prompts."""
    return [
        chosen_speed(point)
        for point in method["points"]
        if (point["temperature"], point["batch_size"]) == (temperature, size)
    ]


def draft_costs(result: Result) -> Figure:
    """Draw the computed speed-up by acceptance, a panel per target and device."""
    note = (
        "Computed from the bytes that rounds read, with the best K for each acceptance "
        "(the same at every position): upper bounds, not measured. "
        f"Commit {result['commit']}."
    )
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note)
        drawing.head(figure, "Computed speed-up of drafts by acceptance, batch 1", {})
        grid = figure.subplots(1, len(COST_PLACES), sharey=True, squeeze=False)[0]
        for axes, (target, device) in zip(grid, COST_PLACES, strict=True):
            for name, mark in zip(COST_DRAFTERS, drawing.MARKS, strict=True):
                rows = _rows(result, target=target, device=device, drafter=name)
                for row in rows:
                    curve = list(map(drawing.single, row["curve"]))
                    drawing.line(axes, result["acceptances"], curve, mark)
                    if axes is grid[-1]:
                        drawing.label_end(axes, row["curve"][-1], name, mark.color)
            axes.axhline(1.0, color="0.35", linewidth=1.0)
            axes.set_title(f"{target} on {device}")
            axes.set_xlabel("acceptance")
        grid[0].set_ylabel("speed-up")
        drawing.start_at_zero(grid[0])
    return figure


def training_curves(result: Result) -> Figure:
    """Draw the held-out acceptance of the first draft by tokens read in training."""
    settings = result["runs"][0]
    note = (
        f"Target: {settings['target']}. Probability that the first draft is accepted "
        f"at temperature 1, on {settings['settings']['held_out_rows']} held-out texts. "
        "Horizontal lines: acceptance that a draft needs for 1.4 times the speed of "
        "plain decoding at batch 1, computed from bytes, in the colors of the drafts."
    )
    runs = [run for run in result["runs"] if run["name"] in TRAINED]
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note)
        drawing.head(figure, "Acceptance during the training of drafts", {})
        axes = figure.subplots()
        for run in runs:
            mark = drawing.MARKS[TRAINED.index(run["name"])]
            heights = [entry["sampled"][0] for entry in run["log"]]
            tokens = [tokens_read(run, entry) / 1e3 for entry in run["log"]]
            drawing.line(axes, tokens, list(map(drawing.single, heights)), mark)
            drawing.label_end(axes, heights[-1], run["name"], mark.color)
            rows = _rows(result["needed"], name=run["name"])
            if rows and (needed := rows[0]["acceptance"][TRAINING_GOAL]) is not None:
                axes.axhline(needed, color=mark.color, linewidth=1.0)
        axes.set_xlabel("tokens read in training, thousands")
        axes.set_ylabel("acceptance")
        drawing.start_at_zero(axes)
    return figure


def text_sizes(result: Result) -> Figure:
    """Draw the held-out acceptance by the size of the text, and fits up to the goal."""
    curves = text_curves(result)
    run = result["by_text"][0]
    note = (
        f"Target: {run['target']}. Equal acceptance that gives the tokens per round of "
        f"the last step, on {run['settings']['held_out_rows']} held-out texts. Lines: "
        "fits over the logarithm of the size. Horizontal: acceptance for 1.4 times "
        "the speed of plain decoding at batch 1, computed from bytes.\n"
    )
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note)
        drawing.head(figure, "Acceptance by the size of the training text", {})
        axes = figure.subplots()
        for name, points in curves.items():
            mark = drawing.MARKS[TRAINED.index(name)]
            tokens, rates = zip(*points, strict=True)
            axes.plot(
                tokens, rates, mark.marker, color=mark.color, markerfacecolor=mark.fill
            )
            (row, *_) = _rows(result["needed"], name=name)
            needed = row["acceptance"][TRAINING_GOAL]
            axes.axhline(needed, color=mark.color, linewidth=1.0, linestyle=":")
            rise, start = fit_curve(points)
            end = tokens_for(points, needed) or tokens[-1]
            ends = [tokens[0], max(end, tokens[-1])]
            heights = [rise * math.log2(one) + start for one in ends]
            axes.plot(ends, heights, mark.line, color=mark.color)
            drawing.label_end(axes, heights[-1], name, mark.color)
        axes.set_xscale("log")
        axes.set_xlabel("tokens of text")
        axes.set_ylabel("acceptance")
        drawing.start_at_zero(axes)
    return figure


CONTROLLED = {"adaptive": drawing.SPECULATIVE, "fixed": drawing.MARKS[1]}
CONTROLLED_SIZES = (1, 8)


def control_figures(result: Result) -> dict[str, Figure]:
    """Draw a figure for each part of `benchmarks.control` that was run."""
    kinds = {"cells": by_acceptance, "step": over_steps, "ramp": over_ramp}
    names = {"cells": "adaptive", "step": "adaptive-step", "ramp": "adaptive-ramp"}
    # Parts may have been measured at different times.
    about = result.get("measured", {})
    return {
        names[part]: draw(result | about.get(part, {}))
        for part, draw in kinds.items()
        if result.get(part) and not result["arguments"]["quick"]
    }


@contextlib.contextmanager
def _controlled(
    result: Result, title: str, note: str, panels: int
) -> Iterator[list[Axes]]:
    """Draw panels side by side under a title."""
    with drawing.style():
        note = f"{note}\n{drawing.provenance(result)}"
        figure = drawing.new_figure(WIDTH, HEIGHT, note)
        drawing.head(figure, title, {}, forced="acceptance forced as labelled")
        yield list(figure.subplots(1, panels, squeeze=False)[0])


def by_acceptance(result: Result) -> Figure:
    """Draw the speed-up by forced acceptance, with fixed K and with adaptive K."""
    most, found = result["num_drafts"], dict[int, list[Result]]()
    for row in result["cells"]:
        if row["batch"] in CONTROLLED_SIZES:
            found.setdefault(row["batch"], []).append(row)
    note = (
        f"Fixed: K = {most} in every round. Adaptive: K of every round chosen, up to "
        f"{most}. {_control_note(result)}, whiskers from the lowest to the highest."
    )
    title = "Speed-up over plain decoding, K fixed and adaptive"
    with _controlled(result, title, note, len(found)) as grid:
        for axes, (size, rows) in zip(grid, found.items(), strict=True):
            axes.axhline(1.0, color="0.35", linewidth=1.0)
            for kind, mark in CONTROLLED.items():
                speeds = [row[f"{kind}_by_plain"] for row in rows]
                drawing.line(axes, [row["acceptance"] for row in rows], speeds, mark)
                label = kind if kind == "adaptive" else f"K = {most}"
                drawing.label_end(axes, speeds[-1]["median"], label, mark.color)
            axes.set_title(f"batch {size}")
            axes.set_xlabel("acceptance rate")
            drawing.start_at_zero(axes)
        grid[0].set_ylabel("speed-up")
    return _figure_of(grid)


def over_steps(result: Result) -> Figure:
    """Draw tokens/s over time while the forced acceptance jumps."""
    rows, phase_s = result["step"], result["arguments"]["phase_s"]
    title = "Adaptive K while the acceptance jumps"
    note = "Shaded: acceptance 0, elsewhere 0.9. Dashed: plain decoding."
    with _controlled(result, title, note, len(rows)) as grid:
        for axes, row in zip(grid, rows, strict=True):
            for number, phase in enumerate(row["phases"]):
                if not phase["acceptance"]:
                    axes.axvspan(number * phase_s, (number + 1) * phase_s, color="0.9")
            width = len(row["phases"]) * phase_s / len(row["tokens_per_s"])
            _series(axes, row["tokens_per_s"], width, drawing.SPECULATIVE)
            _series(axes, row["plain_tokens_per_s"], width, drawing.PLAIN)
            axes.set_title(f"batch {row['batch']}")
            axes.set_xlabel("seconds")
            drawing.start_at_zero(axes)
        grid[0].set_ylabel("tokens/s")
    return _figure_of(grid)


def over_ramp(result: Result) -> Figure:
    """Draw tokens/s, K and the number of requests while requests come and go."""
    ramp, most = result["ramp"], result["num_drafts"]
    title = "Adaptive K while requests come and go"
    note = f"Forced acceptance {ramp['acceptance']:g}. Right: mean K, and requests."
    width = result["arguments"]["ramp_s"] / len(ramp["num_seqs"])
    with _controlled(result, title, note, 2) as grid:
        labels = {"plain": "plain", str(most): f"K = {most}", "adaptive": "adaptive"}
        marks = {"plain": drawing.PLAIN, str(most): CONTROLLED["fixed"]}
        for name, label in labels.items():
            mark = marks.get(name, drawing.SPECULATIVE)
            _series(grid[0], ramp["ways"][name]["tokens_per_s"], width, mark, label)
        drafts = ramp["ways"]["adaptive"]["num_drafts"]
        _series(grid[1], drafts, width, drawing.SPECULATIVE, "mean K")
        _series(grid[1], ramp["num_seqs"], width, drawing.PLAIN, "requests")
        for axes, name in zip(grid, ("tokens/s", "K, requests"), strict=True):
            axes.set_title(name)
            axes.set_xlabel("seconds")
            drawing.start_at_zero(axes)
            axes.legend()
    return _figure_of(grid)


def _series(
    axes: Axes,
    values: list[float | None],
    width: float,
    mark: drawing.Mark,
    label: str | None = None,
) -> None:
    """Draw a line through the middles of the bins that have a value."""
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    xs, ys = [(i + 0.5) * width for i, _ in points], [value for _, value in points]
    axes.plot(xs, ys, color=mark.color, linestyle=mark.line, label=label)


def _control_note(result: Result) -> str:
    arguments = result["arguments"]
    return f"{arguments['num_tokens']} tokens, {arguments['repeats']} runs in turn"


def _figure_of(grid: list[Axes]) -> Figure:
    figure = grid[0].get_figure()
    assert isinstance(figure, Figure)
    return figure


def _gpu_figures(results: Path) -> dict[str, Figure]:
    """Draw the figures of every measured TPU and GPU, without dry runs."""
    kinds: dict[str, Callable[[Result], Figure | None]] = {
        "speed-up": gpu_speed_up,
        "bandwidth": gpu_bandwidth,
    }
    found = {}
    paths = [*results.glob("gpu-*.json"), *results.glob("device-*.json")]
    for path in sorted(paths):
        (result,) = _lines(path)
        if result["is_dry_run"]:
            continue
        for kind, draw in kinds.items():
            figure = draw(result)
            if figure is not None:
                found[f"{path.stem}-{kind}"] = figure
    return found


def _rows(result: Result, **wanted: Any) -> list[Result]:
    return [
        row
        for row in result["rows"]
        if all(row.get(name) == value for name, value in wanted.items())
    ]


def gpu_speed_up(result: Result) -> Figure | None:
    """Draw each pair's speed-up by K and forced acceptance, with its upper bound."""
    rounds = _rows(result, what="round", acceptance="synthetic")
    if not rounds:
        return None
    pairs = list(dict.fromkeys(row["pair"] for row in rounds))
    note = (
        "Solid: measured, medians, whiskers from minimum to maximum. Dotted: the "
        "ceiling E / (1 + K c), with the measured cost c of a draft's step.\n"
    )
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT + 0.4, note + _gpu_provenance(result))
        title = "Speed-up of rounds over plain steps, full-size Gemma"
        forced = "acceptance forced as labelled, random weights"
        drawing.head(figure, title, {}, forced=forced)
        grid = figure.subplots(1, len(pairs), sharey=True, squeeze=False)
        for axes, pair in zip(grid[0], pairs, strict=True):
            here = [row for row in rounds if row["pair"] == pair]
            _gpu_panel(axes, here)
            axes.set_title(f"{GPU_LABELS.get(pair, pair)}, batch {here[0]['batch']}")
            axes.set_xlabel("K, drafts per round")
        drawing.start_at_zero(grid[0][0])  # the axes share it
        grid[0][0].set_ylabel("speed-up")
    return figure


def _gpu_panel(axes: Axes, rows: Iterable[Result]) -> None:
    axes.axhline(1.0, color="0.35", linewidth=1.0)
    by_acceptance_rate: dict[float, list[Result]] = {}
    for row in rows:
        by_acceptance_rate.setdefault(row["forced_acceptance"], []).append(row)
    for number, (acceptance, found) in enumerate(sorted(by_acceptance_rate.items())):
        found.sort(key=lambda row: row["num_drafts"])
        mark = drawing.MARKS[number % len(drawing.MARKS)]
        counts = [row["num_drafts"] for row in found]
        ceilings = [row["ceiling"] for row in found]
        axes.plot(counts, ceilings, color=mark.color, linestyle=":")
        speeds = [_speed_up(row) for row in found]
        solid = drawing.Mark(color=mark.color, fill=mark.fill, marker=mark.marker)
        drawing.line(axes, counts, speeds, solid)
        height, label = speeds[-1]["median"], f"acceptance {acceptance:g}"
        drawing.label_end(axes, height, label, mark.color)
        axes.set_xticks(counts)


def _speed_up(row: Result) -> drawing.Spread:
    """Return the speed-up, whose spread is that of the round time alone."""
    round_us = row["round_us"]
    by_median = row["speed_up"] * round_us["median"]
    return {
        "median": row["speed_up"],
        "least": by_median / round_us["most"],
        "most": by_median / round_us["least"],
    }


def gpu_bandwidth(result: Result) -> Figure | None:
    """Draw the share of a copy's bandwidth that plain steps reach, and the goal."""
    steps = _rows(result, what="plain")
    if not steps:
        return None
    # The same draft model is measured with several targets: use its first measurement.
    by_place: dict[tuple[str, int], Result] = {}
    for row in steps:
        by_place.setdefault((row["model"], row["batch"]), row)
    read = {model: row["bytes_read"] for (model, _), row in by_place.items()}
    models = sorted(read, key=read.__getitem__)
    batches = sorted({batch for _, batch in by_place})
    goal = result["goals"]["plain_share_of_bandwidth"]
    note = (
        "Bytes of weights, keys and values read once, by the time of a step and a "
        "copy's bytes/s; medians, whiskers from minimum to maximum.\n"
    )
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note + _gpu_provenance(result))
        drawing.head(figure, "Plain decoding: share of the memory's bandwidth", {})
        series = {
            f"batch {batch}": {
                name.upper(): _share(by_place[name, batch])
                for name in models
                if (name, batch) in by_place
            }
            for batch in batches
        }
        _share_bars(figure, [name.upper() for name in models], series, goal)
    return figure


def real_bandwidth(result: Result) -> Figure:
    """Draw the share of a copy's bandwidth that 2B shapes reach, by type."""
    rows = form_rows(result)
    about = result | {"target": "Gemma 2 2B's shapes with random weights"}
    note = (
        "Bytes of the weights by the time of a token at batch 1, and a copy's bytes/s "
        "in the same process; medians, whiskers from minimum to maximum.\n"
    )
    series: dict[str, dict[str, drawing.Spread]] = {}
    for row in rows:
        threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        series.setdefault(threads, {})[row["name"]] = {
            name: value / row["batch 1"] * row["share"]
            for name, value in spread(row["runs"]).items()
        }
    names = list(dict.fromkeys(row["name"] for row in rows))
    with drawing.style():
        figure = drawing.new_figure(WIDTH, HEIGHT, note + drawing.provenance(about))
        title = "2B shapes, plain decoding: share of the memory's bandwidth"
        drawing.head(figure, title, {})
        _share_bars(figure, names, series, REAL_GOAL)
    return figure


def _share_bars(
    figure: Figure,
    names: list[str],
    series: dict[str, dict[str, drawing.Spread]],
    goal: float,
) -> None:
    """Draw shares from 0 to 1: a group of bars per name, a bar for each of `series`."""
    axes = figure.subplots()
    width = 0.8 / len(series)
    for number, (label, shares) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        xs = [names.index(name) + offset for name in shares]
        mark = drawing.MARKS[number % len(drawing.MARKS)]
        drawing.bars(axes, xs, list(shares.values()), mark, width=width, label=label)
    axes.axhline(goal, color="black", linewidth=1.0, linestyle="--")
    drawing.label_end(axes, goal, "goal")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    figure.legend(loc="outside upper right", ncols=len(series))


def _share(row: Result) -> drawing.Spread:
    step_us, share = row["step_us"], row["share_of_bandwidth"]
    by_median = share * step_us["median"]
    return {
        "median": share,
        "least": by_median / step_us["most"],
        "most": by_median / step_us["least"],
    }


def _gpu_provenance(result: Result) -> str:
    devices = dict.fromkeys(row["device"] for row in _rows(result, what="copy"))
    changed = " with local changes" if result["has_changes"] else ""
    return (
        f"{', '.join(devices) or 'unknown device'}; jax "
        f"{result['versions'].get('jax', '-')}; {result['date'][:10]}, commit "
        f"{result['commit']}{changed}."
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    figures, missing = draw_all(options.results)
    options.output.mkdir(exist_ok=True)
    for name, figure in figures.items():
        drawing.save(figure, options.output / f"{name}.svg")
        print(f"Drawn: {name}.svg")
    for one in missing:
        print(f"Missing: {one}")


if __name__ == "__main__":
    main()
