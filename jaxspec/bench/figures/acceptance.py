"""Owns the figure of acceptance by position."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import FigureBase

from jaxspec.bench.figures import form

_ASIDE = 0.06
TITLE = "Drafts that stay, by their position in the round"


def draw_acceptance(place: FigureBase, result: form.Result) -> None:
    """A line for every temperature, at the highest K; whiskers over batch sizes.

    Args:
        result: Of `spec`.
    """
    form.head(place, TITLE, result)
    axes = place.subplots()
    points = result["points"]
    count = max(int(k) for point in points for k in point["by_num_draft_tokens"])
    positions = list(range(1, count + 1))
    temperatures = sorted({point["temperature"] for point in points})
    for number, temperature in enumerate(temperatures):
        told = [
            point["by_num_draft_tokens"][str(count)].get("acceptance")
            for point in points
            if point["temperature"] == temperature
        ]
        spreads = kept_by_position([one for one in told if one], count)
        if not spreads:
            continue
        mark = form.MARKS[number % len(form.MARKS)]
        # A little apart, so that no whisker hides another.
        aside = _ASIDE * (number - (len(temperatures) - 1) / 2)
        form.line(axes, [place + aside for place in positions], spreads, mark)
        label = f"temperature {temperature:g}"
        form.label_end(axes, spreads[-1]["median"], label, mark.color)
    axes.set(xticks=positions, ylim=(0, 1.03))
    axes.set_xlabel(f"position, of K = {count} drafts")
    axes.set_ylabel("share of rounds that kept it")
    axes.yaxis.set_major_formatter("{x:.0%}")


def kept_by_position(
    told: Sequence[dict[str, Any]], num_draft_tokens: int
) -> list[form.Spread]:
    """Share of all rounds that kept each draft, and the least and most of any run.

    Args:
        told: Acceptance as results have it, of several runs; empty gives nothing.
    """
    if not told:
        return []
    rates = np.zeros((len(told), num_draft_tokens))
    for row, one in zip(rates, told, strict=True):
        found = one["acceptance_rate_per_position"][:num_draft_tokens]
        row[: len(found)] = found  # nothing was kept any deeper
    rounds = [one["num_drafts"] for one in told]
    middle = np.average(rates, axis=0, weights=rounds)
    columns = zip(middle, rates.min(axis=0), rates.max(axis=0), strict=True)
    return [{"median": m, "least": low, "most": high} for m, low, high in columns]
