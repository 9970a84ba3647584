"""Owns which figures show a result: each by itself, and together as `--plot` draws."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure, FigureBase

from jaxspec.bench.figures import form
from jaxspec.bench.figures.acceptance import draw_acceptance
from jaxspec.bench.figures.load import NOTE as LOAD_NOTE
from jaxspec.bench.figures.load import draw_load, num_rows
from jaxspec.bench.figures.modes import NOTE as MODES_NOTE
from jaxspec.bench.figures.modes import draw_modes
from jaxspec.bench.figures.parts import draw_parts
from jaxspec.bench.figures.speed_up import draw_speed_up

save = form.save

# Inches: of a row of panels, and of what stands above and below the rows.
WIDTH, ROW_HEIGHT, MARGIN = 8.5, 1.9, 1.0
NOTES = {
    "speed_up": "Speed-up: medians of the runs, whiskers from the least to the most; "
    "the ceiling is what the acceptance measured at that K allows, with the cost of a "
    "draft's pass.",
    "acceptance": "Acceptance: of all rounds, whiskers from the batch size that kept "
    "the least to the one that kept the most.",
    "parts": "Parts: each timed alone, medians; the round as it ran and the host's "
    "share of it: medians of the runs, whiskers from the least to the most.",
}
Draw = Callable[[FigureBase, form.Result], None]
_SPEC: dict[str, Draw] = {
    "speed_up": draw_speed_up,
    "acceptance": draw_acceptance,
    "parts": draw_parts,
}


def picture(result: form.Result | Sequence[form.Result]) -> Figure:
    """Draw what a subcommand has written; of `serve`, the results of all its loads."""
    with form.style():
        if not isinstance(result, Mapping):
            return _load(list(result))
        if result["benchmark"] == "spec":
            return _together(result)
        figure = _new_figure(1, MODES_NOTE, result)
        draw_modes(figure, result)
        return figure


def spec_pictures(result: form.Result) -> dict[str, Figure]:
    """The figures of `spec`, each by itself: `speed_up`, `acceptance`, `parts`."""
    found = {}
    with form.style():
        for name, rows in _spec_rows(result).items():
            found[name] = _new_figure(rows, NOTES[name], result)
            _SPEC[name](found[name], result)
    return found


def _together(result: form.Result) -> Figure:
    rows = _spec_rows(result)
    note = " ".join(NOTES[name] for name in rows)
    figure = _new_figure(sum(rows.values()) + len(rows) / 2, note, result)
    heights = [count + 0.5 for count in rows.values()]
    places = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
    for place, name in zip(places[:, 0], rows, strict=True):
        _SPEC[name](place, result)
    return figure


def _spec_rows(result: form.Result) -> dict[str, float]:
    """The figures that there are data for, and how many rows high each is."""
    temperatures = {point["temperature"] for point in result["points"]}
    rows = {"speed_up": float(len(temperatures)), "acceptance": 1.0, "parts": 1.2}
    return rows if result["parts"] else {k: rows[k] for k in ("speed_up", "acceptance")}


def _load(entries: Sequence[form.Result]) -> Figure:
    figure = _new_figure(num_rows(entries), LOAD_NOTE, entries[0])
    draw_load(figure, entries)
    return figure


def _new_figure(rows: form.Number, note: str, result: form.Result) -> Figure:
    height = ROW_HEIGHT * rows + MARGIN
    return form.new_figure(WIDTH, height, f"{note}\n{form.provenance(result)}")
