"""Host seconds per round with many running sequences, over a device that only waits.

    python -m benchmarks.host_overhead

With 64 and with 256 sequences, whose callers want final outputs or every token.
The whole engine runs (scheduler, pages, packing, unpacking, texts) with the bundled
pair's tokenizer; in place of the compiled program stands one that takes a fixed time
and accepts a random number of drafts. Host time is what `step` takes beyond waiting for
it; jax's own time for a launch and two copies is not in it. It is told twice: by the
clock, which the goals are for, and in CPU time of the process, for machines on which
other work runs; each is the median of several measurements of the median round.
Of shorter rounds a launch may have several (`num_scheduler_steps`): what is told is the
time of each.
Writes benchmarks/results/host-overhead.json.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench.report import record
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.runner import Runner, pool_of
from jaxspec.program.plan import PoolShape, StepPlan, StepShape
from jaxspec.program.wire import CaughtUp, PlanLayout, StepResult, result_layout
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

RESULT = Path(__file__).with_name("results") / "host-overhead.json"
NUM_SEQS = 64, 256
NUM_DRAFT_TOKENS = 4
ROUND_S = 0.010
# Of a small model, of which several rounds run in a launch.
SHORT_ROUND_S, STEPS = 0.003, 8
PROMPT_TOKENS = 64
# Of a round of so many sequences, by what their callers want.
GOALS_MS = {
    (64, "FINAL_ONLY"): 1.0,
    (256, "FINAL_ONLY"): 2.0,
    (256, "DELTA"): 4.0,
}
FIRST_ID = 400


class WaitingRunner(Runner):
    """Runs nothing: a round takes a fixed time and ends with random tokens.

    Sequences never end by themselves.
    """

    def __init__(self, pool: PoolShape, vocab_size: int, round_s: float):
        self.pool, self._round_s = pool, round_s
        self.fetched_ts = 0.0
        self._arrays: Any = SimpleNamespace(params=({}, ()), state={})
        self.num_launches = 0
        self.compiler, self.compiles_beside = Compiler(lambda shape: None), False
        self._vocab_size = vocab_size
        self._layouts: dict[StepShape, PlanLayout] = {}
        self._random = np.random.default_rng(0)
        self._free_at = 0.0
        self.waited_s = self.waited_cpu_s = 0.0
        self.temporary_bytes = self.code_bytes = 0

    def launch(self, plan: StepPlan, shape: StepShape) -> Any:
        if shape not in self._layouts:
            self._layouts[shape] = PlanLayout(shape, self.pool)
        vector = self._layouts[shape].pack(plan)
        round_s = self._round_s * plan.num_rounds
        self._free_at = max(self._free_at, time.monotonic()) + round_s
        self.num_launches += 1
        return self._free_at, vector

    def fetch(self, result: Any, shape: StepShape) -> StepResult | CaughtUp:
        start, start_cpu = time.perf_counter(), time.process_time()
        ready_at, vector = result
        layout = self._layouts[shape]
        numbers = self._device(shape, vector, layout)
        time.sleep(max(ready_at - time.monotonic(), 0.0))
        self.fetched_ts = time.monotonic()
        self.waited_s += time.perf_counter() - start
        self.waited_cpu_s += time.process_time() - start_cpu
        form = CaughtUp if shape.is_catch_up else StepResult
        return form.unpack(numbers, shape)

    def _device(
        self, shape: StepShape, vector: np.ndarray, layout: PlanLayout
    ) -> np.ndarray:
        """What the program would say, computed while it would run."""
        if shape.is_catch_up:
            return np.full(result_layout(shape).size, -1, np.float32).view(np.int32)
        if shape.max_rounds == 1:
            return self._round(shape, vector, layout)
        count = int(layout.view(vector, "num_rounds"))
        rounds = [self._round(shape, vector, layout) for _ in range(count)]
        rounds += [np.zeros_like(rounds[0])] * (shape.max_rounds - count)
        return np.concatenate([np.array([count], np.int32), *rounds])

    def _round(
        self, shape: StepShape, vector: np.ndarray, layout: PlanLayout
    ) -> np.ndarray:
        seqs, width = shape.num_seqs, shape.num_draft_tokens + 1
        drafts = layout.view(vector, "decode_draft")
        accepted = self._random.integers(0, drafts + 1)
        # Ids past the special and the byte tokens.
        tokens = self._random.integers(FIRST_ID, self._vocab_size, (seqs, width))
        no_flag = np.zeros(seqs, bool)
        no_tile = np.zeros(shape.num_tiles, bool)
        result = {
            "tokens": tokens,
            "num_emitted": accepted + 1,
            "num_draft": drafts,
            "num_accepted": accepted,
            "is_done": no_flag,
            "is_broken": no_flag,
            "is_draft_broken": no_flag,
            "tile_token": np.full(shape.num_tiles, FIRST_ID),
            "tile_is_done": no_tile,
            "tile_is_broken": no_tile,
        }
        return np.concatenate(result_layout(shape).flatten(result))


def make_engine(
    num_seqs: int, max_model_len: int, round_s: float = ROUND_S, steps: int = 1
) -> tuple[LLMEngine, WaitingRunner]:
    args = EngineArgs(
        model="jaxspec/tiny-gemma2",
        speculative_model="jaxspec/tiny-gemma2-draft",
        speculative_config={"controller": "fixed"},
        num_speculative_tokens=NUM_DRAFT_TOKENS,
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        num_scheduler_steps=steps,
        num_gpu_blocks_override=num_seqs * max_model_len // 16,
    )
    config = args.create_engine_config()
    pool = pool_of(config)
    runner = WaitingRunner(pool, pool.vocab_size, round_s)
    return LLMEngine(config, runner=runner), runner


def measure(
    engine: LLMEngine, runner: WaitingRunner, kind: RequestOutputKind, rounds: int
) -> tuple[list[float], list[float]]:
    """Host seconds of every round in which all sequences decode: elapsed, and of CPUs.

    Of a launch of several rounds, the same share for each.
    """
    random, num_seqs = np.random.default_rng(1), engine.config.max_num_seqs
    params = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=kind)
    for number in range(num_seqs):
        prompt = random.integers(FIRST_ID, 8000, PROMPT_TOKENS).tolist()
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    samples: list[float] = []
    cpu_samples: list[float] = []
    while any(
        request.num_prefilled < PROMPT_TOKENS for request in engine.scheduler.running
    ):
        engine.step()
    while len(engine.scheduler.running) < num_seqs:
        engine.step()
    while engine.scheduler.rows.lags(np.arange(num_seqs)).any():
        engine.step()
    for _ in range(10):
        engine.step()
    while len(samples) < rounds:
        start, start_cpu = time.perf_counter(), time.process_time()
        waited, waited_cpu = runner.waited_s, runner.waited_cpu_s
        before = engine.stats.num_rounds
        engine.step()
        host_s = time.perf_counter() - start - (runner.waited_s - waited)
        cpu_s = time.process_time() - start_cpu - (runner.waited_cpu_s - waited_cpu)
        count = engine.stats.num_rounds - before
        samples += [host_s / count] * count
        cpu_samples += [cpu_s / count] * count
    assert len(engine.scheduler.running) == num_seqs
    engine.abort_request([str(number) for number in range(num_seqs)])
    while engine.has_unfinished_requests():
        engine.step()
    return samples, cpu_samples


def summary(runs: list[tuple[list[float], list[float]]]) -> dict[str, Any]:
    """The median measurement, and all: a machine's own noise is larger than a run's."""
    elapsed = [1e3 * statistics.median(samples) for samples, _ in runs]
    of_cpu = [1e3 * statistics.median(cpu_samples) for _, cpu_samples in runs]
    late = [1e3 * sorted(samples)[int(0.95 * len(samples))] for samples, _ in runs]
    return {
        "median_cpu_ms": round(statistics.median(of_cpu), 4),
        "median_ms": round(statistics.median(elapsed), 4),
        "p95_ms": round(statistics.median(late), 4),
        "medians_ms": [round(one, 4) for one in elapsed],
        "rounds": len(runs[0][0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host seconds per round.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    # Room for prompts and for what is said before all decode.
    length = 512 + PROMPT_TOKENS + options.rounds * (NUM_DRAFT_TOKENS + 1)
    kinds = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
    engines = [
        (round_s, steps, *make_engine(num_seqs, length, round_s, steps))
        for num_seqs, (round_s, steps) in itertools.product(
            NUM_SEQS, [(ROUND_S, 1), (SHORT_ROUND_S, 1), (SHORT_ROUND_S, STEPS)]
        )
    ]
    cells = [
        (round_s, steps, engine, runner, kind)
        for round_s, steps, engine, runner in engines
        for kind in (kinds if round_s == ROUND_S else kinds[:1])
    ]
    runs: list[list[Any]] = [[] for _ in cells]
    for _ in tqdm(range(options.repeats)):
        for own, (_, _, engine, runner, kind) in zip(runs, cells, strict=True):
            own.append(measure(engine, runner, kind, options.rounds))
    found = []
    for own, (round_s, steps, engine, _, kind) in zip(runs, cells, strict=True):
        num_seqs, is_goal = engine.config.max_num_seqs, round_s == ROUND_S
        found.append(
            {
                "num_seqs": num_seqs,
                "outputs": kind.name,
                "round_ms": 1e3 * round_s,
                "num_scheduler_steps": steps,
                "goal_ms": GOALS_MS.get((num_seqs, kind.name)) if is_goal else None,
            }
            | summary(own)
        )
        print(json.dumps(found[-1]))
    result = {"num_draft_tokens": NUM_DRAFT_TOKENS, "host": found}
    record(result, options.out, command="python -m benchmarks.host_overhead")


if __name__ == "__main__":
    main()
