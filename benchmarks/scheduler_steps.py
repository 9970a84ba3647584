"""Several rounds in one launch against one, on the bundled pair.

    python -m benchmarks.scheduler_steps

Two engines in one process, with `num_scheduler_steps` of 1 and of 8, run the same
requests in turn: greedy, of 128 tokens, who want the last one only. How many of the 8
a launch has the engine chooses. With `--streamed` they want each as it comes: then a
launch has one round, in a program that could have several. Beside the speed stands the
CPU time of the process by rounds: on few cores the host works on what the device would.
Writes benchmarks/results/scheduler-steps-cpu.json, of streams
benchmarks/results/scheduler-steps-streamed-cpu.json.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from benchmarks.cpu_pair import DRAFT, TARGET, warn_unless_quiet
from benchmarks.measure import decode, sampling
from benchmarks.prompts import load_prompts
from jaxspec.bench.measure import Batch, Bench, Run, run_batch
from jaxspec.bench.report import record, spread, table
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind

RESULTS = Path(__file__).with_name("results")
STEPS = 1, 8
NUM_DRAFT_TOKENS = 5
# Sequences at a time, and drafts per round.
WORKLOADS = (1, 0), (1, NUM_DRAFT_TOKENS), (8, 0), (8, NUM_DRAFT_TOKENS)


def make_engine(steps: int) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=TARGET,
            speculative_model=DRAFT,
            num_speculative_tokens=NUM_DRAFT_TOKENS,
            speculative_config={"controller": "fixed"},
            max_num_seqs=8,
            num_scheduler_steps=steps,
        )
    )


def measure(engines: dict[int, LLMEngine], batch: Batch, repeats: int) -> list[Any]:
    """Runs of all engines in turn, with what each took of the CPU and of launches."""
    for engine in engines.values():
        Bench(engine=engine).warm_up(batch)
    found = []
    for repeat in tqdm(range(repeats), leave=False):
        for steps in list(engines)[:: -1 if repeat % 2 else 1]:
            engine = engines[steps]
            launches, rounds = engine.runner.num_launches, engine.stats.num_rounds
            before = time.process_time()
            run = run_batch(engine, batch)
            cpu_s = time.process_time() - before
            launches = engine.runner.num_launches - launches
            rounds = engine.stats.num_rounds - rounds
            found.append((steps, run, cpu_s / rounds, rounds / launches))
    return found


def summarise(found: list[Any]) -> dict[str, Any]:
    """By steps: speeds, and what a round takes."""
    rows, speeds = {}, dict[int, list[float]]()
    for steps in STEPS:
        mine = [one[1:] for one in found if one[0] == steps]
        runs: list[Run] = [one[0] for one in mine]
        speeds[steps] = [decode(run).tokens_per_s for run in runs]
        rows[str(steps)] = {
            "tokens_per_s": spread(speeds[steps]),
            "round_s": median(decode(run).round_s for run in runs),
            "host_per_round_s": median(decode(run).host_per_round_s for run in runs),
            "cpu_per_round_s": median(one[1] for one in mine),
            "rounds_per_launch": median(one[2] for one in mine),
            "acceptance_rate": runs[0].acceptance.rate,
        }
    texts = {str(one[1].token_ids) for one in found}
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    return {"by_steps": rows, "speed_up": spread(ratios), "is_equal": len(texts) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description="Several rounds per launch.")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--streamed", action="store_true", help="tokens as they come")
    parser.add_argument("--out", type=Path, help="default: see above")
    options = parser.parse_args()
    device = warn_unless_quiet()
    engines = {steps: make_engine(steps) for steps in STEPS}
    tokenizer = engines[1].tokenizer
    chosen = load_prompts(None, 2)
    texts = [text for both in chosen.by_domain.values() for text in both]
    results, lines = [], []
    for num_seqs, num_drafts in WORKLOADS:
        prompts = [tokenizer.encode(text) for text in texts[:num_seqs]]
        params = sampling(options.num_tokens, num_drafts, temperature=0.0)
        if options.streamed:
            params = replace(params, output_kind=RequestOutputKind.DELTA)
        batch = Batch(prompts=prompts, params=[params] * num_seqs)
        row = summarise(measure(engines, batch, options.repeats))
        results.append({"num_seqs": num_seqs, "num_draft_tokens": num_drafts} | row)
        for steps, one in row["by_steps"].items():
            times = [one[f"{name}_s"] for name in ("round", "host_per_round")]
            times.append(one["cpu_per_round_s"])
            lines.append(
                [f"batch {num_seqs}, K={num_drafts}, {steps} steps"]
                + [f"{one['tokens_per_s']['median']:.0f}"]
                + [f"{1e3 * seconds:.2f}" for seconds in times]
                + [f"{one['rounds_per_launch']:.1f}"]
            )
        print(results[-1]["speed_up"], results[-1]["is_equal"], flush=True)
    heads = ["", "tokens/s", "round ms", "host ms", "CPU ms", "rounds/launch"]
    print(table([heads, *lines]))
    found = {
        "num_tokens": options.num_tokens,
        "repeats": options.repeats,
        "is_streamed": options.streamed,
        "dtype": str(engines[1].runner.dtype),
        "at_the_start": device,
        "workloads": results,
    }
    kind, flag = ("-streamed", " --streamed") if options.streamed else ("", "")
    out = options.out or RESULTS / f"scheduler-steps{kind}-cpu.json"
    record(found, out, command=f"python -m benchmarks.scheduler_steps{flag}")


if __name__ == "__main__":
    main()
