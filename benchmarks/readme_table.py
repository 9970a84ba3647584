"""Writes tables of results into README.md and benchmarks/README.md.

`--check` changes nothing, and fails if a page does not show the current table.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.cells import peers_table

HERE = Path(__file__).parent
MIB = 2**20
BEGIN = "<!-- results: written by benchmarks/readme_table.py -->"
END = "<!-- end of results -->"
PEERS_BEGIN = "<!-- peers: written by benchmarks/readme_table.py -->"
PEERS_END = "<!-- end of peers -->"
FORMS_BEGIN = "<!-- forms: written by benchmarks/readme_table.py -->"
FORMS_END = "<!-- end of forms -->"
METHODS_BEGIN = "<!-- methods: written by benchmarks/readme_table.py -->"
METHODS_END = "<!-- end of methods -->"
NO_FORMS = "Not measured yet: run the commands above on a quiet machine."
NOT_MEASURED = "Not measured yet: run `make bench` on a quiet machine."


def newest_result(folder: Path) -> dict[str, Any] | None:
    """Return the latest full result; quick runs do not count."""
    found = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in folder.glob("cpu_pair-*.json")
    ]
    full = [result for result in found if not result["arguments"]["quick"]]
    return max(full, key=lambda result: result["date"], default=None)


def readme_table(result: dict[str, Any] | None) -> str:
    """Return the Markdown of the result of `make bench`, for README.md."""
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
    arguments = result["arguments"]
    row = result["modes"]["greedy"]["rows"]["all"]
    lines = [
        f"`{result['target']}` with `{result['draft']}`, K = "
        f"{arguments['num_speculative_tokens']}, batch 1, {arguments['num_tokens']} "
        f"new tokens, {result['dtype']}; medians of {arguments['repeats']} runs of "
        f"{row['num_prompts']} prompts ({result['prompts']['source']}). Runs with and "
        "without speculation alternate; the speed-up is the median of the ratios of "
        "these pairs, so it differs from the ratio of the two columns. Greedy text is "
        "the same with and without speculation for "
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
            "with an empty compilation cache (programs with drafts are compiled after "
            f"it), {warm['first_token_s']:.1f} s with a filled one.{_memory(startup)}"
        )
    lines.append(_measured(result))
    return lines


def _measured(result: dict[str, Any]) -> str:
    """Return the date, machine and versions of a result."""
    machine, versions = result["machine"], result["versions"]
    changed = " with local changes" if result["has_changes"] else ""
    return (
        f"Measured {result['date'][:10]} at commit {result['commit']}{changed} on "
        f"{machine['cpu']}, {machine['cores']} cores, load "
        f"{machine['load_average'][0]:g}; Python {versions['python']}, jax "
        f"{versions['jax']}, numpy {versions['numpy']}."
    )


def _memory(startup: dict[str, Any]) -> str:
    """Return the sentence on peak memory; empty if the result has no such field."""
    peaks = [start.get("peak_resident_bytes") for start in startup.values()]
    return "" if None in peaks else f" Peak memory: {max(peaks) / MIB:.0f} MiB."


def hf_speed(found: dict[str, Any]) -> float:
    """Return tokens/s: the median over prompts of the medians over repeats."""
    return median(median(speeds) for speeds in found["tokens_per_s"])


def peers_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of `python -m benchmarks.peers`, if there is one."""
    path = folder / "peers-cpu.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def spec_table(folder: Path, kind: str) -> str:
    """Return the table of `jaxspec.bench spec`, with notes on how it was measured.

    A row is a shape of the drafts or a method, a column a set of prompts with a
    temperature and a batch size.

    Args:
        kind: `forms` or `methods`: the option of the command, and the result's key.
    """
    cells: dict[str, dict[str, str]] = {}
    places: dict[str, None] = {}
    notes = [
        "A cell has the tokens per round, the speed-up over plain decoding (median of "
        "the runs), and in brackets the lowest speed-up of all runs."
    ]
    for path in sorted(folder.glob(f"{kind}-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        prompts = prompts_of(result)
        for entry in result[kind]:
            row = cells.setdefault(_row_name(entry), {})
            for point in entry["points"]:
                batch = f"batch {point['batch_size']}"
                place = f"{prompts}, temperature {point['temperature']:g}, {batch}"
                places[place] = None
                ratio = point["decode_speed_up"]
                row[place] = (
                    f"{point['tokens_per_round']:.2f}, {ratio['median']:.2f} "
                    f"({ratio['least']:.2f})"
                )
        notes.append(f"Columns with {prompts}: {_measured(result)}")
    if not cells:
        return NO_FORMS
    rows = [
        f"| {'shape' if kind == 'forms' else 'method'} | {' | '.join(places)} |",
        "|---" * (1 + len(places)) + "|",
    ]
    for name, row in cells.items():
        rows.append(
            f"| {name} | {' | '.join(row.get(place, '-') for place in places)} |"
        )
    return "\n".join([*rows, "", *notes])


def _row_name(entry: dict[str, Any]) -> str:
    """Return the name of a method, or of a shape of the drafts."""
    if "form" not in entry:
        return f"{entry['name'].split()[0]}, K = {entry['num_levels']}"
    return entry["form"] if len(entry["form"]) < 20 else "tree"


def prompts_of(result: dict[str, Any]) -> str:
    """Return the name of the prompts of a result of `jaxspec.bench spec`."""
    given = result["arguments"]["dataset_path"]
    return "bundled prompts" if given is None else Path(given).stem.replace("_", " ")


def replace_table(readme: str, table: str, begin: str, end: str) -> str:
    """Return `readme` with `table` between the marks `begin` and `end`."""
    before, found_begin, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"The page must have the line {begin} and, below it, {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", type=Path, default=HERE.parent / "README.md")
    parser.add_argument("--peers-page", type=Path, default=HERE / "README.md")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    own = readme_table(newest_result(options.results))
    peers = peers_table(peers_result(options.results))
    tables = [
        (options.readme, own, BEGIN, END),
        (options.peers_page, peers, PEERS_BEGIN, PEERS_END),
        (
            options.peers_page,
            spec_table(options.results, "forms"),
            FORMS_BEGIN,
            FORMS_END,
        ),
        (
            options.peers_page,
            spec_table(options.results, "methods"),
            METHODS_BEGIN,
            METHODS_END,
        ),
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
