"""What the figures of a run say: a table, and which goals they meet."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.kernels.rivals import READ_ONCE

# 6 rows of 256,000: the round of one sequence with five drafts.
GOAL_SAMPLING = "goal/6x256000"
MODELS = ("2b", "9b", "27b")

Row = dict[str, Any]


def goals(rows: Iterable[Row], implementation: str) -> list[Row]:
    """Compare what was measured with what is wanted; `is_met` is None where it was not.

    Args:
        implementation: Of the rows that are ours.
    """
    times = {
        (row["operation"], row["case"], row["implementation"]): row["back_to_back_us"]
        for row in rows
        if "back_to_back_us" in row
    }
    shares = {
        (row["case"], row["implementation"]): row["share_of_copy"]
        for row in rows
        if row["operation"] == "paged_attention" and "share_of_copy" in row
    }

    def median(operation: str, case: str, name: str = implementation) -> float | None:
        found = times.get((operation, case, name))
        return None if found is None else found["median"]

    found = []
    for model in MODELS:
        verify, decode = f"{model}/tp1/verify", f"{model}/tp1/decode"
        share = shares.get((verify, implementation))
        text = f"{verify}, 8 sequences of 8192: share of copy bandwidth"
        found.append(_goal(text, share, 0.70, is_least=True))
        ratio = _ratio(
            median("paged_attention", verify), median("paged_attention", decode)
        )
        text = f"{model}/tp1: time of 6 queries over time of 1"
        found.append(_goal(text, ratio, 1.15, is_least=False))
    for controls in ("greedy", "sampled", "top-p"):
        case = f"{GOAL_SAMPLING}/{controls}"
        ratio = _ratio(
            median("rejection_sampling", case),
            median("rejection_sampling", case, READ_ONCE),
        )
        text = f"rejection sampling, 6 rows of 256,000, {controls}: time over one read"
        found.append(_goal(text, ratio, 2.0, is_least=False))
    return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _goal(text: str, figure: float | None, limit: float, *, is_least: bool) -> Row:
    is_met = None
    if figure is not None:
        is_met = figure >= limit if is_least else figure <= limit
    return {
        "goal": f"{text} {'>=' if is_least else '<='} {limit}",
        "figure": None if figure is None else round(figure, 3),
        "is_met": is_met,
    }


def goal_lines(found: Iterable[Row]) -> list[str]:
    """Return one line for every goal; one that was not measured says so."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    return [
        f"{words[goal['is_met']]:>12}  {goal['goal']}"
        + ("" if goal["figure"] is None else f": {goal['figure']}")
        for goal in found
    ]


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row["case"],
    "implementation": lambda row: row["implementation"],
    "in a loop, us": lambda row: _spread(row.get("back_to_back_us")),
    "alone, us": lambda row: _spread(row.get("alone_us")),
    "GB/s": lambda row: _number(row.get("gb_per_s"), "{:.1f}"),
    "of copy": lambda row: _number(row.get("share_of_copy"), "{:.0%}"),
    "error": lambda row: _number(row.get("error"), "{:.2g}"),
    "": lambda row: _remark(row),
}


def table(rows: Iterable[Row]) -> str:
    """Return the figures in columns, for a terminal."""
    lines = [list(_COLUMNS)]
    for row in rows:
        lines.append([cell(row) for cell in _COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [map(str.ljust, line, widths) for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _remark(row: Row) -> str:
    if "same_as" in row:
        return f"the shapes of {row['same_as']}"
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    if not row.get("is_within_tolerance", True):
        return "WRONG: not within rounding of the reference"
    return row.get("skipped", "")


def _spread(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.1f} ({found['least']:.1f}-{found['most']:.1f})"


def _number(found: float | None, form: str) -> str:
    return "" if found is None else form.format(found)
