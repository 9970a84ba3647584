"""Cells of the measurement, the rows made of them, and the table for the README."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
# File with the reasons why a peer is faster, by "peer" or "peer mode"; hand-written.
WHY = HERE / "behind.json"
NOT_MEASURED = "Not measured yet: run `python -m benchmarks.peers` on a quiet machine."
OURS = "jaxspec"
# Name of this engine with its default, adaptive K. Ratios of peers are relative to
# `OURS`, which has a fixed K.
CHOSEN = f"{OURS} (K chosen)"
PLAIN, DRAFT, NGRAM = MODES = ("plain", "draft", "n-gram")
NAMES = {PLAIN: "plain decoding", DRAFT: "a draft model", NGRAM: "n-grams"}
# End tokens. They are banned for peers that cannot continue after an end token.
END_TOKENS = (1, 107)


@dataclass(kw_only=True)
class Cell:
    """One peer in one mode, at one batch size and number of threads.

    Attributes:
        bans_end: The peer cannot continue after an end token, so end tokens are banned,
            and texts are compared up to the first end token of our text.
        answers: The answers of its child, one per run.
        failed: Reason why there are no further runs, if any.
    """

    peer: str
    mode: str
    dtype: str
    batch_size: int
    threads: int
    bans_end: bool = False
    answers: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Return new tokens per second for every run, prefill included."""
        return [
            sum(map(len, one["token_ids"])) / one["seconds"] for one in self.answers
        ]

    @property
    def texts(self) -> list[list[int]]:
        return self.answers[-1]["token_ids"] if self.answers else []

    def kind(self, *, peer: str | None = None) -> tuple[Any, ...]:
        """Return the key that is equal for cells that can be compared."""
        names = (peer or self.peer, self.mode, self.dtype)
        return (*names, self.batch_size, self.threads)


def rows(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return a row per cell, with its ratio to ours and the share of equal texts."""
    ours = {cell.kind(): median(cell.speeds) for cell in cells if cell.answers}
    # This engine's greedy texts do not depend on drafts or batches, so any of its runs
    # over all prompts can be the reference.
    plain = (OURS, PLAIN, "float32")
    texts = [one.texts for one in cells if (one.peer, one.mode, one.dtype) == plain]
    reference = max(texts, key=len, default=[])
    found = []
    for cell in cells:
        row: dict[str, Any] = {
            "peer": cell.peer,
            "mode": cell.mode,
            "dtype": cell.dtype,
            "batch_size": cell.batch_size,
            "threads": cell.threads,
        }
        if cell.answers:
            row |= _speed(cell)
            row |= _acceptance(cell)
            own = ours.get(cell.kind(peer=OURS))
            if own is not None and cell.peer not in (OURS, CHOSEN):
                row["ours_over_theirs"] = round(own / median(cell.speeds), 3)
            if cell.dtype == "float32":
                row |= _equality(cell, reference)
        if cell.failed:
            row["failed"] = cell.failed
        found.append(row)
    return found


def _speed(cell: Cell) -> dict[str, Any]:
    return {
        "tokens_per_s": [round(speed, 1) for speed in cell.speeds],
        "median_tokens_per_s": round(median(cell.speeds), 1),
        "least_tokens_per_s": round(min(cell.speeds), 1),
        "most_tokens_per_s": round(max(cell.speeds), 1),
    }


def _acceptance(cell: Cell) -> dict[str, float]:
    """Return acceptance over all runs, without values that a peer does not report."""

    def total(name: str) -> int:
        return sum(one["counts"].get(name, 0) for one in cell.answers)

    found = {}
    if total("drafted"):
        found["acceptance_rate"] = round(total("accepted") / total("drafted"), 4)
    if total("rounds"):
        kept = total("accepted") / total("rounds")
        found["mean_acceptance_length"] = round(1 + kept, 3)
    return found


def _equality(cell: Cell, reference: list[list[int]]) -> dict[str, Any]:
    """Count the texts that equal ours."""
    pairs = list(zip(cell.texts, reference, strict=False))
    if cell.bans_end:
        pairs = [_until_end(theirs, ours) for theirs, ours in pairs]
    return {
        "num_texts": len(pairs),
        "num_equal": sum(theirs == ours for theirs, ours in pairs),
    }


def _until_end(theirs: list[int], ours: list[int]) -> tuple[list[int], list[int]]:
    ends = [place for place, token in enumerate(ours) if token in END_TOKENS]
    end = min(ends, default=len(ours))
    return theirs[:end], ours[:end]


def peers_table(
    result: dict[str, Any] | None, why: dict[str, str] | None = None
) -> str:
    """Return the table of tokens/s by engine, mode, batch size and threads.

    Args:
        why: Replaces `behind.json`.
    """
    if result is None:
        return NOT_MEASURED
    reasons = json.loads(WHY.read_text(encoding="utf-8")) if why is None else why
    columns = sorted({(row["batch_size"], row["threads"]) for row in result["rows"]})
    names = [f"batch {size}, {_threads(threads)}" for size, threads in columns]
    lines = [f"| engine | drafts | {' | '.join(names)} | texts equal |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    kinds = dict.fromkeys(
        (row["peer"], row["mode"], row["dtype"])
        for row in result["rows"]
        if "median_tokens_per_s" in row
    )
    for kind in kinds:
        found = {
            (row["batch_size"], row["threads"]): row
            for row in result["rows"]
            if (row["peer"], row["mode"], row["dtype"]) == kind
        }
        cells = [_cell(found.get(column, {})) for column in columns]
        equal = _equal(list(found.values()))
        lines.append(f"| {_name(kind)} | {kind[1]} | {' | '.join(cells)} | {equal} |")
    return "\n".join([*lines, "", *_notes(result), *_behind(result, reasons)])


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _name(kind: tuple[str, str, str]) -> str:
    peer, _, dtype = kind
    return peer if dtype == "float32" else f"{peer}, {dtype}"


def _cell(row: dict[str, Any]) -> str:
    if "median_tokens_per_s" not in row:
        return "-"
    text = f"{row['median_tokens_per_s']:.0f}"
    ratio = row.get("ours_over_theirs")
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _equal(rows: list[dict[str, Any]]) -> str:
    texts = sum(row.get("num_texts", 0) for row in rows)
    return f"{sum(row.get('num_equal', 0) for row in rows)}/{texts}" if texts else "-"


def _notes(result: dict[str, Any]) -> list[str]:
    arguments, machine = result["arguments"], result["machine"]
    versions = ", ".join(
        f"{name} {about['version']}"
        for name, about in result["peers"].items()
        if "version" in about
    )
    notes = "".join(
        f" Note on {name}: {about['note']}."
        for name, about in result["peers"].items()
        if "note" in about
    )
    changed = " with local changes" if result["has_changes"] else ""
    lines = [
        "A cell is the number of new tokens per second; the time includes the prompts. "
        "The number in brackets is jaxspec's speed divided by this engine's speed with "
        "the same kind of drafts: above 1, jaxspec is faster. The last column counts "
        "the texts that equal jaxspec's texts without drafts. Decoding is greedy, in "
        f"float32 unless noted, with {arguments['num_tokens']} new tokens, K = "
        f"{arguments['num_speculative_tokens']} and n-grams of up to "
        f"{result['lookup_max']} tokens. Speeds are medians of up to "
        f"{arguments['repeats']} runs, in which the engines take turns. Batch 1 runs "
        f"{arguments['single_prompts']} prompts one after another; larger batches run "
        f"{arguments['num_prompts']} prompts. Source of the prompts: "
        f"{result['prompts']['source']}.{notes}",
        f"Measured {result['date'][:10]} at commit {result['commit']}{changed} on "
        f"{machine['cpu']}, load {machine['load_average'][0]:g}; {versions}.",
    ]
    skipped = {
        name: about["skipped"]
        for name, about in result["peers"].items()
        if "skipped" in about
    }
    failed = [row for row in result["rows"] if "failed" in row]
    for title, found in (
        ("Not measured", skipped | _places(failed, is_measured=False)),
        ("Ended early, so measured with fewer runs", _places(failed, is_measured=True)),
    ):
        if found:
            reasons = "; ".join(f"{what}: {reason}" for what, reason in found.items())
            lines.append(f"{title}: {reasons}.")
    return lines


def _places(failed: list[dict[str, Any]], *, is_measured: bool) -> dict[str, str]:
    """Return why rows failed, by engine and mode.

    Modes that failed for the same reason share an entry.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for row in failed:
        if ("median_tokens_per_s" in row) == is_measured:
            place = f"{row['mode']} at batch {row['batch_size']}"
            places = found.setdefault((row["peer"], row["failed"]), [])
            if place not in places:
                places.append(place)
    return {
        f"{peer} ({', '.join(places)})": reason
        for (peer, reason), places in found.items()
    }


def _behind(result: dict[str, Any], why: dict[str, str]) -> list[str]:
    """Return a line, with the reason, per peer that is faster in some column."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in result["rows"]:
        if "ours_over_theirs" in row:
            peer, mode = row["peer"], row["mode"]
            reason = why.get(f"{peer} {mode}", why.get(peer, "not explained yet"))
            modes = ratios.setdefault((peer, reason), {})
            modes.setdefault(mode, []).append(row["ours_over_theirs"])
    lines = []
    for (peer, reason), modes in ratios.items():
        places = [
            f"with {NAMES[mode]} in {sum(one < 1 for one in found)} of {len(found)} "
            f"columns (up to {1 / min(found):.1f} times as fast)"
            for mode, found in modes.items()
            if min(found) < 1
        ]
        if places:
            lines.append(f"- {peer} is faster {' and '.join(places)}: {reason}.")
    return ["", *lines] if lines else []
