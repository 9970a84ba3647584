"""`make bench`: the bundled pair at batch 1, with and without speculation.

Prints a table and one JSON line, and writes that line under benchmarks/results/. See
benchmarks/README.md for definitions.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from benchmarks.first_token import measure_startup
from benchmarks.measure import (
    DOMAINS,
    load_prompts,
    run_prompts,
    sampling,
    summarise,
)
from benchmarks.peers.found import Child, huggingface
from benchmarks.peers.turns import LONGEST_ANSWER_S, start, usable_cores
from benchmarks.readme_table import readme_table
from jaxspec.bench.measure import Batch, Bench, run_batch
from jaxspec.bench.report import commit, machine, now, num_cores, table, versions
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine

RESULTS = Path(__file__).with_name("results")
TARGET, DRAFT = "jaxspec/tiny-gemma2", "jaxspec/tiny-gemma2-draft"
CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
# Settings of --quick, which only tests that the benchmark works.
QUICK = {"num_tokens": 16, "repeats": 1, "prompts_per_domain": 1}
HF_DTYPES = ("float32", "bfloat16")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, help="folder with valid.jsonl.xz, to take prompts from")
    add("--prompts-per-domain", type=int, default=3)
    add("--num-tokens", type=int, default=128, help="new tokens of every request")
    add("--num-speculative-tokens", type=int, default=4, help="drafts per round")
    add("--repeats", type=int, default=5, help="runs of every prompt in every mode")
    add("--dtype", default="auto")
    add("--quick", action="store_true", help="one short run; writes no result")
    add("--skip-huggingface", action="store_true")
    add("--skip-startup", action="store_true")
    add("--trace", type=Path, help="only write jax's profile of a text to this folder")
    add("--output", type=Path, help="where to write the JSON line")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if options.num_tokens < 2 or options.repeats < 1 or options.prompts_per_domain < 1:
        raise SystemExit(
            "--num-tokens must be at least 2, and the other numbers at least 1"
        )
    # Read the machine's load before the run, as it shows whether the machine was idle.
    device = warn_unless_quiet()
    chosen = load_prompts(options.corpus, options.prompts_per_domain)
    print(f"Prompts: {options.prompts_per_domain} per domain, from {chosen.source}")
    engine = make_engine(
        options,
        speculative_model=DRAFT,
        num_speculative_tokens=options.num_speculative_tokens,
        speculative_config={"controller": "fixed"},
    )
    prompts = [(name, text) for name, all in chosen.by_domain.items() for text in all]
    if options.trace:
        trace(engine, prompts[0][1], options)
        return
    result = header("cpu_pair", engine, options, device) | {
        "prompts": {"source": chosen.source, "digest": chosen.digest},
        "draft": DRAFT,
        "modes": {
            mode: measure_mode(engine, prompts, mode, options) for mode in CONTROLS
        },
    }
    token_ids = [engine.tokenizer.encode(text) for _, text in prompts]
    engine.shutdown()
    del engine
    result["huggingface"] = measure_huggingface(token_ids, options)
    result["startup"] = {"skipped": "by --skip-startup"}
    if not options.skip_startup:
        result["startup"] = measure_startup(
            options.num_speculative_tokens, options.dtype, min(options.num_tokens, 16)
        )
    print(f"{readme_table(result)}\n\n{rounds_table(result)}")
    line = json.dumps(result)
    print(line)
    path = options.output
    if path is None and not options.quick:
        name = result["date"].replace(":", "").replace("-", "")
        path = RESULTS / f"cpu_pair-{name}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n", encoding="utf-8")


def warn_unless_quiet() -> dict[str, Any]:
    """Describe the machine; print a warning if other programs load it."""
    found = machine()
    if found["load_average"][0] > 0.5 * found["cores"]:
        print(
            f"Warning: the machine is busy (load {found['load_average']}), so "
            "results are unreliable",
            file=sys.stderr,
        )
    return found


def make_engine(options: argparse.Namespace, **drafts: Any) -> LLMEngine:
    """Make an engine of the bundled target for one sequence at a time."""
    args = EngineArgs(model=TARGET, dtype=options.dtype, max_num_seqs=1, **drafts)
    return LLMEngine.from_engine_args(args)


def header(
    benchmark: str, engine: LLMEngine, options: argparse.Namespace, about: Any
) -> dict[str, Any]:
    """Return the header of a result (machine, versions, options), without local paths.

    Args:
        about: Description of the machine before anything ran.
    """
    device = engine.runner.mesh.devices.flat[0]
    hidden = ("corpus", "output", "other_map", "trace")
    return {
        "benchmark": benchmark,
        "date": now(),
        **commit(),
        "arguments": {
            name: value for name, value in vars(options).items() if name not in hidden
        },
        "target": TARGET,
        "device": f"{device.platform}: {device.device_kind}",
        "dtype": str(engine.runner.dtype),
        "machine": about,
        "versions": versions(),
    }


def measure_mode(
    engine: LLMEngine,
    prompts: list[tuple[str, str]],
    mode: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure all prompts with one kind of sampling; return a row per domain."""
    runs = run_prompts(engine, prompts, options, CONTROLS[mode])
    rows = {
        domain: summarise([run for run in runs if run.domain == domain])
        for domain in DOMAINS
    }
    return {
        "controls": CONTROLS[mode],
        "rows": rows | {"all": summarise(runs)},
        "prompts": [run.as_json() for run in runs],
    }


def took_s(child: Child, prompt: list[int], num_tokens: int) -> float:
    """Return the child's seconds from receiving a prompt to the last new token."""
    asked = {"prompts": [prompt], "batch_size": 1, "num_tokens": num_tokens}
    return child.ask(asked, LONGEST_ANSWER_S)["seconds"]


def measure_huggingface(
    prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure transformers' greedy `generate` by dtype, or return why it cannot run."""
    peer, num_tokens = huggingface(), options.num_tokens
    if options.skip_huggingface:
        return {"skipped": "by --skip-huggingface"}
    if peer.missing:
        return {"skipped": peer.missing}
    found = {}
    for dtype in HF_DTYPES:
        task = {**peer.models(RESULTS), "mode": "plain", "dtype": dtype}
        with contextlib.closing(
            start(peer, task, cores=usable_cores(), limit_s=LONGEST_ANSWER_S)
        ) as child:
            speeds = []
            for prompt in tqdm(prompts, desc=f"HuggingFace {dtype}"):
                took_s(child, prompt, 4)
                # Subtract the time of a text of one token, so that prefill is not
                # counted.
                seconds = [
                    took_s(child, prompt, num_tokens) - took_s(child, prompt, 1)
                    for _ in range(options.repeats)
                ]
                speeds.append([(num_tokens - 1) / one for one in seconds])
        found[dtype] = {"tokens_per_s": speeds, "threads": num_cores()}
    return found


def trace(engine: LLMEngine, text: str, options: argparse.Namespace) -> None:
    """Write a profile of one speculative request with jax's profiler."""
    params = sampling(
        options.num_tokens, options.num_speculative_tokens, temperature=0.0
    )
    batch = Batch(prompts=[engine.tokenizer.encode(text)], params=[params])
    # Run the request once before, so that nothing is compiled during the profile.
    Bench(engine=engine, num_iters=1).alternate({"": batch})
    with jax.profiler.trace(str(options.trace)):
        run_batch(engine, batch)
    print(f"Profile of jax for TensorBoard or xprof: {options.trace}")


def rounds_table(result: dict[str, Any]) -> str:
    """Format the times of rounds, and the host's share of each."""
    rows = [["rounds", "ms", "host, ms", "host", "tokens"]]
    for mode, measured in result["modes"].items():
        found = measured["rows"]["all"]
        for kind in ("plain", "speculative"):
            spent = found[f"{kind}_round"]
            rows.append(
                [
                    f"{mode}, {kind}",
                    f"{spent['round_s'] * 1e3:.2f}",
                    f"{spent['host_s'] * 1e3:.2f}",
                    f"{spent['host_share']:.0%}",
                    "1" if kind == "plain" else f"{found['tokens_per_round']:.2f}",
                ]
            )
    return table(rows)


if __name__ == "__main__":
    main()
