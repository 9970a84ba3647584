"""The published Gemma 3 270M on this CPU.

`python -m benchmarks.real` measures the seconds to open the file, the seconds to the
first token of a new process with and without a cache of compiled programs, peak memory,
and tokens/s at batch 1: plain and with n-gram and suffix drafts, on prompts whose
answers copy from them and on prose. It writes `results/real-cpu.json` and the table in
`docs/models.md`. `python -m benchmarks.peers --real` compares it with llama.cpp.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cpu_pair import warn_unless_quiet
from benchmarks.first_token import measure_startup
from benchmarks.measure import load_prompts, run_prompts, summarise
from jaxspec.bench.data import read_prompts
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import PACKAGED_GEMMA3
from jaxspec_checkpoints import open_checkpoint, packaged_gemma3

HERE = Path(__file__).parent
RESULT = HERE / "results" / "real-cpu.json"
PAGE = HERE.parent / "docs" / "models.md"
START, END = "<!-- real: written by benchmarks/real.py -->", "<!-- end of real -->"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 3},
    "suffix": {"method": "suffix"},
}
NUM_PROMPTS = 4
MAX_MODEL_LEN = 1024


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--num-tokens", type=int, default=64, help="new tokens of every request")
    add("--num-speculative-tokens", type=int, default=4)
    add("--repeats", type=int, default=3, help="runs of every prompt in every mode")
    add("--dtype", default="auto")
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
    result: dict[str, Any] = {
        "header": {
            "date": time.strftime("%Y-%m-%d"),
            "dtype": options.dtype,
            "num_tokens": options.num_tokens,
            "num_speculative_tokens": options.num_speculative_tokens,
            "repeats": options.repeats,
            "device": device["cpu"],
            "load": device["load_average"][0],
        },
        "file_bytes": packaged_gemma3().stat().st_size,
        "num_parameters": open_checkpoint(packaged_gemma3()).num_parameters,
        "open_s": measure_open(),
        "startup": measure_startup(0, options.dtype, 16, model=PACKAGED_GEMMA3),
        "methods": {name: measure_method(name, options) for name in METHODS},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    shown = f"{START}\n{table(result)}\n{END}"
    PAGE.write_text(before + shown + after, encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
