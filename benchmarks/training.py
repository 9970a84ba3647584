"""Collects the logs of training runs into a result, and makes their table.

    python -m benchmarks.training NAME=WORK ... --json RESULT

reads the settings and the log of each work folder of `python -m jaxspec.train`. RESULT
is benchmarks/results/training-270m.json. `python -m benchmarks.draft_costs --training
RESULT` adds the acceptance that these drafts need, and `python
benchmarks/readme_table.py` writes the tables of docs/training.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

SETTINGS = (
    *("method", "steps", "rows", "learning_rate", "warmup_steps", "loss", "decay"),
    *("passes", "layers", "block_size", "num_hidden_layers", "keep_layers"),
    *("draft_vocab_size", "held_out_rows", "dtype", "seed"),
)


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
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    runs = []
    for one in options.runs:
        name, _, work = one.partition("=")
        runs.append(collect(name, Path(work), options.texts))
    content = json.dumps({"runs": runs}, indent=1) + "\n"
    options.json.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
