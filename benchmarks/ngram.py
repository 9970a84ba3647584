"""Drafts looked up in the text, on the bundled target at batch 1, beside plain rounds.

Two sets of texts: `copy`, whose continuations repeat what the sequence has already,
and `prose`, drawn at temperature 1, where next to nothing matches and the lookup may
cost nothing. Plain and speculative run in turn in one process; medians. Prints a line
per set and writes benchmarks/results/ngram-cpu.json, or suffix-cpu.json with
`--method suffix`. See benchmarks/README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cpu_pair import header, make_engine, warn_unless_quiet
from benchmarks.measure import run_prompts, summarise
from benchmarks.prompts import bundled
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.settings.speculation import LOOKUP_KEYS, SUFFIX_DEFAULTS

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CONTROLS: dict[str, dict[str, Any]] = {
    "copy": {"temperature": 0.0},
    "prose": {"temperature": 1.0},
    "again": {"temperature": 0.0},
}
PROSE_DOMAINS = ("stories", "fiction")
DEFAULT_DRAFTS = {"ngram": 8, "suffix": 16}
QUICK = {"num_tokens": 16, "repeats": 1}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--method", choices=DEFAULT_DRAFTS, default="ngram")
    add("--num-speculative-tokens", type=int, help="drafts per round: 8, of suffix 16")
    add("--prompt-lookup-max", type=int, default=4)
    add("--prompt-lookup-min", type=int, default=3)
    for name, value in SUFFIX_DEFAULTS.items():
        add("--" + name.replace("_", "-"), type=type(value), default=value)
    add("--controller", choices=("fixed", "adaptive"), default="fixed")
    add("--repeats", type=int, default=9, help="runs of every prompt in every mode")
    add("--dtype", default="auto")
    add("--quick", action="store_true", help="one short run; writes no result")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.quick:
        vars(options).update(QUICK)
    device = warn_unless_quiet()
    if options.num_speculative_tokens is None:
        options.num_speculative_tokens = DEFAULT_DRAFTS[options.method]
    keys = {"ngram": LOOKUP_KEYS, "suffix": tuple(SUFFIX_DEFAULTS)}[options.method]
    common = "method", "controller", "num_speculative_tokens"
    lookup = {name: getattr(options, name) for name in (*common, *keys)}
    engine = make_engine(options, speculative_config=lookup)
    sets = {
        "copy": list(bundled("copy_prompts.jsonl")),
        "prose": prose_prompts(),
    }
    if lookup.get("suffix_decoding_max_cached_requests"):
        # The answers of before are kept: every repeat but the first finds its own.
        sets["again"] = list(bundled("prompts.jsonl"))
    result = header(options.method, engine, options, device) | {
        "batch": 1,
        "sets": {
            name: measure(engine, name, prompts, options)
            for name, prompts in sets.items()
        },
    }
    for name, found in result["sets"].items():
        row = found["all"]
        print(
            f"{name}: {row['plain_tokens_per_s']:.1f} -> "
            f"{row['speculative_tokens_per_s']:.1f} tokens/s, "
            f"{row['speed_up']:.2f} times, acceptance {row['acceptance_rate']:.2f}, "
            f"{row['tokens_per_round']:.2f} tokens per round"
        )
    if not options.quick:
        path = RESULTS / f"{options.method}-cpu.json"
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")


def prose_prompts() -> list[tuple[str, str]]:
    """Domain and text of the repository's own list, as far as it is prose."""
    return [pair for pair in bundled("prompts.jsonl") if pair[0] in PROSE_DOMAINS]


def measure(
    engine: LLMEngine,
    name: str,
    prompts: list[tuple[str, str]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All prompts of one set: a summary, and a row per prompt."""
    runs = run_prompts(engine, prompts, options, CONTROLS[name])
    return {
        "controls": CONTROLS[name],
        "all": summarise(runs),
        "prompts": [run.as_json() for run in runs],
    }


if __name__ == "__main__":
    main()
