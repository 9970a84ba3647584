"""Owns the figure of speed-up by K, beside the ceilings that acceptance allows."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from jaxspec.bench.figures import form

TITLE = "Decoding with K drafts a round, by plain decoding"
CEILINGS = {
    "measured": (
        "ceiling, passes as timed",
        form.Mark(color="#a8560d", fill="white", marker="v", line="--"),
    ),
    "bytes": (
        "ceiling, bytes alone",
        form.Mark(color="0.35", fill="white", marker="^", line=":"),
    ),
}
_OURS = form.Mark(color="#1b3f73", fill="#1b3f73", marker="s")


def draw_speed_up(place: FigureBase, result: form.Result) -> None:
    """A panel for every batch size, a row for every temperature.

    Args:
        result: Of `spec`.
    """
    form.head(place, TITLE, result)
    points = result["points"]
    rows = sorted({point["temperature"] for point in points})
    columns = sorted({point["batch_size"] for point in points})
    grid = place.subplots(
        len(rows), len(columns), sharex=True, sharey=True, squeeze=False
    )
    for point in points:
        row = rows.index(point["temperature"])
        column = columns.index(point["batch_size"])
        axes: Axes = grid[row][column]
        _panel(axes, point, is_labelled=column == len(columns) - 1)
        if row == 0:
            axes.set_title(f"batch {point['batch_size']}")
        if row == len(rows) - 1:
            axes.set_xlabel("K, drafts a round")
        if column == 0:
            axes.set_ylabel(f"temperature {point['temperature']:g}\nspeed-up")
    form.start_at_zero(grid[0][0])  # and with it the others


def _panel(axes: Axes, point: dict[str, Any], *, is_labelled: bool) -> None:
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
            heights = [form.single(height) for height in found.values()]
            form.line(axes, list(found), heights, mark)
            ends[label] = (found[max(found)], mark.color)
    speeds = [one["decode_speed_up"] for one in by_k.values()]
    form.line(axes, list(by_k), speeds, _OURS)
    ends["measured"] = (speeds[-1]["median"], _OURS.color)
    axes.set_xticks(list(by_k))
    if is_labelled:
        for label, (y, color) in ends.items():
            form.label_end(axes, y, label, color)
