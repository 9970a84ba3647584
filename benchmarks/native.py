"""Layers in C++ beside XLA's own, on the bundled pair at batch 1 on a CPU.

Two engines in one process, one with `JAXSPEC_NATIVE=off`, decode every prompt in turn,
plain and with drafts; medians over prompts of medians over repeats, and how many texts
the two have in common. Prints a line per type of weights and writes
benchmarks/results/native-cpu.json. See benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.cpu_pair import header, make_engine, warn_unless_quiet
from benchmarks.measure import PromptRuns, run_prompts, summarise
from benchmarks.prompts import bundled
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import BUNDLED_DRAFT
from jaxspec_kernels import native

PATH = Path(__file__).parent / "results" / "native-cpu.json"
GREEDY = {"temperature": 0.0}
FORMS = {"xla": native.OFF, "native": native.ON}
ROWS = ("plain_tokens_per_s", "speculative_tokens_per_s")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--num-prompts", type=int, default=8, help="about as many, evenly chosen")
    add("--num-speculative-tokens", type=int, default=5)
    add("--repeats", type=int, default=5, help="runs of every prompt in every mode")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    device = warn_unless_quiet()
    every = list(bundled("prompts.jsonl"))
    prompts = every[:: max(len(every) // options.num_prompts, 1)]  # of all domains
    found: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        options.dtype = dtype
        runs: dict[str, list[PromptRuns]] = {form: [] for form in FORMS}
        engines = {form: engine_of(form, options) for form in FORMS}
        for prompt in tqdm(prompts, desc=dtype):
            for form, engine in engines.items():
                use(form)
                runs[form] += run_prompts(engine, [prompt], options, GREEDY)
        found[dtype] = compare(runs)
        for row in ROWS:
            xla, ours = (found[dtype][form][row] for form in FORMS)
            ratio = found[dtype]["ratios"][row]
            print(f"{dtype}, {row}: {xla:.0f} -> {ours:.0f}, {ratio:.2f} times")
        described = header("native", engines["C++"], options, device)
    result = described | {"types": found}
    PATH.write_text(json.dumps(result) + "\n", encoding="utf-8")


def use(form: str) -> None:
    """What engines are made of, and their programs compiled for, from here on."""
    os.environ[native.VARIABLE] = FORMS[form]


def engine_of(form: str, options: argparse.Namespace) -> LLMEngine:
    use(form)
    drafts = {
        "model": BUNDLED_DRAFT,
        "num_speculative_tokens": options.num_speculative_tokens,
        "controller": "fixed",
    }
    return make_engine(options, speculative_config=drafts)


def compare(runs: dict[str, list[PromptRuns]]) -> dict[str, Any]:
    """Both forms' medians, their ratios by prompt, and texts in common."""
    found: dict[str, Any] = {form: summarise(own) for form, own in runs.items()}
    pairs = list(zip(*(runs[form] for form in FORMS), strict=True))
    found["num_same_texts"] = sum(
        xla.plain[0].token_ids == ours.plain[0].token_ids for xla, ours in pairs
    )
    found["ratios"] = {
        row: statistics.median(
            summarise([ours])[row] / summarise([xla])[row] for xla, ours in pairs
        )
        for row in ROWS
    }
    return found


if __name__ == "__main__":
    main()
