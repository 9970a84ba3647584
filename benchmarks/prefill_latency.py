"""Inter-token latency of streams while a long prompt comes in beside them.

    python -m benchmarks.prefill_latency

Streams of the bundled pair decode; a prompt of 4,000 tokens comes. Latency is the mean
time between two outputs of a stream: before the prompt, while it is fed to the target
and then to the draft model, and after.
The same is played several times in one engine, at first until nothing is compiled any
more; ratios are medians. Writes benchmarks/results/prefill-latency.json.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from statistics import mean, median
from typing import Any

from tqdm.auto import tqdm

from jaxspec.bench.report import record
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

RESULT = Path(__file__).with_name("results") / "prefill-latency.json"
GOAL = 1.5
NUM_STREAMS = 3
NUM_ROUNDS = 120  # of the streams alone, before and after
LONG = "long"


def make_engine(options: argparse.Namespace) -> LLMEngine:
    args = EngineArgs(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        speculative_config={"controller": "fixed"},
        num_speculative_tokens=options.num_speculative_tokens,
        max_num_seqs=NUM_STREAMS + 1,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
        dtype=options.dtype,
    )
    return LLMEngine.from_engine_args(args)


class Streams:
    """Requests that never end, and when each of their outputs came."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.times: dict[str, list[float]] = {}
        params = SamplingParams(
            max_tokens=None,
            temperature=0.0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        for number in range(NUM_STREAMS):
            prompt = [2, *range(400 + number, 430 + number)]
            name = f"stream {number}"
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            self.times[name] = []

    def step(self) -> None:
        for output in self.engine.step():
            if output.request_id in self.times:
                self.times[output.request_id].append(time.monotonic())

    def latency(self, start: float, end: float) -> float:
        """Mean seconds between two outputs of a stream in a span of time."""
        gaps = []
        for times in self.times.values():
            inside = [at for at in times if start <= at <= end]
            gaps.append((inside[-1] - inside[0]) / (len(inside) - 1))
        return mean(gaps)


def play(engine: LLMEngine, num_prompt: int, seed: int) -> dict[str, Any]:
    """One prompt beside the streams."""
    streams = Streams(engine)
    for _ in range(NUM_ROUNDS):
        streams.step()
    begun = time.monotonic()
    for _ in range(NUM_ROUNDS):
        streams.step()
    prompt = [2, *(300 + (seed + i) % 7000 for i in range(num_prompt - 1))]
    # More than one token, or the draft model would have nothing to read it for.
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    arrived = time.monotonic()
    engine.add_request(LONG, {"prompt_token_ids": prompt}, params)
    (request,) = engine.scheduler.waiting
    num_prefilled, chunks = 0, Counter[int]()
    while engine.get_num_unfinished_requests() > NUM_STREAMS:
        streams.step()
        chunks[request.num_prefilled - num_prefilled] += 1
        num_prefilled = request.num_prefilled
    fed = time.monotonic()
    for _ in range(NUM_ROUNDS):
        streams.step()
    ended = time.monotonic()
    engine.abort_request([*streams.times])
    while engine.has_unfinished_requests():
        engine.step()
    alone = mean([streams.latency(begun, arrived), streams.latency(fed, ended)])
    beside = streams.latency(arrived, fed)
    return {
        "alone_ms": round(1e3 * alone, 3),
        "beside_ms": round(1e3 * beside, 3),
        "ratio": round(beside / alone, 3),
        "prefill_s": round(fed - arrived, 3),
        "tokens_per_round": {
            str(size): count for size, count in sorted(chunks.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams beside a long prompt.")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    engine = make_engine(options)
    num_compiles = -1
    while engine.runner.num_compiles != num_compiles:
        num_compiles = engine.runner.num_compiles
        play(engine, options.prompt_tokens, seed=0)
        engine.wait_for_programs()
    runs = [
        play(engine, options.prompt_tokens, seed)
        for seed in tqdm(range(1, options.repeats + 1), desc="prompts")
    ]
    engine.wait_for_programs()
    result = {
        "benchmark": "prefill_latency",
        "num_streams": NUM_STREAMS,
        "prompt_tokens": options.prompt_tokens,
        "num_speculative_tokens": options.num_speculative_tokens,
        "goal": GOAL,
        "median_ratio": round(median(run["ratio"] for run in runs), 3),
        "num_compiles_while_timed": engine.runner.num_compiles - num_compiles,
        "runs": runs,
    }
    record(result, options.out, command="python -m benchmarks.prefill_latency")
    print(json.dumps({name: result[name] for name in ("median_ratio", "runs")}))


if __name__ == "__main__":
    main()
