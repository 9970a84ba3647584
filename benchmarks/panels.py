"""Draw the figures of one result of `jaxspec.bench`: `spec`, or the loads of `serve`.

Each function returns a figure; `benchmarks.figures` writes them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import drawing
from jaxspec.bench.report import spread

# Inches: width, height of a row of panels, and space above and below the rows.
WIDTH, ROW_HEIGHT, MARGIN = 8.5, 1.9, 1.0
LOAD_NOTE = (
    "Times are medians over requests; where a load was measured several times, marks "
    "are medians of those runs and whiskers go from minimum to maximum."
)
# Key of a result, label, factor.
LOAD_PANELS = (
    ("output_throughput", "output tokens/s", 1.0),
    ("median_e2el_ms", "generation time, s", 1e-3),
    ("median_ttft_ms", "time to first token, ms", 1.0),
)
UNLIMITED = math.inf
# Horizontal offset between the temperatures of a K, so that whiskers do not overlap.
_OFFSET = 0.06
CEILINGS = {
    "measured": (
        "ceiling, passes as timed",
        drawing.Mark(color="#a8560d", fill="white", marker="v", line="--"),
    ),
    "bytes": (
        "ceiling, bytes alone",
        drawing.Mark(color="0.35", fill="white", marker="^", line=":"),
    ),
}
_MEASURED = drawing.Mark(color="#1b3f73", fill="#1b3f73", marker="s")
# Parts of a round, from the bottom up.
PARTS = {
    "draft": drawing.SPECULATIVE,
    "verify": drawing.PLAIN,
    "accept": drawing.Mark(color="black", fill="0.3"),
}
_HOST = drawing.MARKS[1]
_STACK_WIDTH, _HOST_WIDTH = 0.5, 0.22
# Distance between the centers of the device's bar and the host's bar.
_HOST_SHIFT = (_STACK_WIDTH + _HOST_WIDTH) / 2 + 0.03


def spec_figures(result: drawing.Result) -> dict[str, Figure]:
    """Draw the figures of a result of `spec`, by name; `parts` only if timed."""
    temperatures = {point["temperature"] for point in result["points"]}
    kinds: dict[str, tuple[float, str, Callable[[Figure, drawing.Result], None]]] = {
        "speed_up": (
            len(temperatures),
            "Speed-up: medians of the runs, whiskers from minimum to maximum; the "
            "ceiling is what the acceptance measured at that K allows, with the cost "
            "of a draft's pass.",
            draw_speed_up,
        ),
        "acceptance": (
            1.0,
            "Acceptance: of all rounds, whiskers from the batch size that accepted "
            "least to the one that accepted most.",
            draw_acceptance,
        ),
        "parts": (
            1.2,
            "Parts: each timed alone, medians; the round as it ran and the host's "
            "share of it: medians of the runs, whiskers from minimum to maximum.",
            draw_parts,
        ),
    }
    if not result["parts"]:
        del kinds["parts"]
    found = {}
    with drawing.style():
        for name, (rows, note, draw) in kinds.items():
            found[name] = _new_figure(rows, note, result)
            draw(found[name], result)
    return found


def load_figure(entries: Sequence[drawing.Result]) -> Figure:
    """Draw speed, generation time and TTFT of a server by concurrency, or by rate.

    Args:
        entries: Results of `serve`, one for each load; equal loads are repeats.
    """
    axis, rows = _load_layout(entries)
    with drawing.style():
        figure = _new_figure(len(rows), LOAD_NOTE, entries[0])
        # Label the figure as forced if any load had drafts with forced acceptance:
        # under some loads a server may draft nothing.
        forced = [one for one in entries if drawing.forced_acceptance(one)]
        drawing.head(figure, "A server under load", (forced or entries)[0])
        grid = figure.subplots(len(rows), len(LOAD_PANELS), sharex=True, squeeze=False)
        for row, rate in zip(grid, rows, strict=True):
            here = [one for one in entries if rate in (None, _load_of(one)[1])]
            for axes, (key, label, factor) in zip(row, LOAD_PANELS, strict=True):
                is_last = key == LOAD_PANELS[-1][0]
                _load_panel(axes, _series(here, key, factor, axis), is_last)
                suffix = f"\n{rate:g} requests/s" if len(rows) > 1 else ""
                axes.set_ylabel(f"{label}{suffix}")
        for axes in grid[-1]:
            axes.set_xlabel("requests at a time" if axis == 0 else "requests/s")
    return figure


def _new_figure(rows: drawing.Number, note: str, result: drawing.Result) -> Figure:
    height = ROW_HEIGHT * rows + MARGIN
    return drawing.new_figure(WIDTH, height, f"{note}\n{drawing.provenance(result)}")


def draw_speed_up(figure: Figure, result: drawing.Result) -> None:
    """Draw speed-up by K: a panel per batch size, a row per temperature."""
    drawing.head(figure, "Speed-up over plain decoding with K drafts per round", result)
    points = result["points"]
    rows = sorted({point["temperature"] for point in points})
    columns = sorted({point["batch_size"] for point in points})
    grid = figure.subplots(
        len(rows), len(columns), sharex=True, sharey=True, squeeze=False
    )
    for point in points:
        row = rows.index(point["temperature"])
        column = columns.index(point["batch_size"])
        axes: Axes = grid[row][column]
        _speed_up_panel(axes, point, is_labelled=column == len(columns) - 1)
        if row == 0:
            axes.set_title(f"batch {point['batch_size']}")
        if row == len(rows) - 1:
            axes.set_xlabel("K, drafts per round")
        if column == 0:
            axes.set_ylabel(f"temperature {point['temperature']:g}\nspeed-up")
    drawing.start_at_zero(grid[0][0])  # all panels share the axis


def _speed_up_panel(axes: Axes, point: dict[str, Any], *, is_labelled: bool) -> None:
    by_k = {int(k): one for k, one in point["by_num_draft_tokens"].items()}
    ends = {"plain": (1.0, "0.35")}
    axes.axhline(1.0, color="0.35", linewidth=1.0)
    for name, (label, mark) in CEILINGS.items():
        found = {
            k: one["ceiling"][name]["speed_up_ceiling"]
            for k, one in by_k.items()
            if one["ceiling"] and name in one["ceiling"]
        }
        if found:
            heights = [drawing.single(height) for height in found.values()]
            drawing.line(axes, list(found), heights, mark)
            ends[label] = (found[max(found)], mark.color)
    speeds = [one["decode_speed_up"] for one in by_k.values()]
    drawing.line(axes, list(by_k), speeds, _MEASURED)
    ends["measured"] = (speeds[-1]["median"], _MEASURED.color)
    axes.set_xticks(list(by_k))
    if is_labelled:
        for label, (y, color) in ends.items():
            drawing.label_end(axes, y, label, color)


def draw_acceptance(figure: Figure, result: drawing.Result) -> None:
    """Draw acceptance by position at the highest K; whiskers over batch sizes."""
    drawing.head(figure, "Acceptance by position in the round", result)
    axes = figure.subplots()
    points = result["points"]
    count = max(int(k) for point in points for k in point["by_num_draft_tokens"])
    positions = list(range(1, count + 1))
    temperatures = sorted({point["temperature"] for point in points})
    for number, temperature in enumerate(temperatures):
        runs = [
            point["by_num_draft_tokens"][str(count)].get("acceptance")
            for point in points
            if point["temperature"] == temperature
        ]
        spreads = kept_by_position([one for one in runs if one], count)
        if not spreads:
            continue
        mark = drawing.MARKS[number % len(drawing.MARKS)]
        offset = _OFFSET * (number - (len(temperatures) - 1) / 2)
        drawing.line(axes, [place + offset for place in positions], spreads, mark)
        label = f"temperature {temperature:g}"
        drawing.label_end(axes, spreads[-1]["median"], label, mark.color)
    axes.set(xticks=positions, ylim=(0, 1.03))
    axes.set_xlabel(f"position, of K = {count} drafts")
    axes.set_ylabel("share of rounds that accepted it")
    axes.yaxis.set_major_formatter("{x:.0%}")


def kept_by_position(
    runs: Sequence[dict[str, Any]], num_draft_tokens: int
) -> list[drawing.Spread]:
    """Return the share of rounds that accepted each draft position, with its spread.

    Args:
        runs: The `acceptance` of each run; without runs, the result is empty.
    """
    if not runs:
        return []
    rates = np.zeros((len(runs), num_draft_tokens))
    for row, one in zip(rates, runs, strict=True):
        found = one["acceptance_rate_per_position"][:num_draft_tokens]
        row[: len(found)] = found  # deeper positions kept nothing
    rounds = [one["num_drafts"] for one in runs]
    middle = np.average(rates, axis=0, weights=rounds)
    columns = zip(middle, rates.min(axis=0), rates.max(axis=0), strict=True)
    return [{"median": m, "least": low, "most": high} for m, low, high in columns]


def draw_parts(figure: Figure, result: drawing.Result) -> None:
    """Draw device time of a round by part, host time, and time of whole rounds.

    The host works while the device does, so the two do not add up.
    """
    drawing.head(figure, "Where a round's time goes", result)
    sizes = sorted({part["num_seqs"] for part in result["parts"]})
    grid = figure.subplots(1, len(sizes), sharey=True, squeeze=False)
    # Parts are timed with the program of the first temperature.
    temperature = min(point["temperature"] for point in result["points"])
    for axes, size in zip(grid[0], sizes, strict=True):
        parts = [part for part in result["parts"] if part["num_seqs"] == size]
        (point,) = (
            point
            for point in result["points"]
            if (point["temperature"], point["batch_size"]) == (temperature, size)
        )
        rounds = {0: point["plain"]} | {
            int(k): one for k, one in point["by_num_draft_tokens"].items()
        }
        _parts_panel(axes, parts, rounds, is_labelled=size == sizes[-1])
        axes.set_title(f"batch {size}")
        axes.set_xlabel("K, drafts per round; 0: plain")
    grid[0][0].set_ylabel("ms")


def _parts_panel(
    axes: Axes,
    parts: list[dict[str, Any]],
    rounds: Mapping[int, dict[str, Any]],
    *,
    is_labelled: bool,
) -> None:
    counts = [part["num_draft_tokens"] for part in parts]
    places, bottoms = list(range(len(counts))), [0.0] * len(counts)
    ends: dict[str, tuple[float, str]] = {}
    for name, mark in PARTS.items():
        heights = [1e3 * part[f"{name}_s"] for part in parts]
        axes.bar(
            places,
            heights,
            _STACK_WIDTH,
            bottom=bottoms,
            color=mark.fill,
            edgecolor=mark.color,
            hatch=mark.hatch,
        )
        ends[name] = (bottoms[-1] + heights[-1] / 2, "black")
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    timed = [(x, rounds[k]) for x, k in zip(places, counts, strict=True)]
    timed = [(x, one) for x, one in timed if "round_s" in one]
    if timed:
        xs, hosts, whole = [x for x, _ in timed], [], []
        for _, one in timed:
            hosts.append({key: 1e3 * value for key, value in one["host_s"].items()})
            whole.append({key: 1e3 * value for key, value in one["round_s"].items()})
        shifted = [x + _HOST_SHIFT for x in xs]
        drawing.bars(axes, shifted, hosts, _HOST, width=_HOST_WIDTH)
        mark = drawing.Mark(color="black", fill="white", marker="D", line="")
        drawing.line(axes, xs, whole, mark)
        ends["host, meanwhile"] = (hosts[-1]["median"] / 2, _HOST.color)
        ends["round as it ran"] = (whole[-1]["median"], "black")
    axes.set_xticks(places, [str(count) for count in counts])
    if is_labelled:
        for label, (y, color) in ends.items():
            drawing.label_end(axes, y, label, color)


def _load_layout(
    entries: Sequence[drawing.Result],
) -> tuple[int, list[float | None]]:
    """Return the index of the x axis (0: concurrency, 1: rate), and each row's rate."""
    limits, rates = ({_load_of(one)[i] for one in entries} for i in (0, 1))
    if len(limits) > 1 or len(rates) == 1:
        return 0, [*sorted(rates)]
    return 1, [None]


def _load_of(entry: drawing.Result) -> tuple[float, float]:
    """Return a load's concurrency and rate; infinity is no limit."""
    return float(entry["max_concurrency"] or UNLIMITED), float(entry["request_rate"])


def _series(
    entries: Sequence[drawing.Result], key: str, factor: float, axis: int
) -> dict[str, dict[float, drawing.Spread]]:
    """Return one measure of all runs, by mode and load."""
    found: dict[str, dict[float, list[float]]] = {}
    has_drafts = any("spec_decode_num_drafts" in entry for entry in entries)
    for entry in entries:
        modes: dict[str, Any] = {"speculative" if has_drafts else "as served": entry}
        if "plain" in entry:
            modes["plain"] = entry["plain"]
        for name, one in modes.items():
            if key in one:
                runs = found.setdefault(name, {})
                runs.setdefault(_load_of(entry)[axis], []).append(factor * one[key])
    return {
        name: {at: spread(runs[at]) for at in sorted(runs)}
        for name, runs in found.items()
    }


def _load_panel(
    axes: Axes, series: dict[str, dict[float, drawing.Spread]], is_labelled: bool
) -> None:
    places = sorted({at for found in series.values() for at in found})
    xs = _log_positions(places)
    for name, found in series.items():
        mark = drawing.PLAIN if name == "plain" else drawing.SPECULATIVE
        drawing.line(axes, [xs[at] for at in found], list(found.values()), mark)
        if is_labelled:
            drawing.label_end(axes, found[max(found)]["median"], name, mark.color)
    names = ["all" if at == UNLIMITED else f"{at:g}" for at in places]
    axes.set_xticks(list(xs.values()), names)
    drawing.start_at_zero(axes)


def _log_positions(places: Sequence[float]) -> dict[float, float]:
    """Return positions on an axis of powers of two; "no limit" comes one step after."""
    finite = [at for at in places if at != UNLIMITED]
    found = {at: math.log2(at) for at in finite}
    if len(finite) < len(places):
        found[UNLIMITED] = max(found.values(), default=-1.0) + 1.0
    return found
