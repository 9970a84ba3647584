"""Tables and sentences on a comparison of methods (`spec --all-methods`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.bench.report import PLAIN, SPECULATIVE, markdown, milliseconds

CHOSEN = "chosen"  # K is chosen by the engine
Entry = Mapping[str, Any]
Point = Mapping[str, Any]


def place_of(point: Point) -> tuple[float, int, str]:
    """Return the temperature, the batch size and the category of a point."""
    return point["temperature"], point["batch_size"], point.get("category", "")


def place_name(point: Point) -> str:
    """Return a description of where a point was measured."""
    temperature, size, category = place_of(point)
    prefix = f"{category}, " if category else ""
    return f"{prefix}temperature {temperature:g}, batch {size}"


def speeds_by_k(entry: Entry, point: Point) -> dict[int, float]:
    """Return the median speed-up of every fixed K; 1 for K = 0."""
    others = point.get("by_num_draft_tokens", {})
    found = {int(k): one["decode_speed_up"]["median"] for k, one in others.items()}
    found[entry["num_levels"]] = point["decode_speed_up"]["median"]
    return {0: 1.0} | dict(sorted(found.items()))


def chosen_speed(point: Point) -> float:
    """Return the median speed-up with the chosen K."""
    return point[CHOSEN]["decode_speed_up"]["median"]


def places(entries: Sequence[Entry]) -> dict[tuple[float, int, str], list[Any]]:
    """Return pairs of entry and point by place, in the order of the first entry."""
    found: dict[tuple[float, int, str], list[Any]] = {}
    for entry in entries:
        for point in entry["points"]:
            found.setdefault(place_of(point), []).append((entry, point))
    return found


def method_table(entries: Sequence[Entry]) -> str:
    """Return all points of a result as a Markdown table."""
    counts = sorted(
        {
            k
            for entry in entries
            for point in entry["points"]
            for k in speeds_by_k(entry, point)
            if k
        }
    )
    rows = [
        [
            *("method", "prompts", "temperature", "batch", "accepted by position"),
            *("tokens/round", "round, ms", "plain round, ms"),
            *(f"K = {k}" for k in counts),
            *("K chosen", "lowest to highest"),
        ]
    ]
    for found in places(entries).values():
        for entry, point in found:
            temperature, size, category = place_of(point)
            acceptance = point[SPECULATIVE].get("acceptance", {})
            rates = acceptance.get("acceptance_rate_per_position", ())
            rounds = [point[mode].get("round_s", {}) for mode in (SPECULATIVE, PLAIN)]
            speeds = speeds_by_k(entry, point)
            chosen = point[CHOSEN]["decode_speed_up"]
            rows.append(
                [
                    entry["name"],
                    category or "all",
                    f"{temperature:g}",
                    str(size),
                    " ".join(f"{rate:.2f}" for rate in rates) or "-",
                    f"{point['tokens_per_round']:.2f}",
                    *(milliseconds(one.get("median")) for one in rounds),
                    *(f"{speeds[k]:.2f}" if k in speeds else "-" for k in counts),
                    f"{chosen['median']:.2f}",
                    f"{chosen['least']:.2f} to {chosen['most']:.2f}",
                ]
            )
    return (
        f"{markdown(rows)}\n\n"
        "Columns with K: decoding speed relative to plain decoding in the same engine, "
        "medians of the runs. Acceptance (share of the drafting rounds in which the "
        "draft at each position was accepted), tokens per round of a sequence and "
        "round times are those of the largest K of each method."
    )


def verdict(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield sentences on equal texts, on the choice of K, and on the best methods."""
    pairs = [(entry, point) for entry in entries for point in entry["points"]]
    greedy = [point for _, point in pairs if "is_equal" in point]
    num_equal = sum(point["is_equal"] for point in greedy)
    if greedy:
        yield (
            f"Greedy texts are those of plain decoding in {num_equal} of {len(greedy)} "
            "cells, with every K."
        )
    entry, point = min(pairs, key=lambda pair: chosen_speed(pair[1]))
    yield (
        f"With the chosen K, decoding is at least {chosen_speed(point):.2f} times as "
        f"fast as plain decoding ({entry['name']}, {place_name(point)})."
    )
    shares = []
    for found in places(entries).values():
        entry, point = best_method(found)
        best = max(speeds_by_k(entry, point).values())
        shares.append((chosen_speed(point) / best, entry["name"], place_name(point)))
    share, name, place = min(shares)
    yield (
        "With the best method of each place, the chosen K is at least "
        f"{share:.2f} times as fast as the best fixed K ({name}, {place})."
    )


def best_method(found: Sequence[tuple[Entry, Point]]) -> tuple[Entry, Point]:
    """Return the method that is fastest at a place, with any K."""

    def speed(pair: tuple[Entry, Point]) -> float:
        return max(*speeds_by_k(*pair).values(), chosen_speed(pair[1]))

    return max(found, key=speed)
