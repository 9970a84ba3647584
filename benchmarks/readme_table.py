"""Write tables of results: of `make bench` into README.md, of peers into our own.

`--check` changes nothing and fails when a page does not hold its table.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.table import peers_table

HERE = Path(__file__).parent
MIB = 2**20
BEGIN = "<!-- results: written by benchmarks/readme_table.py -->"
END = "<!-- end of results -->"
PEERS_BEGIN = "<!-- peers: written by benchmarks/readme_table.py -->"
PEERS_END = "<!-- end of peers -->"
NOT_MEASURED = "Not measured yet: run `make bench` on a quiet machine."


def newest_result(folder: Path) -> dict[str, Any] | None:
    """The latest full result by its own date; quick runs do not count."""
    found = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in folder.glob("cpu_pair-*.json")
    ]
    full = [result for result in found if not result["arguments"]["quick"]]
    return max(full, key=lambda result: result["date"], default=None)


def readme_table(result: dict[str, Any] | None) -> str:
    """The Markdown between the two marks."""
    if result is None:
        return NOT_MEASURED
    rows = [
        "| prompts | plain tok/s | speculative tok/s | speed-up | acceptance rate "
        "| mean acceptance length |",
        "|---|---|---|---|---|---|",
    ]
    greedy, sampled = result["modes"]["greedy"], result["modes"]["sampled"]
    for domain, row in greedy["rows"].items():
        rows.append(_row(f"{domain}, greedy", row))
    controls = sampled["controls"]
    name = f"all, temperature {controls['temperature']:g}, top-p {controls['top_p']:g}"
    rows.append(_row(name, sampled["rows"]["all"]))
    return "\n".join([*rows, "", *_notes(result)])


def _row(name: str, row: dict[str, Any]) -> str:
    return (
        f"| {name} | {row['plain_tokens_per_s']:.0f} "
        f"| {row['speculative_tokens_per_s']:.0f} | {row['speed_up']:.2f} "
        f"| {row['acceptance_rate']:.2f} | {row['mean_acceptance_length']:.2f} |"
    )


def _notes(result: dict[str, Any]) -> list[str]:
    arguments, machine = result["arguments"], result["machine"]
    row = result["modes"]["greedy"]["rows"]["all"]
    changed = " with local changes" if result["has_changes"] else ""
    lines = [
        f"`{result['target']}` with `{result['draft']}`, K = "
        f"{arguments['num_speculative_tokens']}, batch 1, {arguments['num_tokens']} "
        f"new tokens, {result['dtype']}; medians of {arguments['repeats']} runs of "
        f"{row['num_prompts']} prompts ({result['prompts']['source']}). Greedy text "
        "is the same with and without speculation for "
        f"{row['num_equal']} of {row['num_prompts']} prompts.",
    ]
    peers = result["huggingface"]
    if "skipped" not in peers:
        speeds = ", ".join(
            f"{hf_speed(found):.0f} tok/s in {dtype}" for dtype, found in peers.items()
        )
        lines.append(f"HuggingFace `generate` without speculation, greedy: {speeds}.")
    startup = result["startup"]
    if "skipped" not in startup:
        cold, warm = startup["cold"], startup["warm"]
        lines.append(
            f"From process start to the first token: {cold['first_token_s']:.1f} s "
            "with nothing compiled (the round's own program is compiled after it), "
            f"{warm['first_token_s']:.1f} s with a compilation cache.{_memory(startup)}"
        )
    versions = result["versions"]
    lines.append(
        f"Measured {result['date'][:10]} at commit {result['commit']}{changed} on "
        f"{machine['cpu']}, {machine['cores']} cores, load "
        f"{machine['load_average'][0]:g}; Python {versions['python']}, jax "
        f"{versions['jax']}, numpy {versions['numpy']}."
    )
    return lines


def _memory(startup: dict[str, Any]) -> str:
    """Peak memory, which results before the field's present name had wrong."""
    peaks = [start.get("peak_resident_bytes") for start in startup.values()]
    return "" if None in peaks else f" Peak memory: {max(peaks) / MIB:.0f} MiB."


def hf_speed(found: dict[str, Any]) -> float:
    """Median over prompts of the medians over repeats, in tokens/s."""
    return median(median(speeds) for speeds in found["tokens_per_s"])


def peers_result(folder: Path) -> dict[str, Any] | None:
    """The result of `python -m benchmarks.peers`, if there is one."""
    path = folder / "peers-cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def replace_table(readme: str, table: str, begin: str, end: str) -> str:
    """Put `table` between two marks of `readme`."""
    before, found_begin, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"The page must hold {begin} and, below it, {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--peers-page", type=Path, default=HERE / "README.md")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    own = readme_table(newest_result(options.results))
    beside = peers_table(peers_result(options.results))
    tables = [
        (options.readme, own, BEGIN, END),
        (options.peers_page, beside, PEERS_BEGIN, PEERS_END),
    ]
    for page, table, begin, end in tables:
        text = page.read_text(encoding="utf-8")
        expected = replace_table(text, table, begin, end)
        if not options.check:
            page.write_text(expected, encoding="utf-8")
        elif text != expected:
            sys.exit(
                f"{page} does not show the newest result: "
                "run python benchmarks/readme_table.py"
            )


if __name__ == "__main__":
    main()
