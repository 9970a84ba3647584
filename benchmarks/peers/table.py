"""The rows of `peers-cpu.json` as Markdown, for a terminal and for the README."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Why others are ahead, by "peer" or "peer mode"; written by whoever finds it out.
WHY = HERE / "behind.json"
NOT_MEASURED = "Not measured yet: run `python -m benchmarks.peers` on a quiet machine."


def peers_table(
    result: dict[str, Any] | None, why: dict[str, str] | None = None
) -> str:
    """Tokens/s of every engine, mode, batch size and number of threads.

    Args:
        why: In place of what `behind.json` holds.
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
        f" {name}: {about['note']}."
        for name, about in result["peers"].items()
        if "note" in about
    )
    changed = " with local changes" if result["has_changes"] else ""
    lines = [
        "New tokens by the whole time, prompts included, in tokens/s; in brackets ours "
        "by theirs with the same drafts: above 1 ours is faster. Greedy, float32 "
        f"unless said, {arguments['num_tokens']} new tokens, K = "
        f"{arguments['num_speculative_tokens']}, n-grams of up to "
        f"{result['lookup_max']} tokens; medians of up to {arguments['repeats']} runs "
        f"in turn, of {arguments['single_prompts']} prompts one by one and of "
        f"{arguments['num_prompts']} in batches ({result['prompts']['source']}). Texts "
        f"are compared with ours without drafts.{notes}",
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
        ("Ended early, and fewer runs than others", _places(failed, is_measured=True)),
    ):
        if found:
            told = "; ".join(f"{what}: {reason}" for what, reason in found.items())
            lines.append(f"{title}: {told}.")
    return lines


def _places(failed: list[dict[str, Any]], *, is_measured: bool) -> dict[str, str]:
    """Reasons by where they hold: those of one peer for one reason in one place."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in failed:
        if ("median_tokens_per_s" in row) == is_measured:
            place = f"{row['mode']} at batch {row['batch_size']}"
            places = found.setdefault((row["peer"], row["failed"]), [])
            if place not in places:
                places.append(place)
    return {
        f"{peer}, {', '.join(places)}": reason
        for (peer, reason), places in found.items()
    }


def _behind(result: dict[str, Any], why: dict[str, str]) -> list[str]:
    """Where others are ahead, by how much at most, and why."""
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
            f"{mode} in {sum(one < 1 for one in found)} of {len(found)} places, up to "
            f"{1 / min(found):.1f} times"
            for mode, found in modes.items()
            if min(found) < 1
        ]
        if places:
            lines.append(f"- {peer} is ahead, {'; '.join(places)}: {reason}.")
    return ["", *lines] if lines else []
