"""The published Gemma 3 270M on this CPU.

`python -m benchmarks.real` measures the seconds to open the file, the seconds to the
first token of a new process with and without a cache of compiled programs, peak memory,
and tokens/s at batch 1: plain and with n-gram and suffix drafts, on prompts whose
answers copy from them and on prose. It also compares short and long prompts with and
without local pages: the keys and values of layers with a sliding window.
`--windows-only` measures only that, and keeps the other results. It writes
`results/real-cpu.json` and the tables in `docs/models.md` and `docs/running.md`.
`python -m benchmarks.peers --real` compares the model with llama.cpp.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.cpu_pair import warn_unless_quiet
from benchmarks.first_token import measure_startup
from benchmarks.measure import decode, load_prompts, run_prompts, sampling, summarise
from benchmarks.readme_table import replace_table
from jaxspec.bench.data import read_prompts
from jaxspec.bench.measure import Batch, Bench, Run, run_batch
from jaxspec.bench.report import PLAIN
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import PACKAGED_GEMMA3
from jaxspec.sampling_params import RequestOutputKind
from jaxspec_checkpoints import open_checkpoint, packaged_gemma3

HERE = Path(__file__).parent
RESULT = HERE / "results" / "real-cpu.json"
DOCS = HERE.parent / "docs"
START, END = "<!-- real: written by benchmarks/real.py -->", "<!-- end of real -->"
WINDOWS_START = "<!-- windows: written by benchmarks/real.py -->"
WINDOWS_END = "<!-- end of windows -->"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 3},
    "suffix": {"method": "suffix"},
}
NUM_PROMPTS = 4
MAX_MODEL_LEN = 1024
# Prompts of the comparison of windows, in tokens.
WINDOW_LENGTHS = 128, 8192
SUFFIX = "suffix"
# Whether layers with a sliding window keep all tokens.
KEEPS_ALL = {"all tokens": True, "windows": False}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--num-tokens", type=int, default=64, help="new tokens of every request")
    add("--num-speculative-tokens", type=int, default=4)
    add("--repeats", type=int, default=3, help="runs of every prompt in every mode")
    add("--dtype", default="auto")
    add("--windows-only", action="store_true")
    return parser


def prompts() -> list[tuple[str, str]]:
    """Return (domain, text) pairs: answers to `copy` prompts repeat the prompt."""
    copied = [one.text for one in read_prompts(HERE / "copy_prompts.jsonl")]
    prose = load_prompts(None, 2).by_domain
    stories = [*prose["stories"], *prose["fiction"]][:NUM_PROMPTS]
    return [("copy", one) for one in copied[:NUM_PROMPTS]] + [
        ("prose", one) for one in stories
    ]


def measure_open() -> float:
    """Return the median seconds to read the header of the file, vocabulary included."""
    code = (
        "import time; from jaxspec_checkpoints import open_checkpoint, packaged_gemma3;"
        "path = packaged_gemma3(); start = time.monotonic(); open_checkpoint(path);"
        "print(time.monotonic() - start)"
    )
    words = [sys.executable, "-c", code]
    runs = [subprocess.check_output(words, text=True) for _ in range(5)]
    return statistics.median(map(float, runs))


def measure_method(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure plain decoding and one method alternately, in one engine."""
    config = METHODS[method] | {
        "num_speculative_tokens": options.num_speculative_tokens
    }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=PACKAGED_GEMMA3,
            speculative_config=config,
            dtype=options.dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
        )
    )
    try:
        runs = run_prompts(engine, prompts(), options, {"temperature": 0.0})
    finally:
        engine.shutdown()
    return {
        domain: summarise([run for run in runs if run.domain == domain])
        for domain in ("copy", "prose")
    }


def measure_windows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure engines with and without local pages alternately, in one process.

    Returns:
        A row for each prompt length, engine and mode.
    """
    num_drafts = options.num_speculative_tokens
    engines = {
        name: LLMEngine.from_engine_args(
            EngineArgs(
                model=PACKAGED_GEMMA3,
                speculative_config={
                    "method": SUFFIX,
                    "num_speculative_tokens": num_drafts,
                },
                dtype=options.dtype,
                max_model_len=max(WINDOW_LENGTHS) + options.num_tokens,
                max_num_seqs=1,
                disable_hybrid_kv_cache_manager=keeps_all,
            )
        )
        for name, keeps_all in KEEPS_ALL.items()
    }
    try:
        return [
            row
            for length in WINDOW_LENGTHS
            for row in _measure_length(engines, length, options)
        ]
    finally:
        for engine in engines.values():
            engine.shutdown()


def _measure_length(
    engines: dict[str, LLMEngine], length: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    pages = sorted(DOCS.glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    tokens = next(iter(engines.values())).tokenizer.encode(text)[:length]
    modes = {
        mode: Batch(
            prompts=[tokens],
            params=[sampling(options.num_tokens, count, temperature=0.0)],
        )
        for mode, count in ((PLAIN, 0), (SUFFIX, options.num_speculative_tokens))
    }
    held = {  # also the warm-up: runs that compile do not count
        (name, mode): held_bytes(engine, batch)
        for name, engine in engines.items()
        for mode, batch in modes.items()
    }
    runs: dict[tuple[str, str], list[Run]] = {
        (name, mode): [] for name in engines for mode in modes
    }
    for repeat in range(options.repeats):
        for name in list(engines)[:: -1 if repeat % 2 else 1]:
            once = Bench(engine=engines[name], num_iters=1).repeat(modes)
            for mode, [run] in once.runs.items():
                runs[name, mode].append(run)
    texts = [run.token_ids for same in runs.values() for run in same]
    return [
        {
            "length": length,
            "keeps": name,
            "mode": mode,
            "kv_bytes": held[name, mode],
            "tokens_per_s": [round(decode(run).tokens_per_s, 2) for run in same],
            "tokens_per_round": [
                round(decode(run).num_tokens / decode(run).num_rounds, 3)
                for run in same
            ],
            "first_token_s": [round(run.first_token_s[0], 3) for run in same],
            "is_equal": all(one == texts[0] for one in texts),
        }
        for (name, mode), same in runs.items()
    ]


def held_bytes(engine: LLMEngine, batch: Batch) -> int:
    """Return the bytes of the pages that a request holds at its last token."""
    pool, held = engine.scheduler.tables.pool, 0

    def note(_: Any) -> None:
        nonlocal held
        held = pool.num_units - pool.num_free or held

    (params,) = batch.params
    streamed = params.clone()
    streamed.output_kind = RequestOutputKind.DELTA
    run_batch(engine, Batch(prompts=batch.prompts, params=[streamed]), note)
    arrays = jax.tree.leaves(engine.runner.state.target_pages)
    return held * sum(array.nbytes for array in arrays) // pool.num_units


def windows_table(result: dict[str, Any]) -> str:
    """Return the comparison of engines with and without local pages, in Markdown."""
    windows = result["windows"]
    rows = {(row["length"], row["mode"], row["keeps"]): row for row in windows["rows"]}
    lines = [
        "| prompt | drafts | KV of the request, all tokens → windows | tokens/s "
        "| ratio, and range by pair | first token |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for length in WINDOW_LENGTHS:
        for mode in (PLAIN, SUFFIX):
            both = [rows[length, mode, keeps] for keeps in KEEPS_ALL]
            whole, local = (row["tokens_per_s"] for row in both)
            ratios = [
                after / before for before, after in zip(whole, local, strict=True)
            ]
            cells = [
                f"{length:,}",
                "none" if mode == PLAIN else mode,
                " → ".join(f"{row['kv_bytes'] / 1e6:.1f}" for row in both) + " MB",
                " → ".join(f"{statistics.median(one):.1f}" for one in (whole, local)),
                f"{statistics.median(ratios):.2f}, {min(ratios):.2f} to "
                f"{max(ratios):.2f}",
                " → ".join(
                    f"{statistics.median(row['first_token_s']):.2f}" for row in both
                )
                + " s",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    header = windows["header"]
    num_equal = sum(row["is_equal"] for row in windows["rows"])
    lines += [
        "",
        f"Gemma 3 270M, {header['dtype']}, K = {header['num_speculative_tokens']}, "
        f"{header['num_tokens']} new tokens, batch 1; medians of {header['repeats']} "
        f"alternating runs on {header['device']}, load {header['load']}. Texts are "
        f"the same in {num_equal} of {len(windows['rows'])} rows.",
    ]
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    startup = result["startup"]
    megabytes = {
        kind: f"{row['peak_resident_bytes'] / 1e6:,.0f} MB"
        for kind, row in startup.items()
    }
    lines = [
        "| | |",
        "|---|--:|",
        f"| open the file | {result['open_s']:.2f} s |",
        "| first token, with an empty program cache | "
        f"{startup['cold']['first_token_s']:.1f} s |",
        "| first token, with cached programs | "
        f"{startup['warm']['first_token_s']:.1f} s |",
        f"| peak memory | {megabytes['cold']} cold, {megabytes['warm']} warm |",
        "",
        "| tokens/s, batch 1 | copying | prose |",
        "|---|--:|--:|",
    ]

    def row(name: str, values: list[str]) -> str:
        return f"| {name} | {' | '.join(values)} |"

    for method, found in result["methods"].items():
        plain = [found[domain]["plain_tokens_per_s"] for domain in found]
        drafts = [found[domain]["speculative_tokens_per_s"] for domain in found]
        ratios = [found[domain]["speed_up"] for domain in found]
        shown = [
            f"{speed:.0f} ({ratio:.2f})"
            for speed, ratio in zip(drafts, ratios, strict=True)
        ]
        lines.append(row(f"plain, next to {method}", [f"{one:.0f}" for one in plain]))
        lines.append(row(f"{method} drafts (ratio to plain)", shown))
    header = result["header"]
    lines += [
        "",
        f"{header['dtype']}, K = {header['num_speculative_tokens']}, "
        f"{header['num_tokens']} new tokens, {NUM_PROMPTS} prompts each, medians of "
        f"{header['repeats']} runs; {header['device']}, load {header['load']}. "
        "Speed-ups are medians of the ratios by prompt.",
    ]
    return "\n".join(lines)


def main() -> None:
    options = make_parser().parse_args()
    device = warn_unless_quiet()
    header = {
        "date": time.strftime("%Y-%m-%d"),
        "dtype": options.dtype,
        "num_tokens": options.num_tokens,
        "num_speculative_tokens": options.num_speculative_tokens,
        "repeats": options.repeats,
        "device": device["cpu"],
        "load": device["load_average"][0],
    }
    if options.windows_only:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    else:
        result = {
            "header": header,
            "file_bytes": packaged_gemma3().stat().st_size,
            "num_parameters": open_checkpoint(packaged_gemma3()).num_parameters,
            "open_s": measure_open(),
            "startup": measure_startup(0, options.dtype, 16, model=PACKAGED_GEMMA3),
            "methods": {name: measure_method(name, options) for name in METHODS},
        }
    result["windows"] = {"header": header, "rows": measure_windows(options)}
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, shown, *marks in (
        ("models.md", table(result), START, END),
        ("running.md", windows_table(result), WINDOWS_START, WINDOWS_END),
    ):
        page = (DOCS / name).read_text(encoding="utf-8")
        page = replace_table(page, shown, *marks)
        (DOCS / name).write_text(page, encoding="utf-8")
        print(shown)


if __name__ == "__main__":
    main()
