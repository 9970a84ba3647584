"""The style of figures: sizes, marks that differ in grayscale, labels, files.

Figures use no pyplot state and need no display. Each figure also has a description in
words and numbers, so that figures from machines with different fonts can be compared.
"""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

FONT_SIZE, NOTE_SIZE = 9.0, 7.0
# Maximum characters per inch in the font of a note.
NOTE_WIDTH = 18.5
# Points from the edge of the axes to a label, and from one label to the next.
LABEL_DISTANCE, LABEL_GAP = 3.0, 11.0
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "0.4",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelsize": FONT_SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": FONT_SIZE,
    "font.size": FONT_SIZE,
    "grid.color": "0.88",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.0,
    "savefig.dpi": 200,
    # A fixed salt makes the ids in an SVG, and so its bytes, reproducible.
    "svg.hashsalt": "jaxspec",
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
}
# matplotlib leaves a label that begins with an underscore out of legends.
_END_OF_LINE = "_end of a line"

# The static type checker accepts an int for a float; the type checks in tests do not.
Number = float | int
Spread = Mapping[str, Number]
# Benchmark arguments that a figure's note shows, if they are set.
_SHOWN = {
    "num_speculative_tokens": "K = {}",
    "num_prompts": "{} prompts",
    "batch_size": "batch {}",
    "output_len": "{} new tokens",
    "num_iters": "{} runs",
}
Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The style of one series, distinct even without its color.

    Attributes:
        color: Color of lines, and of the edges and hatches of bars.
        fill: Color of bars, and of markers.
    """

    color: str
    fill: str
    marker: str = ""
    line: str = "-"
    hatch: str = ""


PLAIN = Mark(color="0.35", fill="0.92", marker="o", line="--")
SPECULATIVE = Mark(color="#1b3f73", fill="#8fb3dc", marker="s", hatch="////")
# Styles for series that have no fixed style, used one after the other.
MARKS = (
    SPECULATIVE,
    Mark(color="#a8560d", fill="#f6d5ae", marker="^", line="--", hatch="----"),
    Mark(color="#2c7a4b", fill="white", marker="D", line=":", hatch="xxxx"),
    Mark(color="0.35", fill="0.75", marker="v", line="-.", hatch="\\\\\\\\"),
)


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Apply the style, independent of the user's settings."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(width: Number, height: Number, note: str) -> Figure:
    """Make an empty figure with a note at its foot.

    Args:
        width: In inches, like `height`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    most = round(width * NOTE_WIDTH)
    wrapped = "\n".join(textwrap.fill(line, most) for line in note.splitlines())
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=NOTE_SIZE, color="0.35")
    return figure


def head(
    figure: Figure, title: str, result: Result, *, forced: str | None = None
) -> None:
    """Put a title above a figure, with a remark if acceptance was forced.

    Args:
        forced: How acceptance was forced, in words, if the result does not record it.
    """
    forced = forced or forced_acceptance(result)
    if forced:
        title += f"\nSYNTHETIC: {forced}; texts mean nothing"
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_SIZE + 1, weight="bold")


def forced_acceptance(result: Result) -> str:
    """Return how acceptance was forced, in words; "" if it was not."""
    rates = result.get("forced_acceptance")
    if rates is None:
        return ""
    shown = [f"{rate:g}" for rate in rates]
    shown = shown if len(set(shown)) > 1 else shown[:1]
    return f"acceptance forced to {', '.join(shown)}"


def provenance(result: Result) -> str:
    """Describe where, when and how a result was measured, for a figure's note."""
    arguments, machine = dict(result["arguments"]), result["machine"]
    if result["benchmark"] == "spec":
        arguments.pop("num_speculative_tokens")  # the axes show it
    target = result.get("target") or result.get("model_id") or arguments["model"]
    draft = result.get("draft") or arguments.get("speculative_model")
    cores = machine["cores"]
    where = f"{machine['cpu']}, {cores} core{'' if cores == 1 else 's'}"
    if result["benchmark"] == "serve":
        where = f"a server, client on {where}"
    device = result.get("device")
    if isinstance(device, Mapping):
        if device["platform"] != "cpu":
            where = f"{device['count']} x {device['kind']}"
        where = f"{device['dtype']} on {where}"
    how = "".join(
        f"{words.format(arguments[name])}, "
        for name, words in _SHOWN.items()
        if arguments.get(name) is not None
    )
    changed = " with local changes" if result["has_changes"] else ""
    return (
        f"{target}{f' with {draft}' if draft else ''}; {how}{where}; "
        f"jax {result['versions'].get('jax', '-')}; {result['date'][:10]}, commit "
        f"{result['commit']}{changed}."
    )


def line(
    axes: Axes, xs: Sequence[Number], spreads: Sequence[Spread], mark: Mark
) -> None:
    """Draw a line through medians, with whiskers from minimum to maximum."""
    axes.errorbar(
        xs,
        [one["median"] for one in spreads],
        yerr=_whiskers(spreads),
        color=mark.color,
        marker=mark.marker,
        markerfacecolor=mark.fill,
        linestyle=mark.line,
        elinewidth=1.0,
    )


def bars(
    axes: Axes,
    xs: Sequence[Number],
    spreads: Sequence[Spread],
    mark: Mark,
    *,
    width: float = 0.8,
    label: str | None = None,
) -> None:
    """Draw bars of medians, with whiskers from minimum to maximum."""
    axes.bar(
        xs,
        [one["median"] for one in spreads],
        width,
        yerr=_whiskers(spreads),
        color=mark.fill,
        edgecolor=mark.color,
        hatch=mark.hatch,
        label=label,
        error_kw={"elinewidth": 1.0, "ecolor": "black"},
    )


def single(value: Number) -> Spread:
    """Return the spread of a single value."""
    return {"median": value, "least": value, "most": value}


def _whiskers(spreads: Sequence[Spread]) -> Any:
    """Return lengths below and above the medians; None without a spread."""
    # Clip at 0: the mean of equal values may round to a value outside of them.
    below = [max(one["median"] - one["least"], 0.0) for one in spreads]
    above = [max(one["most"] - one["median"], 0.0) for one in spreads]
    return (below, above) if any(below) or any(above) else None


def start_at_zero(axes: Axes) -> None:
    """Start the y axis at zero; call it after everything is drawn."""
    axes.set_ylim(0, 1.02 * axes.get_ylim()[1])


def label_end(axes: Axes, y: Number, text: str, color: str = "black") -> None:
    """Label a line at the right edge; `save` separates labels that are too close.

    Args:
        y: End of the line.
    """
    axes.annotate(
        text,
        (1, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(LABEL_DISTANCE, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_SIZE - 1,
        color=color,
        label=_END_OF_LINE,
        annotation_clip=False,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the suffix; equal figures give equal bytes.

    An SVG has the text of `described` as its description.
    """
    kind = path.suffix.lower().removeprefix(".")
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Description": described(figure)},
        "pdf": {"CreationDate": None},
    }
    with style():
        figure.draw_without_rendering()  # fixes the layout
        for axes in figure.axes:
            _part_labels(axes, figure.dpi / 72)
        figure.savefig(path, format=kind, metadata=metadata.get(kind))


def _part_labels(axes: Axes, dots_per_point: float) -> None:
    labels = [
        one
        for one in axes.texts
        if isinstance(one, Annotation) and one.get_label() == _END_OF_LINE
    ]
    dots = [axes.transData.transform((0, one.xy[1]))[1] for one in labels]
    heights = [float(one) / dots_per_point for one in dots]
    for one, height, placed in zip(
        labels, heights, parted(heights, LABEL_GAP), strict=True
    ):
        one.set_position((LABEL_DISTANCE, placed - height))


def parted(heights: Sequence[Number], gap: Number) -> list[float]:
    """Return the nearest heights in the same order that are at least `gap` apart.

    Least squares (isotonic regression): heights minus the gaps below them must not
    decrease; where they do, neighbors get their mean.
    """
    order = np.argsort(heights, kind="stable")
    groups: list[list[float]] = []
    for rank, i in enumerate(order):
        groups.append([heights[i] - rank * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    flat = [float(np.mean(group)) for group in groups for _ in group]
    found = [0.0] * len(heights)
    for rank, i in enumerate(order):
        found[i] = flat[rank] + rank * gap
    return found


def described(figure: Figure) -> str:
    """Return everything that a figure shows, without positions on the page."""
    lines = []
    lines += [figure.get_suptitle(), figure.get_supxlabel()]
    for legend in figure.legends:
        lines += [text.get_text() for text in legend.get_texts()]
    for axes in figure.axes:
        lines += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), FixedLocator):
                ticks = axis.get_major_formatter().format_ticks(
                    list(axis.get_ticklocs())
                )
                lines.append(" | ".join(ticks))
        lines += [_numbers(one.get_xydata()) for one in axes.lines]
        for collection in axes.collections:
            lines += [_numbers(path.vertices) for path in collection.get_paths()]
        for patch in axes.patches:
            assert isinstance(patch, Rectangle)
            corners = (patch.get_xy(), (patch.get_width(), patch.get_height()))
            lines.append(f"bar {_numbers(corners)} {patch.get_hatch() or ''}".rstrip())
        lines += [text.get_text() for text in axes.texts]
    return "\n".join(line for line in lines if line)


def _numbers(values: Any) -> str:
    return " ".join(f"{value:.4g}" for value in np.ravel(values))
