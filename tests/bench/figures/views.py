"""What a figure shows, as numbers and texts; and what every figure must keep to."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle


def xs_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def spans_of(axes: Axes) -> list[list[float]]:
    """The lower and the upper end of every whisker, in the order they were drawn."""
    return [
        np.asarray(path.vertices)[:, 1].tolist()
        for one in axes.collections
        for path in one.get_paths()
    ]


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def heights_of(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in bars_of(axes)]


def labels_of(axes: Axes) -> list[str]:
    """Texts within and beside the axes, ticks excepted."""
    return [text.get_text() for text in axes.texts]


def ticks_of(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def assert_in_view(figure: Figure) -> None:
    """All that is drawn lies within the limits of its axes, which begin at zero."""
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        lines = [line for line in axes.lines if line.get_marker() != "None"]
        points = [*(zip(xs_of(line), ys_of(line), strict=True) for line in lines)]
        paths = [path for one in axes.collections for path in one.get_paths()]
        points += [np.asarray(path.vertices).tolist() for path in paths]
        points += [[bar.get_xy(), bar.get_corners()[2]] for bar in bars_of(axes)]
        assert points
        assert low == 0
        for x, y in (point for line in points for point in line):
            assert left <= x <= right
            assert low <= y <= high
