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
        f"{row['num_prompts']} prompts ({result['prompts']['source']}). The speed-up "
        "is the median of ratios of paired runs, not the ratio of the two medians. "
        "Greedy text is the same with and without speculation for "
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


def forms_table(folder: Path) -> str:
    """Return the table of all results of `jaxspec.bench spec --forms`, with notes."""
    rows = [
        "| prompts, temperature, batch | form | drafts | tokens per round | round, ms "
        "| plain round, ms | times as fast as plain | least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for path in sorted(folder.glob("forms-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        prompts = prompts_of(result)
        found = [(one, point) for one in result["forms"] for point in one["points"]]
        found.sort(key=lambda pair: (pair[1]["temperature"], pair[1]["batch_size"]))
        rows += [_form_row(prompts, one, point) for one, point in found]
        for one in result["forms"]:
            if one["form"].startswith("best"):
                tree = one["speculative_token_tree"]
                notes.append(f"- {prompts}, {one['form']}: `{tree}`")
        notes += [f"- {prompts}: {line}" for line in result["answer"][:-1]]
        notes.append(f"- {prompts}: {_measured(result)}")
    return "\n".join([*rows, "", *notes]) if notes else NO_FORMS


def prompts_of(result: dict[str, Any]) -> str:
    """Return the name of the prompts of a result of `jaxspec.bench spec`."""
    given = result["arguments"]["dataset_path"]
    return "bundled" if given is None else Path(given).stem.replace("_", " ")


def methods_table(folder: Path) -> str:
    """Return the table of all results of `jaxspec.bench spec --all-methods`."""
    rows = [
        "| prompts, temperature, batch | method | K | acceptance by position "
        "| tokens per round | round, ms | times as fast as plain | least | MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for path in sorted(folder.glob("methods-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found = [(one, point) for one in result["methods"] for point in one["points"]]
        found.sort(key=lambda pair: (pair[1]["temperature"], pair[1]["batch_size"]))
        rows += [_method_row(prompts_of(result), *pair) for pair in found]
        notes.append(f"- {prompts_of(result)}: {_measured(result)}")
    return "\n".join([*rows, "", *notes]) if notes else NO_FORMS


def _method_row(prompts: str, one: dict[str, Any], point: dict[str, Any]) -> str:
    speculative, ratio = point["speculative"], point["decode_speed_up"]
    round_ms = speculative["round_s"]["median"] * 1e3
    rates = speculative["acceptance"]["acceptance_rate_per_position"]
    return (
        f"| {prompts}, {point['temperature']:g}, {point['batch_size']} "
        f"| {one['name'].split()[0]} | {one['num_levels']} "
        f"| {' '.join(f'{rate:.2f}' for rate in rates)} "
        f"| {point['tokens_per_round']:.2f} | {round_ms:.1f} "
        f"| {ratio['median']:.2f} | {ratio['least']:.2f} "
        f"| {one['memory_bytes'] / MIB:.1f} |"
    )


def _form_row(prompts: str, one: dict[str, Any], point: dict[str, Any]) -> str:
    times = [
        f"{point[mode]['round_s']['median'] * 1e3:.1f}"
        for mode in ("speculative", "plain")
    ]
    ratio = point["decode_speed_up"]
    form = one["form"] if len(one["form"]) < 20 else "tree"
    return (
        f"| {prompts}, {point['temperature']:g}, {point['batch_size']} | {form} "
        f"| {one['num_nodes']} | {point['tokens_per_round']:.2f} | {times[0]} "
        f"| {times[1]} | {ratio['median']:.2f} | {ratio['least']:.2f} |"
    )


def replace_table(readme: str, table: str, begin: str, end: str) -> str:
    """Return `readme` with `table` between the marks `begin` and `end`."""
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
    peers = peers_table(peers_result(options.results))
    tables = [
        (options.readme, own, BEGIN, END),
        (options.peers_page, peers, PEERS_BEGIN, PEERS_END),
        (options.peers_page, forms_table(options.results), FORMS_BEGIN, FORMS_END),
        (
            options.peers_page,
            methods_table(options.results),
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
