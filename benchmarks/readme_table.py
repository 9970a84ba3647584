"""Writes tables of results into README.md, benchmarks/README.md and pages of docs/.

`--check` changes nothing, and fails if a page does not show the current table.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.draft_tables import (
    COSTS_FILE,
    REAL_DRAFTS_FILE,
    cost_table,
    real_drafts_table,
)
from benchmarks.peers.cells import peers_table
from benchmarks.training import text_table, training_table

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
REAL_BEGIN = "<!-- real: written by benchmarks/readme_table.py -->"
REAL_END = "<!-- end of real -->"
TRAINING_BEGIN = "<!-- training: written by benchmarks/readme_table.py -->"
TRAINING_END = "<!-- end of training -->"
TEXTS_BEGIN = "<!-- texts: written by benchmarks/readme_table.py -->"
TEXTS_END = "<!-- end of texts -->"
NO_TRAINING = (
    "Not measured yet: train as above, and run `python -m benchmarks.training`."
)
COSTS_BEGIN = "<!-- costs: written by benchmarks/readme_table.py -->"
COSTS_END = "<!-- end of costs -->"
DRAFTS_BEGIN = "<!-- real drafts: written by benchmarks/readme_table.py -->"
DRAFTS_END = "<!-- end of real drafts -->"
NO_REAL = (
    "Not measured yet: run `python -m benchmarks.peers --real` on a quiet machine."
)
# Cells of the comparison at real sizes, and their titles.
REAL_CELLS = {
    "batch 1": "batch 1",
    "batch": "batch 8 (2B: 4)",
    "prompt": "prompt of 512",
}
NO_FORMS = "Not measured yet: run the commands above on a quiet machine."
NOT_TRAINED = "Not measured yet."
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
    """Return the Markdown of the result of `make bench`, for docs/drafts.md."""
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


def peers_result(folder: Path, name: str = "peers-cpu.json") -> dict[str, Any] | None:
    """Return a result of `python -m benchmarks.peers`, if there is one."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def real_table(result: dict[str, Any] | None) -> str:
    """Return the comparison with llama.cpp at real sizes."""
    if result is None:
        return NO_REAL
    cells = _real_cells(result, "compared")
    threads = result["arguments"]["threads"]
    columns = [(cell, count) for cell in REAL_CELLS for count in threads]
    titles = [
        f"{REAL_CELLS[cell]}, {count} thread{'s' * (count > 1)}"
        for cell, count in columns
    ]
    lines = [f"| model | {' | '.join(titles)} |", "|---" * (1 + len(columns)) + "|"]
    for model, found in cells.items():
        shown = [_real_cell(found.get(column)) for column in columns]
        lines.append(f"| {model} | {' | '.join(shown)} |")
    engines = [row.get("engines", {}) for row in result["cells"]]
    versions = [one["llama.cpp"]["version"] for one in engines if "llama.cpp" in one]
    version = f"; xllamacpp {versions[0]}" if versions else ""
    lines += [
        "",
        "A cell is jaxspec's tokens per second and, in brackets, its ratio to "
        "llama.cpp's on the same file: above 1, jaxspec is faster. The 270M is Gemma 3 "
        "270M; the 2B is Gemma 2 2B's shape with random weights. jaxspec runs in "
        "bfloat16, llama.cpp with its defaults (activations in 8 bits). Medians of "
        f"{result['arguments']['repeats']} runs, in which the engines take turns.",
        f"{_measured(result).removesuffix('.')}{version}.",
    ]
    return "\n".join(lines)


def real_tables(result: dict[str, Any] | None) -> str:
    """Return all tables at real sizes: compared, 2B shapes by type, and drafts."""
    if result is None:
        return NO_REAL
    lines = [
        real_table(result),
        result["timed"],
        "",
        "| 2B shapes | threads | batch 1 | relative to bfloat16 | GB/s read | share of "
        "a copy | batch 4 | prompt of 512 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in form_rows(result):
        shown = [_number(row[cell]) for cell in ("batch", "prompt")]
        lines.append(
            f"| {row['name']} | {row['threads']} | {_number(row['batch 1'])} | "
            f"{row['relative']:.2f} | {row['bytes_per_s'] / 1e9:.1f} | "
            f"{row['share']:.2f} | {' | '.join(shown)} |"
        )
    lines += [
        "",
        "| drafts, batch 1 | prompts | plain tokens/s | with drafts | speed-up | "
        "tokens per round with drafts |",
        "|---|---|---|---|---|---|",
    ]
    for model, found in _real_cells(result, "speculation").items():
        for (cell, _), row in found.items():
            if "failed" in row:
                continue
            middle, counts = row["median_tokens_per_s"], row.get("counts", {})
            kept = counts.get("accepted", 0) / max(counts.get("rounds", 0), 1)
            prompts = "random" if cell in REAL_CELLS else cell
            lines.append(
                f"| {model} | {prompts} | {_number(middle['plain'])} | "
                f"{_number(middle['drafts'])} | {row['ratio']:.2f} | {1 + kept:.2f} |"
            )
    if form_rows(result):
        title = "Share of the memory's bandwidth that 2B shapes reach on a CPU"
        lines += ["", f"![{title}](figures/real-bandwidth.svg)"]
    return "\n".join(lines)


def form_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return speeds and bandwidth of the 2B shapes, by type and number of threads."""
    forms, rows = _real_cells(result, "forms"), []
    for name, found in forms.items():
        for threads in result["arguments"]["threads"]:
            own = {cell: found.get((cell, threads), {}) for cell in REAL_CELLS}
            if not all("median_tokens_per_s" in row for row in own.values()):
                continue
            speeds = {
                cell: row["median_tokens_per_s"]["jaxspec"] for cell, row in own.items()
            }
            engine = own["batch 1"]["engines"]["jaxspec"]
            bytes_per_s = speeds["batch 1"] * engine["weight_bytes"]
            row = {"name": name, "threads": threads, **speeds}
            row |= {
                "runs": own["batch 1"]["tokens_per_s"]["jaxspec"],
                "bytes_per_s": bytes_per_s,
                "share": bytes_per_s / engine["copy_bytes_per_s"],
            }
            base = next((one for one in rows if one["threads"] == threads), row)
            rows.append(row | {"relative": speeds["batch 1"] / base["batch 1"]})
    return rows


def _real_cells(
    result: dict[str, Any], section: str
) -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    """Return the rows of a section by model, then by cell and number of threads."""
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in result["cells"]:
        if row["section"] == section:
            own = found.setdefault(row["model"], {})
            own[row["cell"], row["threads"]] = row
    return found


def _real_cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "-"
    return f"{_number(row['median_tokens_per_s']['jaxspec'])} ({row['ratio']:.2f})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


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
    parser.add_argument("--root", type=Path, default=HERE.parent, help="of the pages")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    results = options.results
    real = peers_result(results, "peers-real-cpu.json")
    drafts = readme_table(newest_result(results))
    peers = peers_table(peers_result(results))
    path = results / "training-270m.json"
    training, texts = NO_TRAINING, NOT_TRAINED
    if path.exists():
        result = json.loads(path.read_text())
        training = training_table(result)
        texts = text_table(result) if "by_text" in result else NOT_TRAINED
    forms, methods = (spec_table(results, kind) for kind in ("forms", "methods"))
    costs, acceptance = (
        peers_result(results, name) for name in (COSTS_FILE, REAL_DRAFTS_FILE)
    )
    tables = [
        ("docs/drafts.md", cost_table(costs), COSTS_BEGIN, COSTS_END),
        ("docs/drafts.md", real_drafts_table(acceptance), DRAFTS_BEGIN, DRAFTS_END),
        ("docs/drafts.md", texts, TEXTS_BEGIN, TEXTS_END),
        ("README.md", real_table(real), REAL_BEGIN, REAL_END),
        ("docs/drafts.md", drafts, BEGIN, END),
        ("docs/training.md", training, TRAINING_BEGIN, TRAINING_END),
        ("benchmarks/README.md", real_tables(real), REAL_BEGIN, REAL_END),
        ("benchmarks/README.md", peers, PEERS_BEGIN, PEERS_END),
        ("benchmarks/README.md", forms, FORMS_BEGIN, FORMS_END),
        ("benchmarks/README.md", methods, METHODS_BEGIN, METHODS_END),
    ]
    for name, table, begin, end in tables:
        page = options.root / name
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
