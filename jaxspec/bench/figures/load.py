"""Owns the figure of a server under load: speed, time and TTFT by concurrency."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from jaxspec.bench.figures import form
from jaxspec.bench.report import spread

TITLE = "A server under load"
NOTE = (
    "Times are medians over requests; where a load was measured several times, marks "
    "are medians of those runs and whiskers go from the least to the most."
)
# Key of a result, label, factor.
PANELS = (
    ("output_throughput", "output tokens/s", 1.0),
    ("median_e2el_ms", "generation time, s", 1e-3),
    ("median_ttft_ms", "time to first token, ms", 1.0),
)
UNLIMITED = math.inf


def draw_load(place: FigureBase, entries: Sequence[form.Result]) -> None:
    """Three panels by concurrency, a row for every request rate; or by rate.

    Args:
        entries: Of `serve`, one for each load, some of which may be equal.
    """
    # Under some loads a server may draft nothing, and then nothing is forced.
    forced = [one for one in entries if form.forced_acceptance(one)]
    form.head(place, TITLE, (forced or entries)[0])
    axis, rows = _layout(entries)
    grid = place.subplots(len(rows), len(PANELS), sharex=True, squeeze=False)
    for row, rate in zip(grid, rows, strict=True):
        here = [one for one in entries if rate in (None, _place_of(one)[1])]
        for axes, (key, label, factor) in zip(row, PANELS, strict=True):
            is_last = key == PANELS[-1][0]
            _panel(axes, _series(here, key, factor, axis), is_labelled=is_last)
            told = f"\n{rate:g} requests/s" if len(rows) > 1 else ""
            axes.set_ylabel(f"{label}{told}")
    for axes in grid[-1]:
        axes.set_xlabel("requests at a time" if axis == 0 else "requests/s")


def num_rows(entries: Sequence[form.Result]) -> int:
    """How many rows of panels `draw_load` makes."""
    return len(_layout(entries)[1])


def _layout(entries: Sequence[form.Result]) -> tuple[int, list[float | None]]:
    """What the panels go by (0: concurrency, 1: rate), and the rate of every row."""
    limits, rates = ({_place_of(one)[i] for one in entries} for i in (0, 1))
    if len(limits) > 1 or len(rates) == 1:
        return 0, [*sorted(rates)]
    return 1, [None]


def _place_of(entry: form.Result) -> tuple[float, float]:
    """A load's concurrency and rate; infinity is no limit."""
    return float(entry["max_concurrency"] or UNLIMITED), float(entry["request_rate"])


def _series(
    entries: Sequence[form.Result], key: str, factor: float, axis: int
) -> dict[str, dict[float, form.Spread]]:
    """One measure by mode and place: over all runs of the same load."""
    found: dict[str, dict[float, list[float]]] = {}
    # Under some loads a server may draft nothing.
    has_drafts = any("spec_decode_num_drafts" in entry for entry in entries)
    for entry in entries:
        modes: dict[str, Any] = {"speculative" if has_drafts else "as served": entry}
        if "plain" in entry:
            modes["plain"] = entry["plain"]
        for name, one in modes.items():
            if key in one:
                by_place = found.setdefault(name, {})
                by_place.setdefault(_place_of(entry)[axis], []).append(
                    factor * one[key]
                )
    return {
        name: {at: spread(by_place[at]) for at in sorted(by_place)}
        for name, by_place in found.items()
    }


def _panel(
    axes: Axes, series: dict[str, dict[float, form.Spread]], *, is_labelled: bool
) -> None:
    places = sorted({at for found in series.values() for at in found})
    xs = positions(places)
    for name, found in series.items():
        mark = form.PLAIN if name == "plain" else form.SPECULATIVE
        form.line(axes, [xs[at] for at in found], list(found.values()), mark)
        last = max(found)
        if is_labelled:
            form.label_end(axes, found[last]["median"], name, mark.color)
    names = ["all" if at == UNLIMITED else f"{at:g}" for at in places]
    axes.set_xticks(list(xs.values()), names)
    form.start_at_zero(axes)


def positions(places: Sequence[form.Number]) -> dict[form.Number, float]:
    """Where values stand on an axis of powers of two; no limit is one step beyond."""
    finite = [at for at in places if at != UNLIMITED]
    found = {at: math.log2(at) for at in finite}
    if len(finite) < len(places):
        found[UNLIMITED] = max(found.values(), default=-1.0) + 1.0
    return found
