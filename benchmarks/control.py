"""Compares adaptive K with every fixed K and with plain decoding.

    python -m benchmarks.control --json FILE [--parts cells step ...]

Engines without drafts, with a fixed K and with a chosen K run in one process, in turn;
their speeds are compared per repeat. Parts:

- `cells`: at several forced acceptance rates and batch sizes, compares adaptive K with
  the best fixed K and with plain decoding; also records K, probes, and measured and
  expected round times. Adaptive K and plain decoding run in turn in short slices, in
  several sets of engines. A second engine without drafts shows the noise.
- `step`: forced acceptance that jumps between 0.9 and 0 every five seconds: tokens/s
  over time, and the time until they are within a tenth of the settled value.
- `ramp`: the number of requests rises to the maximum and falls: tokens/s and K.
- `foreign`: texts of several domains, verified by the target, greedy and sampled
  without a seed.
- `free`: cost of a draft model that is not used. Compares an engine with a draft model
  and K = 0 with two equal engines without drafts, whose difference is the noise.
  Repeated with several sets of engines.
- `short`: time from submission to the last token of single requests of 96 tokens on
  held-out prompts, adaptive K / plain decoding. Measured in warm engines, and for the
  first request of new engines whose programs are in the compilation cache, beside a
  second new engine without drafts.

The result file is written after every part, and lists the goals that were missed.
Except in `foreign` and `short`, acceptance is forced, so texts mean nothing.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm.auto import tqdm

from benchmarks.control_rows import (
    ALIKE,
    PLAIN,
    Mark,
    Round,
    by_num_drafts,
    compare,
    mean_drafts,
    misses,
    of_sets,
    rates,
    settle,
    short_line,
    speed_table,
    step_table,
)
from benchmarks.cpu_pair import DRAFT, TARGET, warn_unless_quiet
from benchmarks.measure import decode, load_prompts
from jaxspec.bench.data import BUNDLED, read_prompts
from jaxspec.bench.measure import Batch, run_batch
from jaxspec.bench.report import header, spread, write_whole
from jaxspec.config.speculation import ADAPTIVE, FIXED
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

PARTS = ("cells", "step", "ramp", "free", "foreign", "short")
RESULT = Path(__file__).with_name("results") / "control-cpu.json"
MOST_DRAFTS = 5
ACCEPTANCE_RATES, BATCHES = (0.0, 0.3, 0.5, 0.7, 0.9), (1, 4, 8, 16)
SIZES = (1, 8)  # batch sizes of `step` and `free`
MAX_MODEL_LEN, LONGEST_PROMPT = 2048, 512
# For `step`: acceptance of each phase, seconds per phase, and seconds per bin of the
# plot.
STEP_ACCEPTANCE = (0.9, 0.0, 0.9, 0.0, 0.9, 0.0)
PHASE_S, BIN_S = 5.0, 0.1
# Seconds that an engine runs in `cells`, `step` and `ramp` before the next one's turn.
SLICE_S = 0.5
# Numbers of tokens of requests that follow each other. They differ, so that the
# requests of a batch do not end together, and the mean length, on which the round time
# depends, soon is constant.
LENGTHS = range(256, 768, 64)
# For `cells` and `free`: numbers of sets of engines. The speeds of two plain engines of
# one process differ by up to 5 %, always in the same direction, depending on the
# addresses of their arrays.
CELL_SETS, FREE_SETS, FREE_REPEATS = 3, 4, 4
# The engines of a set of `cells`, in the order in which those of the first are made.
ENGINES = ("forced", "plain", "alike")
# For `cells`: seconds that each engine runs per set.
TURN_S = 4.0
# For `short`: numbers of prompts per domain, of bundled prompts, of generated tokens,
# and of new engines.
SHORT_PER_DOMAIN, SHORT_BUNDLED, SHORT_TOKENS, SHORT_SETS = 3, 5, 96, 5
RAMP_S, RAMP_BIN_S, RAMP_ACCEPTANCE = 30.0, 0.5, 0.7
# Settings of --quick, which only tests that the benchmark works.
QUICK = {
    "repeats": 1,
    "num_tokens": 64,
    "warm_up_s": 0.5,
    "turn_s": 0.5,
    "phase_s": 1.0,
    "ramp_s": 4,
}

_names = (f"control-{number}" for number in itertools.count())


class Rounds:
    """Records the launches of an engine that prefill nothing."""

    def __init__(self, engine: LLMEngine):
        self.seen: list[Round] = []
        record_time = engine.scheduler.record_time

        def note(launch: Launch, result: Any, seconds: float) -> None:
            if not launch.shape.max_prompt_tokens:
                expected_s = engine.step_times.expected(launch.round_kind)
                drafts, now = launch.round_kind.num_draft_tokens, time.monotonic()
                count = len(launch.rows)
                self.seen.append(Round(now, drafts, count, seconds, expected_s))
            record_time(launch, result, seconds)

        engine.scheduler.record_time = note


class Way(NamedTuple):
    """One mode to compare: an engine, and the maximum K of its requests."""

    engine: LLMEngine
    num_drafts: int


class Engines:
    """Owns the engines that the parts use; each is made on first use."""

    def __init__(self, options: argparse.Namespace, *, is_warm: bool = True):
        self._options, self._is_warm = options, is_warm
        self.rounds: dict[LLMEngine, Rounds] = {}

    @cached_property
    def plain(self) -> LLMEngine:
        return self._make()

    @cached_property
    def alike(self) -> LLMEngine:
        """A second engine with the settings of `plain`."""
        return self._make()

    @cached_property
    def forced(self) -> dict[str, LLMEngine]:
        """Engines with forced acceptance, by name; `force` changes their acceptance."""
        rule = {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.5**i for i in range(1, MOST_DRAFTS + 1)],
        }
        return {name: self._make(name, rule) for name in (FIXED, ADAPTIVE)}

    @cached_property
    def judged(self) -> dict[str, LLMEngine]:
        """Engines that verify drafts with the target, by name."""
        return {name: self._make(name, {}) for name in (FIXED, ADAPTIVE)}

    def _make(self, controller: str = "", rule: Mapping[str, Any] = {}) -> LLMEngine:
        drafts: dict[str, Any] = {}
        if controller:
            drafts["speculative_config"] = {
                "model": DRAFT,
                "num_speculative_tokens": MOST_DRAFTS,
                "controller": controller,
                **rule,
            }
        args = EngineArgs(
            model=TARGET,
            dtype=self._options.dtype,
            max_num_seqs=self._options.max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            **drafts,
        )
        engine = LLMEngine.from_engine_args(args)
        if self._is_warm:
            name = f"{controller or PLAIN}{', forced' if rule else ''}"
            with tqdm(total=1, desc=f"Programs of {name}") as bar:
                engine.warm_up(LONGEST_PROMPT)
                bar.update()
        self.rounds[engine] = Rounds(engine)
        return engine

    def drop(self, name: str) -> None:
        """Free engines that no later part needs; each holds many programs in memory."""
        for engine in vars(self).pop(name, {}).values():
            self.rounds.pop(engine)
            engine.shutdown()
        gc.collect()

    def close(self) -> None:
        """Free all engines."""
        for engine in self.rounds:
            engine.shutdown()
        vars(self).clear()
        gc.collect()

    def ways(self, drafted: Mapping[str, LLMEngine], fixed: Sequence[int]) -> "Ways":
        """Return the modes by name: plain decoding, some fixed K, and adaptive K."""
        found = {PLAIN: Way(self.plain, 0)}
        found |= {str(k): Way(drafted[FIXED], k) for k in fixed}
        return found | {ADAPTIVE: Way(drafted[ADAPTIVE], MOST_DRAFTS)}


Ways = dict[str, Way]


def force(engine: LLMEngine, acceptance: float) -> None:
    """Accept every draft with this probability from the next launch on."""
    before = engine.runner.state.forced_acceptance
    assert before is not None, "an engine with real acceptance"
    rates = jax.device_put(np.full(before.shape, acceptance, "f4"), before.sharding)
    state = dataclasses.replace(engine.runner.state, forced_acceptance=rates)
    engine.runner.state = state


def sampling(num_tokens: int, num_drafts: int, temperature: float) -> SamplingParams:
    # Requests are streamed, so that the benchmark knows when all requests of a batch
    # decode.
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=temperature,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"num_speculative_tokens": num_drafts},
    )


def alternate(
    engines: Engines,
    ways: Ways,
    batches: Sequence[list[list[int]]],
    options: argparse.Namespace,
    *,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Decode each batch in every mode, alternating; return results after warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    adaptive = ways[ADAPTIVE].engine
    seen, rounds, counted = engines.rounds[adaptive].seen, list[Round](), Counter()

    def num_compiles() -> int:
        return sum(way.engine.runner.num_compiles for way in ways.values())

    def speed(name: str, prompts: list[list[int]]) -> float:
        """Return tokens/s while all requests of a batch run."""
        way = ways[name]
        params = sampling(options.num_tokens, way.num_drafts, temperature)
        batch = Batch(prompts=prompts, params=[params] * len(prompts))
        return decode(run_batch(way.engine, batch)).tokens_per_s

    compiled = num_compiles()
    for prompts in batches:
        for name in ways:
            speed(name, prompts)
        end = time.monotonic() + options.warm_up_s
        while time.monotonic() < end:
            speed(ADAPTIVE, prompts)
        begin, before = len(seen), counts(adaptive)
        for repeat in range(options.repeats):
            for name in list(ways)[:: -1 if repeat % 2 else 1]:
                speeds[name].append(speed(name, prompts))
        rounds += seen[begin:]
        counted.update(counts(adaptive))
        counted.subtract(before)
    found = compare(speeds) | counted | {"by_num_drafts": by_num_drafts(rounds)}
    # Number of compilations. It must be 0, because compiling in the background slows a
    # run.
    return found | {"num_compiles": num_compiles() - compiled}


def counts(engine: LLMEngine) -> Counter:
    """Return the counters of the policy that chooses K."""
    names = ("num_probes", "num_stops", "saved_s", "lost_s")
    return Counter({name: getattr(engine.policy, name) for name in names})


def sizes_of(options: argparse.Namespace, wanted: Sequence[int]) -> list[int]:
    return [size for size in wanted if size <= options.max_num_seqs]


def bundled_ids(engines: Engines, count: int) -> list[list[int]]:
    """Return token ids of the bundled prompts, repeated."""
    tokenizer = engines.plain.tokenizer
    found = itertools.cycle(read_prompts(BUNDLED))
    return [one.token_ids(tokenizer) for one in itertools.islice(found, count)]


def cells(engines: Engines, options: argparse.Namespace) -> list[dict[str, Any]]:
    ways, rows = engines.ways(engines.forced, options.fixed), list[dict[str, Any]]()
    places = list(itertools.product(sizes_of(options, BATCHES), ACCEPTANCE_RATES))
    for size, acceptance in tqdm(places, desc="cells"):
        for engine in engines.forced.values():
            force(engine, acceptance)
        found = alternate(engines, ways, [bundled_ids(engines, size)], options)
        rows.append({"batch": size, "acceptance": acceptance, "sets": []} | found)
    for number in range(1 if options.quick else CELL_SETS):
        own = Engines(options) if number else engines
        # Engines that are made first are slower by up to 5 %.
        for name in (*ENGINES[number:], *ENGINES[:number]):
            getattr(own, name)
        for row in tqdm(rows, desc=f"cells, set {number + 1}"):
            force(own.forced[ADAPTIVE], row["acceptance"])
            row["sets"].append(in_turn(own, row["batch"], options))
        if number:
            own.close()
    for row in rows:
        for name in (ADAPTIVE, ALIKE):
            ratios = [found[name] / found[PLAIN] for found in row["sets"]]
            row[f"{name}_by_plain"] = spread(ratios)
    return rows


def in_turn(
    engines: Engines, size: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return tokens/s of adaptive K and of both engines without drafts."""
    ways = engines.ways(engines.forced, []) | {ALIKE: Way(engines.alike, 0)}
    prompts = bundled_ids(engines, size)

    def begin(name: str) -> Drive:
        return Drive(
            engines, ways[name], prompts, wanted=lambda now: size, lengths=LENGTHS
        )

    drive([begin(ADAPTIVE)], options.warm_up_s)
    drives = {name: begin(name) for name in ways}
    drive(list(drives.values()), options.turn_s)
    last = {name: one.marks[-1] for name, one in drives.items()}
    return {name: mark.num_tokens / mark.seconds for name, mark in last.items()}


def free(engines: Engines, options: argparse.Namespace) -> list[dict[str, Any]]:
    engines.drop("forced")
    sizes, found = sizes_of(options, SIZES), dict[int, list[dict[str, Any]]]()
    more = argparse.Namespace(
        **vars(options) | {"repeats": FREE_REPEATS * options.repeats}
    )
    num_sets = 1 if options.quick else FREE_SETS
    for _ in tqdm(range(num_sets), desc="free"):
        own = Engines(options)
        force(own.forced[ADAPTIVE], 0.0)
        ways = own.ways(own.forced, [0]) | {ALIKE: Way(own.alike, 0)}
        for size in sizes:
            batches = [bundled_ids(own, size)]
            found.setdefault(size, []).append(alternate(own, ways, batches, more))
        own.close()
    return [{"batch": size} | of_sets(rows) for size, rows in found.items()]


def foreign(engines: Engines, options: argparse.Namespace) -> list[dict[str, Any]]:
    ways, rows = engines.ways(engines.judged, [MOST_DRAFTS]), []
    tokenizer, by_domain = engines.plain.tokenizer, dict[str, list[list[list[int]]]]()
    for prompt in itertools.chain.from_iterable(map(read_prompts, options.prompts)):
        tokens = prompt.token_ids(tokenizer)
        if len(tokens) <= LONGEST_PROMPT:
            by_domain.setdefault(prompt.category, []).append([tokens])
    places = list(itertools.product(by_domain, (0.0, 1.0)))
    for domain, heat in tqdm(places, desc="foreign"):
        batches = by_domain[domain][: options.prompts_per_domain]
        found = alternate(engines, ways, batches, options, temperature=heat)
        rows.append({"domain": domain, "temperature": heat} | found)
    return rows


class Drive:
    """Keeps a number of requests running in one engine, in slices of time.

    Its clock stands still between slices, so that several engines can run in turn.

    Attributes:
        marks: Token counts by its clock.
        rounds: Launches without prompts, with times of its clock.
    """

    def __init__(
        self,
        engines: Engines,
        way: Way,
        prompts: Sequence[list[int]],
        *,
        wanted: Callable[[float], int],
        lengths: Sequence[int],
        before_step: Callable[[float], object] = lambda now: None,
    ):
        """Begin without requests.

        Args:
            wanted: Number of requests by elapsed seconds.
            lengths: Numbers of tokens of the requests, in order.
            before_step: Called with the elapsed seconds.
        """
        self._engine, self._num_drafts = way
        self._wanted, self._before_step = wanted, before_step
        self._texts = zip(
            itertools.cycle(prompts), itertools.cycle(lengths), strict=False
        )
        self._running = deque[str]()
        self._seen = engines.rounds[self._engine].seen
        self._num_before = self._engine.stats.num_generated_tokens
        self._elapsed_s = 0.0
        self.marks: list[Mark] = []
        self.rounds: list[Round] = []
        self._engine.reset_prefix_cache()

    def run(self, until_s: float) -> None:
        """Run until its clock shows a time."""
        engine, begin = self._engine, len(self._seen)
        start = time.monotonic() - self._elapsed_s
        while (now := time.monotonic() - start) < until_s:
            self._before_step(now)
            while len(self._running) < self._wanted(now):
                (tokens, length), name = next(self._texts), next(_names)
                params = sampling(length, self._num_drafts, 0.0)
                engine.add_request(name, {"prompt_token_ids": tokens}, params)
                self._running.append(name)
            while len(self._running) > self._wanted(now):
                engine.abort_request(self._running.popleft())
            self._note(engine.step(), start)
        while engine._launched:
            # Otherwise the time between slices would count as this launch's.
            self._note(engine._read()[0], start)
        self._elapsed_s = time.monotonic() - start
        new = self._seen[begin:]
        self.rounds += [one._replace(read_ts=one.read_ts - start) for one in new]

    def _note(self, outputs: Sequence[RequestOutput], start: float) -> None:
        for output in outputs:
            if output.finished:
                self._running.remove(output.request_id)
        count = self._engine.stats.num_generated_tokens - self._num_before
        self.marks.append(Mark(time.monotonic() - start, count))

    def end(self) -> None:
        """Abort the running requests."""
        self._engine.abort_request(self._running)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def drive(drives: Sequence[Drive], seconds: float) -> None:
    """Run several engines in turn, each for this time, in short slices.

    The order is always the same, so that none runs twice in a row: the second slice
    would be faster.
    """
    for number in range(1, round(seconds / SLICE_S) + 1):
        for one in drives:
            one.run(number * SLICE_S)
    for one in drives:
        one.end()


def step(engines: Engines, options: argparse.Namespace) -> list[dict[str, Any]]:
    adaptive, phase_s = engines.forced[ADAPTIVE], options.phase_s
    seconds, rows = phase_s * len(STEP_ACCEPTANCE), []
    for size in tqdm(sizes_of(options, SIZES), desc="step"):
        prompts, phase = bundled_ids(engines, size), -1

        def turn(now: float) -> None:
            nonlocal phase
            if int(now // phase_s) != phase:
                phase = int(now // phase_s)
                force(adaptive, STEP_ACCEPTANCE[phase])

        given: dict[str, Any] = dict(
            wanted=lambda now, size=size: size,
            lengths=LENGTHS,
        )
        # Plain decoding runs for the same time, because its round times depend on the
        # lengths too.
        plain = Drive(engines, Way(engines.plain, 0), prompts, **given)
        way = Way(adaptive, MOST_DRAFTS)
        chosen = Drive(engines, way, prompts, before_step=turn, **given)
        drive([plain, chosen], seconds)
        found = {
            name: rates(one.marks, seconds, BIN_S)
            for name, one in ((PLAIN, plain), (ADAPTIVE, chosen))
        }
        phases = []
        for number, acceptance in enumerate(STEP_ACCEPTANCE):
            first, last = (round(i * phase_s / BIN_S) for i in (number, number + 1))
            level, settle_s = settle(found[ADAPTIVE][first:last], BIN_S)
            phase_row = {"acceptance": acceptance, "tokens_per_s": level}
            phase_row["plain_tokens_per_s"], _ = settle(found[PLAIN][first:last], BIN_S)
            phases.append(phase_row | {"settle_s": settle_s})
        row = {"batch": size, "plain_tokens_per_s": found[PLAIN], "phases": phases}
        drafts = mean_drafts(chosen.rounds, seconds, BIN_S)
        rows.append(row | {"tokens_per_s": found[ADAPTIVE], "num_drafts": drafts})
    return rows


def ramp_size(now: float, seconds: float, most: int) -> int:
    """Return the number of requests: it rises from 1 to `most`, and falls again."""
    return 1 + round((most - 1) * (1 - abs(2 * now / seconds - 1)))


def ramp(engines: Engines, options: argparse.Namespace) -> dict[str, Any]:
    seconds, most = options.ramp_s, options.max_num_seqs
    for engine in engines.forced.values():
        force(engine, RAMP_ACCEPTANCE)
    prompts, found = bundled_ids(engines, most), dict[str, Any]()
    lengths = np.random.default_rng(0).integers(64, 512, 64).tolist()
    drives = {
        name: Drive(
            engines,
            way,
            prompts,
            wanted=lambda now: ramp_size(now, seconds, most),
            lengths=lengths,
        )
        for name, way in engines.ways(engines.forced, [MOST_DRAFTS]).items()
    }
    drive(list(drives.values()), seconds)
    for name, one in drives.items():
        found[name] = {
            "num_tokens": one.marks[-1].num_tokens,
            "tokens_per_s": rates(one.marks, seconds, RAMP_BIN_S),
            "num_drafts": mean_drafts(one.rounds, seconds, RAMP_BIN_S),
        }
    middles = (np.arange(round(seconds / RAMP_BIN_S)) + 0.5) * RAMP_BIN_S
    total = {name: one["num_tokens"] for name, one in found.items()}
    return {
        "acceptance": RAMP_ACCEPTANCE,
        "num_seqs": [ramp_size(now, seconds, most) for now in middles],
        "adaptive_by_plain": total[ADAPTIVE] / total[PLAIN],
        "adaptive_by_fixed": total[ADAPTIVE] / total[str(MOST_DRAFTS)],
        "ways": found,
    }


def short(engines: Engines, options: argparse.Namespace) -> dict[str, Any]:
    """Measure `short`: time ratios of prompts, and of first requests of engines."""

    def seconds(way: Way, tokens: list[int]) -> float:
        params = sampling(SHORT_TOKENS, way.num_drafts, 0.0)
        batch = Batch(prompts=[tokens], params=[params])
        elapsed_s = run_batch(way.engine, batch).elapsed_s
        # Otherwise, programs that the request needs would be loaded during that of the
        # next engine.
        way.engine.wait_for_programs()
        return elapsed_s

    def by_plain(
        ways: Ways, tokens: list[int], *, is_reversed: bool
    ) -> dict[str, float]:
        names = list(ways)[:: -1 if is_reversed else 1]
        found = {name: seconds(ways[name], tokens) for name in names}
        return {name: found[PLAIN] / found[name] for name in ways if name != PLAIN}

    per_domain = 1 if options.quick else SHORT_PER_DOMAIN
    texts = load_prompts(None, per_domain).by_domain
    tokenizer = engines.plain.tokenizer
    prompts = [tokenizer.encode(text) for text in itertools.chain(*texts.values())]
    prompts += bundled_ids(engines, SHORT_BUNDLED)
    ways, found = engines.ways(engines.judged, []), list[dict[str, float]]()
    for number, tokens in enumerate(tqdm(prompts, desc="short")):
        ratios = [
            by_plain(ways, tokens, is_reversed=bool((number + repeat) % 2))[ADAPTIVE]
            for repeat in range(options.repeats)
        ]
        found.append(spread(ratios))
    firsts = []
    for number in tqdm(range(1 if options.quick else SHORT_SETS), desc="first"):
        own = Engines(options, is_warm=False)
        new = own.ways(own.judged, []) | {ALIKE: Way(own.alike, 0)}
        firsts.append(by_plain(new, prompts[number], is_reversed=bool(number % 2)))
        own.close()
    return {
        "by_plain": found,
        "first_by_plain": [one[ADAPTIVE] for one in firsts],
        "first_alike_by_plain": [one[ALIKE] for one in firsts],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, default=RESULT, help="path of the result")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--num-tokens", type=int, default=300, help="new tokens of every request")
    add("--repeats", type=int, default=5, help="measured runs per configuration")
    add(
        "--warm-up-s",
        type=float,
        default=3.0,
        help="adaptive runs before the measured ones",
    )
    add(
        "--max-num-seqs", type=int, default=max(BATCHES), help="skip larger batch sizes"
    )
    add("--prompts", type=Path, nargs="+", default=[BUNDLED], help="of `foreign`")
    add("--prompts-per-domain", type=int, default=2)
    add("--fixed", type=int, nargs="+", default=list(range(MOST_DRAFTS + 1)))
    add("--dtype", default="auto")
    add("--quick", action="store_true", help="one short run of everything")
    parser.set_defaults(turn_s=TURN_S, phase_s=PHASE_S, ramp_s=RAMP_S)
    return parser


def kept_parts(path: Path, measured: Sequence[str]) -> dict[str, Any]:
    """Return the earlier results of the parts that are not measured now."""
    found = json.loads(path.read_text()) if path.exists() else {}
    about = found.get("measured", {})
    kept = {name: about[name] for name in about if name not in measured}
    return {name: found[name] for name in kept} | {"measured": kept}


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    warn_unless_quiet()
    engines = Engines(options)
    head = header("control", options)
    result = kept_parts(options.json, options.parts) | head
    result |= {"target": TARGET, "draft": DRAFT, "num_drafts": MOST_DRAFTS}
    parts: dict[str, Callable[..., Any]] = {
        "cells": cells,
        "step": step,
        "ramp": ramp,
        "foreign": foreign,
        "free": free,
        "short": short,
    }
    for name in options.parts:
        if name == "foreign":
            engines.drop("forced")
        result[name] = parts[name](engines, options)
        about = ("date", "commit", "has_changes", "arguments")
        result["measured"][name] = {key: head[key] for key in about}
        result["misses"] = misses(result)
        write_whole(json.dumps(result) + "\n", options.json)
        if name == "step":
            print(step_table(result[name]))
        elif name == "ramp":
            ratios = {key: result[name][f"adaptive_by_{key}"] for key in (PLAIN, FIXED)}
            print(
                "ramp, adaptive / "
                + ", ".join(f"{k} {v:.3f}" for k, v in ratios.items())
            )
        elif name == "short":
            print(short_line(result[name]))
        else:
            print(speed_table(name, result[name]))
    print("\n".join(f"Missed: {goal}" for goal in result["misses"]))


if __name__ == "__main__":
    main()
