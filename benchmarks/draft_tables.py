"""Tables of `docs/drafts.md`: computed costs, and measured drafts of Gemma 3 270M."""

from collections.abc import Mapping
from typing import Any

from jaxspec.bench.method_report import (
    best_method,
    chosen_speed,
    method_table,
    place_name,
    places,
    speeds_by_k,
    verdict,
)
from jaxspec.bench.report import PLAIN, SPECULATIVE

COSTS_FILE = "draft-costs.json"  # of `COSTS_COMMAND`
COSTS_COMMAND = "python -m benchmarks.draft_costs"
# Of `python -m jaxspec.bench spec --all-methods --by-category` with Gemma 3 270M.
REAL_DRAFTS_FILE = "drafts-270m-cpu.json"
# Goals for the best method at batch 1, greedy: prompts whose answers copy, and others.
COPYING, COPY_GOAL, GOAL = "copying", 2.5, 1.4
# Goals for the chosen K: relative to the best fixed K of the best method at a place,
# and to plain decoding in every cell.
BEST_K_GOAL, PLAIN_GOAL = 0.95, 0.97
# Weights that a pass of Gemma 3 270M multiplies, and a pass of drafters for it: layers
# of 640 x 2,048 feed-forward and 4 heads of 256, an output matrix with a row of 640 for
# every token, and the matrices of heads that read two or three vectors of the target.
LAYER = 640 * (2 * 1024 + 2 * 256) + 3 * 640 * 2048
FUSED = 3 * 640**2
WEIGHTS = {
    "a lookup": 0,
    "EAGLE-3, 4,096 tokens": LAYER + 640 * (1024 + 2 * 256) + FUSED + 4096 * 640,
    "4 layers of the target, 16,384 tokens": 4 * LAYER + 16_384 * 640,
}
# A drafter that makes up to three drafts in one pass.
DFLASH, DFLASH_DRAFTS = "DFlash, 1 layer, 4,096 tokens", 3
WEIGHTS[DFLASH] = LAYER + FUSED + 4096 * 640
TARGET_WEIGHTS = 268_098_176

Result = Mapping[str, Any]


def cost_table(result: Result | None) -> str:
    """Return the computed speed-ups of drafters, by target and device."""
    if result is None:
        return f"Not computed yet: run `{COSTS_COMMAND}`."
    lines = [
        "| target | devices | drafter | weights, GB | cost of a draft pass "
        "| break-even | acceptance 0.5 | 0.7 | 0.8 | 0.9 | 0.7, batch 8 "
        "| 0.7, batch 32 |",
        "|---|---|---|" + "--:|" * 9,
    ]
    # Devices with equal numbers share a row: the ratio of two reads from one memory
    # does not depend on its speed.
    devices: dict[tuple[str, ...], list[str]] = {}
    for row in result["rows"]:
        devices.setdefault((row["target"], *_cells(row)), []).append(row["device"])
    for (target, *cells), names in devices.items():
        lines.append(f"| {target} | {', '.join(names)} | {' | '.join(cells)} |")
    context = result["rows"][0]["context"]
    lines += [
        "",
        f"Computed by `{COSTS_COMMAND}` at commit {result['commit']}: "
        f"bfloat16, {context:,} tokens per sequence, batch 1 unless a column says "
        "otherwise. Weights: on all devices together. Cost of a draft pass: relative "
        "to a plain round; for DFlash, of the pass that makes one draft. Break-even: "
        "acceptance above which some K is faster than plain decoding. The other "
        "columns have the speed-up at an acceptance, with the best K.",
    ]
    return "\n".join(lines)


def _cells(row: Result) -> list[str]:
    if not row["fits"]:
        return [row["drafter"], "does not fit", *[""] * 8]
    best = row["best"]
    threshold = row["break_even"]["1"]
    return [
        row["drafter"],
        f"{row['weight_bytes'] / 1e9:.2f}",
        f"{row['cost_ratio']:.3f}",
        "none" if threshold is None else f"{threshold:.2f}",
        *(_best(best["1"][a]) for a in ("0.5", "0.7", "0.8", "0.9")),
        *(_best(best[n]["0.7"]) for n in ("8", "32")),
    ]


def _best(best: tuple[int, float]) -> str:
    k, speed = best
    return f"{speed:.2f}, K = {k}" if k else "1.00"


def real_drafts_table(result: Result | None) -> str:
    """Return the measured speed-ups by kind of prompts, and the cells themselves."""
    if result is None:
        return "Not measured yet."
    entries = result["methods"]
    found = places(entries)
    lines = [
        "| prompts | temperature | batch | "
        + " | ".join(entry["name"] for entry in entries)
        + " | best, goal |",
        "|---|--:|--:|" + "--:|" * (len(entries) + 1),
    ]
    # Sorted: a resumed result has cells in the order of the runs.
    for place in sorted(found, key=lambda place: (place[1], place[0])):
        (temperature, size, category), pairs = place, found[place]
        cells = {entry["name"]: _speeds(entry, point) for entry, point in pairs}
        shown = [cells.get(entry["name"], "-") for entry in entries]
        lines.append(
            f"| {category} | {temperature:g} | {size} | {' | '.join(shown)} | "
            f"{_goal(temperature, size, category, pairs)} |"
        )
    arguments, machine = result["arguments"], result["machine"]
    loads = [run["machine"]["load_average"][0] for run in result["runs"]]
    commits = dict.fromkeys(run["commit"] for run in result["runs"])
    lines += [
        "",
        "A cell is the speed-up with the chosen K and, in brackets, with the best "
        f"fixed K of {_counts(entries)}; medians over {arguments['num_prompts']} "
        "prompts at batch 1, and over one batch above. "
        f"{arguments['output_len']} new tokens; "
        f"{result['device']['dtype']} on {machine['cpu']}, {machine['cores']} cores, "
        f"load {min(loads):g} to {max(loads):g} at the start of a run; jax "
        f"{result['versions']['jax']}; {result['date'][:10]}, commits "
        f"{', '.join(commits)}. Plain rounds at batch 1 took {_plain_range(entries)} "
        "ms: other processes ran at times, so small differences mean nothing. Cells "
        'with "-" are not measured.',
        "",
        *verdict(entries),
        "",
        *missed_lines(entries),
        "",
        *needed_lines(entries),
        "",
        "<details><summary>Acceptance by position, tokens and milliseconds per "
        "round</summary>",
        "",
        method_table(entries),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def missed_lines(entries: Any) -> list[str]:
    """Return the cells in which the chosen K misses its goals."""
    best, plain = [], []
    found = places(entries)
    for pairs in found.values():
        entry, point = best_method(pairs)
        share = chosen_speed(point) / max(speeds_by_k(entry, point).values())
        if share < BEST_K_GOAL:
            best.append(f"{entry['name']}, {place_name(point)}: {share:.2f}")
        plain += [
            f"{entry['name']}, {place_name(point)}: {chosen_speed(point):.2f}"
            for entry, point in pairs
            if chosen_speed(point) < PLAIN_GOAL
        ]
    num_cells = sum(map(len, found.values()))
    goals = (
        (best, len(found), f"{BEST_K_GOAL:g} of the best fixed K of the best method"),
        (plain, num_cells, f"{PLAIN_GOAL:g} of plain decoding"),
    )
    lines = [
        f"The chosen K is below {goal} in {len(missed)} of {count} cells."
        for missed, count, goal in goals
    ]
    lines += ["", "<details><summary>These cells</summary>", ""]
    for missed, _, goal in goals:
        lines += [f"Below {goal}:", "", *(f"- {one}" for one in missed), ""]
    return [*lines, "</details>"]


def needed_lines(entries: Any) -> list[str]:
    """Return what drafts would have to reach for the goal, by measured round times.

    The time of rounds in which all drafts are verified is that of a lookup for the
    prompts whose answers copy: nearly all of their rounds draft.
    """
    lookups = [one for one in entries if "model" not in one["speculative_config"]]
    at_copies = places(lookups).get((0.0, 1, COPYING))
    if at_copies is None:
        return []
    entry, point = at_copies[-1]
    rounds = {int(k): one["round_s"] for k, one in point["by_num_draft_tokens"].items()}
    rounds[entry["num_levels"]] = point[SPECULATIVE]["round_s"]
    plain_s = point[PLAIN]["round_s"]["median"]
    ratios = {k: one["median"] / plain_s for k, one in sorted(rounds.items())}
    shown = ", ".join(f"{ratio:.2f} with K = {k}" for k, ratio in ratios.items())
    columns = " | ".join(f"K = {k}" for k in ratios)
    lines = [
        f"Cost model of the goal {GOAL:g}: a round in which all drafts are verified "
        f"takes as long as {shown} plain rounds on this machine ({entry['name']}, "
        f"{COPYING}). A draft pass is added in proportion to its weights. The tokens "
        "per round that the goal needs, and the acceptance at every position that "
        "gives them, if every round drafts:",
        "",
        f"| drafter | weights / the target's | {columns} |",
        "|---|--:" + "|--:" * len(ratios) + "|",
    ]
    for name, weights in WEIGHTS.items():
        cost = weights / TARGET_WEIGHTS
        cells = []
        for k, ratio in ratios.items():
            if name == DFLASH and k > DFLASH_DRAFTS:
                cells.append("-")
                continue
            passes = 1 if name == DFLASH else k
            tokens = GOAL * (ratio + passes * cost)
            cells.append(f"{tokens:.2f} tokens, acceptance {_acceptance(tokens, k)}")
        lines.append(f"| {name} | {cost:.3f} | {' | '.join(cells)} |")
    return lines


def _acceptance(tokens: float, num_draft_tokens: int) -> str:
    """Return the acceptance with which K drafts make this many tokens per round."""
    steps = (i / 100 for i in range(101))
    enough = (
        a for a in steps if sum(a**i for i in range(num_draft_tokens + 1)) >= tokens
    )
    found = next(enough, None)
    return "above 1" if found is None else f"{found:.2f}"


def _speeds(entry: Result, point: Result) -> str:
    best = max(speeds_by_k(entry, point).values())
    return f"{chosen_speed(point):.2f} ({best:.2f})"


def _counts(entries: Any) -> str:
    counts = {
        k
        for entry in entries
        for point in entry["points"]
        for k in speeds_by_k(entry, point)
    }
    *most, last = map(str, sorted(counts))
    return f"{', '.join(most)} and {last}"


def _plain_range(entries: Any) -> str:
    times = [
        1e3 * point[PLAIN]["round_s"]["median"]
        for entry in entries
        for point in entry["points"]
        if point["batch_size"] == 1
    ]
    return f"{min(times):.0f} to {max(times):.0f}"


def _goal(temperature: float, size: int, category: str, pairs: Any) -> str:
    """Compare the best method with the goal, which is for greedy texts at batch 1."""
    entry, point = best_method(pairs)
    speed = max(chosen_speed(point), *speeds_by_k(entry, point).values())
    if (temperature, size) != (0, 1):
        return f"{speed:.2f}"
    goal = COPY_GOAL if category == COPYING else GOAL
    return f"{speed:.2f}, {'met' if speed >= goal else 'missed'}: {goal:g}"
