"""Owns the figure of where a round's time goes."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

from jaxspec.bench.figures import form

TITLE = "Where a round's time goes"
# From the bottom up.
PARTS = {
    "draft": form.SPECULATIVE,
    "verify": form.PLAIN,
    "accept": form.Mark(color="black", fill="0.3"),
}
_HOST = form.MARKS[1]
_STACK_WIDTH, _HOST_WIDTH = 0.5, 0.22
# Centre of the host's bar from that of the device's.
_HOST_SHIFT = (_STACK_WIDTH + _HOST_WIDTH) / 2 + 0.03


def draw_parts(place: FigureBase, result: form.Result) -> None:
    """The device's parts stacked, the host beside them, the whole round as it ran.

    The host works while the device does, so the two do not add up.

    Args:
        result: Of `spec`, with parts.
    """
    form.head(place, TITLE, result)
    sizes = sorted({part["num_seqs"] for part in result["parts"]})
    grid = place.subplots(1, len(sizes), sharey=True, squeeze=False)
    # Parts are timed with the first temperature's program.
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
        _panel(axes, parts, rounds, is_labelled=size == sizes[-1])
        axes.set_title(f"batch {size}")
        axes.set_xlabel("K, drafts a round; 0: plain")
    grid[0][0].set_ylabel("ms")


def _panel(
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
    told = [(x, rounds[k]) for x, k in zip(places, counts, strict=True)]
    told = [(x, one) for x, one in told if "round_s" in one]
    if told:
        xs, hosts, whole = [x for x, _ in told], [], []
        for _, one in told:
            hosts.append({key: 1e3 * value for key, value in one["host_s"].items()})
            whole.append({key: 1e3 * value for key, value in one["round_s"].items()})
        beside = [x + _HOST_SHIFT for x in xs]
        form.bars(axes, beside, hosts, _HOST, width=_HOST_WIDTH)
        form.line(
            axes, xs, whole, form.Mark(color="black", fill="white", marker="D", line="")
        )
        ends["host, meanwhile"] = (hosts[-1]["median"] / 2, _HOST.color)
        ends["round as it ran"] = (whole[-1]["median"], "black")
    axes.set_xticks(places, [str(count) for count in counts])
    if is_labelled:
        for label, (y, color) in ends.items():
            form.label_end(axes, y, label, color)
