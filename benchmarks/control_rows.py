"""Computes the rows of `benchmarks.control`'s result; does not import jax."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from jaxspec.bench.report import spread, table
from jaxspec.config.speculation import ADAPTIVE

# Names of the two equal engines without drafts.
PLAIN, ALIKE = "plain", "alike"
# Goals: minimum speed ratios adaptive / best fixed K, adaptive / plain, and K = 0 / no
# drafts; maximum seconds until the speed settles.
BEST, NOT_SLOWER, FREE, SETTLE_S = 0.95, 0.97, 0.99, 1.0
# Number of bins that are averaged before comparison; share of a phase's bins, at its
# end, that count as settled; and tolerated difference from the settled speed. Averaging
# is needed because a bin has only a dozen rounds at batch 1, so that its tokens vary by
# a tenth.
NUM_AVERAGED, SETTLED_SHARE, TOLERANCE = 3, 0.4, 0.1


class Round(NamedTuple):
    """One launch of an engine, after its results were read.

    Attributes:
        num_drafts: Number of drafts per sequence; the maximum over the sequences.
        expected_s: Expected seconds; None without an estimate.
    """

    read_ts: float
    num_drafts: int
    num_seqs: int
    seconds: float
    expected_s: float | None


class Mark(NamedTuple):
    """Total number of generated tokens at a time, in seconds."""

    seconds: float
    num_tokens: int


def ratio(speeds: Mapping[str, list[float]], way: str, other: str) -> dict[str, float]:
    """Return the ratio of two modes' speeds, with its spread over the repeats."""
    pairs = zip(speeds[way], speeds[other], strict=True)
    return spread([mine / theirs for mine, theirs in pairs])


def compare(speeds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return speeds by mode, and those of adaptive K / best fixed K and / plain."""
    fixed = [name for name in speeds if name not in (PLAIN, ALIKE, ADAPTIVE)]
    best = max(fixed, key=lambda name: median(speeds[name]))
    alike = {}
    if ALIKE in speeds:
        alike = {"alike_by_plain": ratio(speeds, ALIKE, PLAIN)}
    return alike | {
        "tokens_per_s": {name: spread(found) for name, found in speeds.items()},
        "best_num_drafts": int(best),
        "adaptive_by_best": ratio(speeds, ADAPTIVE, best),
        "adaptive_by_plain": ratio(speeds, ADAPTIVE, PLAIN),
        "fixed_by_plain": ratio(speeds, str(max(map(int, fixed))), PLAIN),
    }


def of_sets(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the rows of several sets of engines; spreads are over the sets' medians."""
    first, found = rows[0], dict[str, Any](sets=list(rows))
    for name in [name for name in first if name.endswith(("_by_plain", "_by_best"))]:
        found[name] = spread([row[name]["median"] for row in rows])
    for name in ("num_probes", "num_stops", "saved_s", "lost_s", "num_compiles"):
        found[name] = sum(row[name] for row in rows)
    found["tokens_per_s"] = {
        way: spread([row["tokens_per_s"][way]["median"] for row in rows])
        for way in first["tokens_per_s"]
    }
    found["best_num_drafts"] = first["best_num_drafts"]
    rounds = Counter[str]()
    for row in rows:
        rounds.update({k: one["rounds"] for k, one in row["by_num_drafts"].items()})
    found["by_num_drafts"] = {k: {"rounds": rounds[k]} for k in sorted(rounds)}
    return found


def by_num_drafts(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Return by K: number of rounds, median time, and median time / expected time."""
    found = {}
    for k, count in sorted(Counter(one.num_drafts for one in rounds).items()):
        here = [one for one in rounds if one.num_drafts == k]
        known = [one.seconds / one.expected_s for one in here if one.expected_s]
        found[str(k)] = {"rounds": count, "seconds": median(o.seconds for o in here)}
        if known:
            found[str(k)]["by_expected"] = median(known)
    return found


def rates(marks: Sequence[Mark], seconds: float, bin_s: float) -> list[float]:
    """Return tokens/s per bin; a token counts when the result of its round is read."""
    edges = np.arange(round(seconds / bin_s) + 1) * bin_s
    at = np.searchsorted([one.seconds for one in marks], edges, side="right")
    totals = np.array([0, *(one.num_tokens for one in marks)])[at]
    return (np.diff(totals) / bin_s).round(1).tolist()


def mean_drafts(
    rounds: Sequence[Round], seconds: float, bin_s: float
) -> list[float | None]:
    """Return the mean K per bin; None without a round.

    Args:
        rounds: With times since the start.
    """
    bins: list[list[int]] = [[] for _ in range(round(seconds / bin_s))]
    for one in rounds:
        place = int(one.read_ts // bin_s)
        if 0 <= place < len(bins) and one.num_seqs:
            bins[place].append(one.num_drafts)
    return [round(float(np.mean(one)), 2) if one else None for one in bins]


def settle(found: Sequence[float], bin_s: float) -> tuple[float, float | None]:
    """Return tokens/s at the end of a phase, and the seconds until it is reached.

    Args:
        found: Tokens/s in the bins of the phase.
    """
    level = float(np.mean(found[-max(round(SETTLED_SHARE * len(found)), 1) :]))
    means = np.convolve(found, np.ones(NUM_AVERAGED) / NUM_AVERAGED, mode="valid")
    near = np.flatnonzero(means >= (1 - TOLERANCE) * level)
    return level, round(float(near[0]) * bin_s, 3) if len(near) else None


def misses(result: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each goal that was missed."""
    found = []

    def at_least(value: Any, goal: float, name: str) -> None:
        if value < goal:
            found.append(f"{name}: {value:.3f}, goal {goal:g}")

    for name in ("cells", "foreign", "free"):
        for row in result.get(name, ()):
            place, goal = place_of(name, row), FREE if name == "free" else NOT_SLOWER
            at_least(
                row["adaptive_by_plain"]["median"], goal, f"{place}, adaptive / plain"
            )
            if name == "cells":
                value = row["adaptive_by_best"]["median"]
                at_least(
                    value, BEST, f"{place}, adaptive / K = {row['best_num_drafts']}"
                )
            elif name == "free":
                value = row["fixed_by_plain"]["median"]
                at_least(value, FREE, f"{place}, K = 0 / plain")
    for row in result.get("step", ()):
        for number, phase in enumerate(row["phases"][1:], start=2):
            place = f"step, batch {row['batch']}, phase {number}"
            settle_s = phase["settle_s"]
            if settle_s is None or settle_s > SETTLE_S:
                found.append(f"{place}: settles after {settle_s} s, goal {SETTLE_S:g}")
            if not phase["acceptance"]:
                # Check the speed too: an engine that keeps making drafts that are
                # rejected settles as well, at a lower speed.
                settled = phase["tokens_per_s"] / phase["plain_tokens_per_s"]
                at_least(settled, NOT_SLOWER, f"{place}, settled speed / plain")
    if "short" in result:
        lowest = min(one["median"] for one in result["short"]["by_plain"])
        at_least(lowest, BEST, "short, slowest prompt, adaptive / plain")
        first = min(result["short"]["first_by_plain"])
        at_least(first, BEST, "short, first request, adaptive / plain")
    if "ramp" in result:
        at_least(
            result["ramp"]["adaptive_by_plain"], NOT_SLOWER, "ramp, adaptive / plain"
        )
    return found


def short_line(result: Mapping[str, Any]) -> str:
    """Format the ratios of `short`: single requests, and engines' first requests."""
    medians = sorted(one["median"] for one in result["by_plain"])
    firsts, alike = (
        ", ".join(f"{one:.2f}" for one in result[name])
        for name in ("first_by_plain", "first_alike_by_plain")
    )
    return (
        f"short, adaptive / plain: median {median(medians):.2f}, prompts "
        f"{medians[0]:.2f} to {medians[-1]:.2f}; first requests {firsts} (of a second "
        f"engine without drafts: {alike})"
    )


def place_of(part: str, row: Mapping[str, Any]) -> str:
    if part == "foreign":
        return f"{row['domain']}, temperature {row['temperature']:g}"
    forced = f", acceptance {row['acceptance']:g}" if part == "cells" else ""
    return f"{part}, batch {row['batch']}{forced}"


def speed_table(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format tokens/s of all modes, ratios of adaptive K, and how often each K ran."""
    names = list(rows[0]["tokens_per_s"])
    lines = [[part, *names, "by best", "by plain", "probes", "stops", "rounds by K"]]
    for row in rows:
        speeds = [f"{row['tokens_per_s'][name]['median']:.0f}" for name in names]
        ratios = [row[f"adaptive_by_{name}"]["median"] for name in ("best", "plain")]
        drafts = {k: one["rounds"] for k, one in row["by_num_drafts"].items()}
        lines.append(
            [
                place_of(part, row),
                *speeds,
                *(f"{value:.3f}" for value in ratios),
                *(str(row[name]) for name in ("num_probes", "num_stops")),
                " ".join(f"{k}:{count}" for k, count in drafts.items()),
            ]
        )
    return table(lines)


def step_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [["step", "settled tok/s", "after s", "plain tok/s"]]
    for row in rows:
        for phase in row["phases"]:
            place = f"batch {row['batch']}, acceptance {phase['acceptance']:g}"
            speeds = [phase["tokens_per_s"], phase["plain_tokens_per_s"]]
            settled, plain = (f"{speed:.0f}" for speed in speeds)
            lines.append([place, settled, str(phase["settle_s"]), plain])
    return table(lines)
