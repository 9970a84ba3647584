"""Offline throughput: many prompts in batches, against what else runs on a CPU.

Ours, plain and with drafts, HuggingFace's batched `generate`, and vLLM where its own
environment is named (`--vllm-python`). Every engine runs in a process of its own, one
after the other, in rounds, so that a slow moment of the machine hits them all; ratios
are of medians. Prints a table and one JSON line, and writes that line.
"""

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from machine import commit, describe_machine, num_cores, versions
from prompts import load_prompts
from tqdm.auto import tqdm

from jaxspec.engine.arg_utils import EngineArgs

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TARGET, DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"
PROMPTS_PER_DOMAIN = 5  # the corpus has no more of the rarest
# What vLLM needs on a CPU; see its documentation of the CPU backend.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, help="folder with valid.jsonl.xz, to take prompts from")
    add("--num-prompts", type=int, default=256)
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--batch-size", type=int, default=32, help="sequences at a time, of each")
    add("--num-speculative-tokens", type=int, default=5)
    add("--repeats", type=int, default=3)
    add("--dtype", default="bfloat16", help="of every engine")
    add("--vllm-python", help="interpreter of an environment with vllm-cpu")
    add("--output", type=Path, default=RESULTS / "throughput-cpu.json")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    machine = describe_machine()
    chosen = load_prompts(options.corpus, PROMPTS_PER_DOMAIN)
    few = [text for prompts in chosen.by_domain.values() for text in prompts]
    # In turn, as often as it takes: no engine shares prefixes.
    texts = list(itertools.islice(itertools.cycle(few), options.num_prompts))
    task = {
        "target": TARGET,
        "draft": DRAFT,
        "texts": texts,
        "num_tokens": options.num_tokens,
        "batch_size": options.batch_size,
        "num_drafts": options.num_speculative_tokens,
        "dtype": options.dtype,
        "threads": num_cores(),
    }
    folder = EngineArgs(model=TARGET).create_engine_config().model
    os.environ.update(VLLM_ENVIRONMENT, JAXSPEC_TARGET_FOLDER=folder)
    engines = {
        "jaxspec plain": [sys.executable, "ours_batch.py", "plain"],
        "jaxspec drafts": [sys.executable, "ours_batch.py", "drafts"],
        "huggingface": [sys.executable, "hf_batch.py"],
    }
    if options.vllm_python:
        engines["vllm"] = [options.vllm_python, "vllm_batch.py"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for repeat in tqdm(range(options.repeats), desc="rounds"):
        order = list(engines) if repeat % 2 == 0 else list(reversed(engines))
        for name in tqdm(order, desc="engines", leave=False):
            runs[name].append(run(engines[name], task))
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    result = {
        "benchmark": "throughput",
        "date": now.isoformat(timespec="seconds"),
        **commit(),
        "arguments": {
            name: value
            for name, value in vars(options).items()
            if name not in ("corpus", "output", "vllm_python")
        },
        "prompts": {"source": chosen.source, "digest": chosen.digest},
        "machine": machine,
        "versions": versions(),
        "engines": {name: summary(found) for name, found in runs.items()},
        "ratios": ratios(runs),
    }
    print(table(result))
    line = json.dumps(result)
    print(line)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(line + "\n", encoding="utf-8")


def run(command: list[str], task: dict[str, Any]) -> dict[str, Any]:
    """One engine on all prompts; its result is a line of JSON among its output."""
    done = subprocess.run(
        [command[0], str(HERE / command[1]), *command[2:]],
        input=json.dumps(task),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # vLLM's log goes on after it.
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(found[-1])


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Every repeat's speed, its median, and what else the engine said."""
    speeds = [one["num_tokens"] / one["seconds"] for one in found]
    rest = {
        name: value
        for name, value in found[-1].items()
        if name not in ("seconds", "num_tokens", "digest")
    }
    return {
        "tokens_per_s": [round(speed, 1) for speed in speeds],
        "median_tokens_per_s": round(median(speeds), 1),
        **rest,
    }


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Ours over every other, of medians."""
    speed = {
        name: median(one["num_tokens"] / one["seconds"] for one in found)
        for name, found in runs.items()
    }
    return {
        f"{ours} / {other}": round(speed[ours] / speed[other], 3)
        for ours in ("jaxspec drafts", "jaxspec plain")
        for other in speed
        if other != ours and not (ours.endswith("plain") and other.endswith("drafts"))
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| engine | tokens/s (median) | runs |", "|---|---|---|"]
    for name, found in result["engines"].items():
        lines.append(
            f"| {name} | {found['median_tokens_per_s']} | {found['tokens_per_s']} |"
        )
    lines += [f"{name}: {value}" for name, value in result["ratios"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
