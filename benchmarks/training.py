"""Collects the logs of training runs into a result, and makes their table.

    python -m benchmarks.training NAME=WORK ... --json RESULT

reads the settings and the log of each work folder of `python -m jaxspec.train`. RESULT
is benchmarks/results/training-270m.json. `python benchmarks/readme_table.py` then
writes the table of docs/training.md.
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
    """Return a run's settings and its log, without times: the machine was shared."""
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
        "| draft | steps | sampled, by position | greedy, by position |",
        "|---|--:|---|---|",
    ]
    for one in result["runs"]:
        for entry in one["log"]:
            sampled, greedy = (
                " ".join(f"{value:.3f}" for value in entry[key])
                for key in ("sampled", "greedy")
            )
            row = one["name"], str(entry["step"]), sampled, greedy
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


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
