"""Collects the logs of training runs into a result, and makes their table.

    python -m benchmarks.training NAME=WORK ... --json RESULT

reads the settings and the log of each work folder of `python -m jaxspec.train`. RESULT
is benchmarks/results/training-270m.json. With `--by-text`, each run is
NAME=WORK=TEXTS: these runs differ in their texts only, and replace those in RESULT.
`python -m benchmarks.draft_costs --training RESULT` adds the acceptance that these
drafts need, and `python benchmarks/readme_table.py` writes the tables of
docs/training.md and docs/drafts.md.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = (
    *("method", "steps", "rows", "learning_rate", "warmup_steps", "loss", "decay"),
    *("passes", "layers", "block_size", "num_hidden_layers", "keep_layers"),
    *("draft_vocab_size", "held_out_rows", "dtype", "seed"),
)


# Rises per doubling of the text below this are noise.
LEAST_RISE = 1e-3


def collect(name: str, work: Path, texts: Path | None) -> dict[str, Any]:
    """Return a run's settings and its log, with processor time but no other.

    The machine was shared.
    """
    settings = json.loads((work / "settings.json").read_text())
    lines = (work / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    for entry in log:
        del entry["time"]
    found = {
        "name": name,
        "target": settings["target"],
        "settings": {key: settings[key] for key in SETTINGS if key in settings},
        "log": log,
    }
    if texts is not None:
        written = json.loads((texts / "settings.json").read_text())
        keys = "tokens", "held_out_tokens", "length", "temperatures", "seed"
        found["texts"] = {key: written[key] for key in keys}
        with np.load(texts / "train.npz") as rows:
            num_tokens = int((rows["sizes"] - rows["starts"]).sum())
            found["texts"] |= {
                "num_rows": len(rows["sizes"]),
                "num_tokens": num_tokens,
            }
    return found


def training_table(result: dict[str, Any]) -> str:
    """Return the Markdown of the learning curves in a result."""
    lines = [
        "| draft | steps | tokens read | CPU s | loss | held-out loss "
        "| sampled, by position | greedy, by position |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for one in result["runs"]:
        for entry in one["log"]:
            sampled, greedy = (
                " ".join(f"{value:.3f}" for value in entry[key])
                for key in ("sampled", "greedy")
            )
            shown = [
                f"{tokens_read(one, entry):,}",
                _number(entry.get("cpu_s"), 0),
                _number(entry["loss"], 2),
                _number(entry.get("held_out_loss"), 2),
            ]
            row = one["name"], str(entry["step"]), *shown, sampled, greedy
            lines.append(f"| {' | '.join(row)} |")
    if "needed" in result:
        lines += ["", *needed_lines(result)]
    return "\n".join(lines)


def tokens_read(run: dict[str, Any], entry: dict[str, Any]) -> int:
    """Return the number of tokens in the rows of all steps so far."""
    return entry["step"] * run["settings"]["rows"] * run["texts"]["length"]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def tokens_per_round(entry: dict[str, Any]) -> float:
    """Return the tokens of a round with a draft for each measured position."""
    rates = entry["sampled"]
    return 1 + sum(math.prod(rates[: number + 1]) for number in range(len(rates)))


def even_acceptance(entry: dict[str, Any]) -> float:
    """Return the acceptance, equal at all positions, with the same tokens per round."""
    powers = [1.0] * len(entry["sampled"])  # a^n + ... + a, without the constant
    return max(np.roots([*powers, 1 - tokens_per_round(entry)]).real)


def text_entries(result: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (run, entry of its log) of the runs that differ in their texts.

    The entry is that of the last step that all runs of the draft have.
    """
    found = []
    for run in sorted(
        result["by_text"], key=lambda run: (run["name"], run["texts"]["num_tokens"])
    ):
        logs = [one["log"] for one in result["by_text"] if one["name"] == run["name"]]
        last = min(log[-1]["step"] for log in logs)
        found += [(run, entry) for entry in run["log"] if entry["step"] == last]
    return found


def text_curves(result: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return (tokens of text, even acceptance) by draft, after equal steps."""
    found: dict[str, list[tuple[int, float]]] = {}
    for run, entry in text_entries(result):
        point = run["texts"]["num_tokens"], even_acceptance(entry)
        found.setdefault(run["name"], []).append(point)
    return found


def fit_curve(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the rise per doubling of the text, and the value at one token.

    Least squares over the logarithm of the number of tokens.
    """
    tokens, rates = zip(*points, strict=True)
    rise, start = np.polyfit(np.log2(tokens), rates, 1)
    return float(rise), float(start)


def tokens_for(points: list[tuple[int, float]], acceptance: float) -> float | None:
    """Return the tokens of text that an acceptance needs by the fit; None if none."""
    rise, start = fit_curve(points)
    return 2 ** ((acceptance - start) / rise) if rise > LEAST_RISE else None


def text_table(result: dict[str, Any]) -> str:
    """Return the Markdown of held-out acceptance by the size of the text."""
    needed = {row["name"]: row for row in result["needed"]["rows"]}
    goals = list(next(iter(needed.values()))["acceptance"])
    last_goal = goals[-1]
    lines = [
        "| draft | tokens of text | steps | times read | loss | held-out loss "
        "| sampled, by position | equal acceptance | computed speed-up |",
        "|---|--:|--:|--:|--:|--:|---|--:|--:|",
    ]
    for run, entry in text_entries(result):
        texts, rate = run["texts"], even_acceptance(entry)
        cells = (
            *(run["name"], f"{texts['num_tokens']:,}", f"{entry['step']}"),
            f"{entry['step'] * run['settings']['rows'] / texts['num_rows']:.1f}",
            _number(entry["loss"], 2),
            _number(entry.get("held_out_loss"), 2),
            " ".join(f"{value:.3f}" for value in entry["sampled"]),
            f"{rate:.3f}",
            f"{needed[run['name']]['speed_ups'][round(100 * rate)]:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| draft | rise per doubling | needed | reached | tokens needed |"]
    lines += ["|---|--:|--:|--:|--:|"]
    for name, points in text_curves(result).items():
        rise, _ = fit_curve(points)
        goal = needed[name]["acceptance"][last_goal]
        tokens = tokens_for(points, goal)
        cells = (
            *(name, f"{rise:.3f}", f"{goal:.2f}", f"{points[-1][1]:.2f}"),
            "none" if tokens is None else f"{tokens:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def needed_lines(result: dict[str, Any]) -> list[str]:
    """Return the acceptance that each draft needs, and the highest that it reached."""
    reached = {
        run["name"]: max(entry["sampled"][0] for entry in run["log"])
        for run in result["runs"]
    }
    needed = result["needed"]
    goals = list(needed["rows"][0]["acceptance"])
    lines = [
        "| draft | devices | cost of a draft pass | "
        + " | ".join(f"acceptance for {float(goal):g}" for goal in goals)
        + " | reached |",
        "|---|---|--:|" + "--:|" * (len(goals) + 1),
    ]
    devices: dict[tuple[str, ...], list[str]] = {}
    for row in needed["rows"]:
        cells = [_number(row["acceptance"][goal], 2) for goal in goals]
        key = row["name"], f"{row['cost_ratio']:.3f}", *cells
        devices.setdefault(key, []).append(row["device"])
    for (name, *cells), names in devices.items():
        shown = name, ", ".join(names), *cells, f"{reached[name]:.2f}"
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def main() -> None:
    """Write the result."""
    parser = argparse.ArgumentParser(description="Collect logs of training runs.")
    parser.add_argument("runs", nargs="+", metavar="NAME=WORK")
    parser.add_argument("--texts", type=Path, help="folder of the runs' texts")
    parser.add_argument(
        "--by-text",
        action="store_true",
        help="the runs are NAME=WORK=TEXTS, and are added to RESULT",
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    runs = []
    for one in options.runs:
        name, work, *own = one.split("=")
        texts = Path(own[0]) if options.by_text else options.texts
        runs.append(collect(name, Path(work), texts))
    result: dict[str, Any] = {"runs": runs}
    if options.by_text:
        result = json.loads(options.json.read_text(encoding="utf-8"))
        result["by_text"] = runs
    content = json.dumps(result, indent=1) + "\n"
    options.json.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
