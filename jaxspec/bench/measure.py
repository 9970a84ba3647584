"""Owns timed runs of one engine, which record a batch's times at every step.

Modes (plain, and different K) alternate in one process with one set of weights, so that
a slow phase of the machine affects all of them. A run in which a program was compiled
or calibrated is discarded and repeated.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.report import BenchError
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import EngineGenerateError
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams

# Maximum number of discarded runs. The shapes of launches depend on acceptance, so that
# even a late run may need a new program.
MOST_COMPILING_RUNS = 32

_request_ids = (f"bench-{number}" for number in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests that arrive at the same time.

    Attributes:
        params: One for each prompt.
        chooses_k: The engine chooses K (True), or drafts the requested number of tokens
            (False); None leaves this to the engine's configuration.
    """

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    chooses_k: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval of decoding.

    Attributes:
        num_seqs: Number of decoding requests; None if it varied.
        host_s: Seconds in `step` without waiting for the device.
    """

    seconds: float
    num_tokens: int
    num_rounds: int
    host_s: float
    num_seqs: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def round_s(self) -> float:
        """Seconds from one round's tokens to the next round's."""
        return self.seconds / max(self.num_rounds, 1)

    @property
    def host_per_round_s(self) -> float:
        return self.host_s / max(self.num_rounds, 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Times and counts of one batch.

    Attributes:
        elapsed_s: Seconds from the first request to the last token.
        token_ids: Generated token ids of each request, in the order of the batch.
        first_token_s: Seconds from the arrival to the first token, of each request.
        per_token_s: Seconds per token after the first, of each request with more than
            one.
        inter_token_s: Seconds between two outputs of a request, each of which may have
            several tokens; empty for FINAL_ONLY requests.
        decode: The interval in which all requests decoded; if there is none, the
            interval from the first token of any request to the last token. None if each
            request has only one token.
    """

    elapsed_s: float
    num_prompt_tokens: int
    token_ids: list[list[int]]
    first_token_s: list[float]
    per_token_s: list[float]
    inter_token_s: list[float]
    decode: Span | None
    acceptance: Acceptance

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens per second of the whole run, prefill included."""
        return self.num_output_tokens / self.elapsed_s


def run_batch(
    engine: LLMEngine,
    batch: Batch,
    show: Callable[[RequestOutput], object] = lambda output: None,
) -> Run:
    """Run requests on an idle engine, without cached pages.

    When this returns, programs that the run requested may still be compiling.

    Args:
        show: Called with every output, as soon as the engine returns it.

    Raises:
        EngineGenerateError: A request ended with an error.
    """
    is_idle = engine.reset_prefix_cache()
    assert is_idle, "other requests are running"
    if batch.chooses_k is not None:
        engine.policy.set_adaptive(batch.chooses_k)
        # New programs are timed now, and not while the run is measured.
        engine.calibrator.run_all(engine.scheduler)
    before = Acceptance.of(engine.stats)
    ids = list(itertools.islice(_request_ids, len(batch.prompts)))
    watch = _Watch(engine, ids)
    try:
        for name, prompt, params in zip(ids, batch.prompts, batch.params, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            watch.record(outputs)
            for output in outputs:
                (completion,) = output.outputs
                if completion.finish_reason == "error":
                    raise EngineGenerateError(completion.stop_reason)
                show(output)
    except BaseException:
        engine.abort_request(ids)
        raise
    finished = [watch.finished[name] for name in ids]
    token_ids = [watch.tokens[name] for name in ids]
    times = [output.metrics for output in finished]
    assert all(one is not None for one in times)
    first_s, per_token_s = [], []
    for one, tokens in zip(times, token_ids, strict=True):
        assert one is not None
        first_s.append(one.first_token_latency)
        if len(tokens) > 1:
            took_s = one.last_token_ts - one.first_token_ts
            per_token_s.append(took_s / (len(tokens) - 1))
    return Run(
        elapsed_s=watch.marks[-1].time_s - watch.start_s,
        num_prompt_tokens=sum(map(len, batch.prompts)),
        token_ids=token_ids,
        first_token_s=first_s,
        per_token_s=per_token_s,
        inter_token_s=watch.gaps,
        decode=watch.decode(),
        acceptance=Acceptance.of(engine.stats) - before,
    )


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """The engine's counts at the time of a step that returned outputs."""

    time_s: float
    num_tokens: int
    num_rounds: int
    host_s: float
    num_started: int
    num_finished: int


class _Watch:
    """Records the arrival times of tokens, and the engine's counts at these times."""

    def __init__(self, engine: LLMEngine, ids: list[str]):
        self._stats, self._num_requests = engine.stats, len(ids)
        self.tokens: dict[str, list[int]] = {name: [] for name in ids}
        self.finished: dict[str, RequestOutput] = {}
        self.gaps: list[float] = []
        self.marks: list[_Mark] = []
        self._last_s: dict[str, float] = {}
        self._num_before = engine.stats.num_generated_tokens
        self.start_s = time.monotonic()

    def record(self, outputs: list[RequestOutput]) -> None:
        """Record the outputs of one step, if there are any."""
        num_tokens = self._stats.num_generated_tokens - self._num_before
        num_known = self.marks[-1].num_tokens if self.marks else 0
        if not outputs and num_tokens == num_known:
            return
        now = time.monotonic()
        for output in outputs:
            name, (completion,) = output.request_id, output.outputs
            self.tokens[name] += completion.token_ids
            if name in self._last_s:
                self.gaps.append(now - self._last_s[name])
            self._last_s[name] = now
            if output.finished:
                self.finished[name] = output
        self.marks.append(
            _Mark(
                time_s=now,
                num_tokens=num_tokens,
                num_rounds=self._stats.num_rounds,
                host_s=self._stats.host_s,
                num_started=len(self._last_s),
                num_finished=len(self.finished),
            )
        )

    def decode(self) -> Span | None:
        """Return the interval for computing speeds; see `Run.decode`."""
        together = [
            mark
            for mark in self.marks
            if mark.num_started == self._num_requests and not mark.num_finished
        ]
        # The interval includes the mark at which the first request ends, because all
        # requests decoded up to that mark.
        if together:
            after = self.marks[self.marks.index(together[-1]) + 1]
            return _span(together[0], after, self._num_requests)
        first, last = self.marks[0], self.marks[-1]
        return None if last.time_s == first.time_s else _span(first, last, None)


def _span(begin: _Mark, end: _Mark, num_seqs: int | None) -> Span:
    return Span(
        seconds=end.time_s - begin.time_s,
        num_tokens=end.num_tokens - begin.num_tokens,
        num_rounds=end.num_rounds - begin.num_rounds,
        host_s=end.host_s - begin.host_s,
        num_seqs=num_seqs,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Alternating runs of several modes.

    Attributes:
        runs: Runs of each mode, in the order of the repeats.
        num_discarded: Number of runs after the warm-up that were discarded, because
            programs were compiled in them.
    """

    runs: Mapping[str, list[Run]]
    num_discarded: int

    @classmethod
    def join(cls, each: "Sequence[Measured]") -> "Measured":
        """Combine the runs of several batches, as if they were repeats of one batch."""
        runs = {
            name: [r for one in each for r in one.runs[name]] for name in each[0].runs
        }
        return cls(runs=runs, num_discarded=sum(one.num_discarded for one in each))


@dataclass(kw_only=True)
class Bench:
    """An engine, and the number of its runs.

    Attributes:
        advance: Called after every run that counts, for a progress bar.
        max_s: Seconds after which no further repeat starts; each mode runs at least
            once.
    """

    engine: LLMEngine
    num_warmups: int = 1
    num_iters: int = 3
    advance: Callable[[], object] = field(default=lambda: None)
    max_s: float = math.inf

    def alternate(self, modes: Mapping[str, Batch]) -> Measured:
        """Run all modes alternately; every other repeat in reversed order.

        Raises:
            BenchError: Programs are compiled in too many runs.
        """
        if self.num_warmups:
            for batch in modes.values():
                self.warm_up(batch)
        return self.repeat(modes)

    def repeat(self, modes: Mapping[str, Batch]) -> Measured:
        """Run all modes alternately, without the warm-up of `alternate`."""
        start_s = time.monotonic()
        runs: dict[str, list[Run]] = {name: [] for name in modes}
        num_discarded = 0
        for repeat in range(self.num_iters):
            if repeat and time.monotonic() - start_s > self.max_s:
                break
            names = list(modes)[:: -1 if repeat % 2 else 1]
            for name in names:
                while (run := self._run(modes[name])) is None:
                    num_discarded += 1
                    if num_discarded > MOST_COMPILING_RUNS:
                        raise BenchError(
                            f"{num_discarded} runs were discarded because programs "
                            "were compiled in them. Run it again: compiled programs "
                            "are cached."
                        )
                runs[name].append(run)
                self.advance()
        return Measured(runs=runs, num_discarded=num_discarded)

    def warm_up(self, batch: Batch) -> None:
        """Run a batch until `num_warmups` runs have compiled nothing."""
        num_quiet = 0
        for _ in range(MOST_COMPILING_RUNS):
            num_quiet += self._run(batch) is not None
            if num_quiet >= self.num_warmups:
                return
        raise BenchError(
            f"Programs were compiled in {MOST_COMPILING_RUNS} warm-up runs in a row."
        )

    def _run(self, batch: Batch) -> Run | None:
        """Return one run; None if a program was compiled or calibrated meanwhile."""

        def progress() -> tuple[int, int]:
            self.engine.wait_for_programs()
            return self.engine.runner.num_compiles, len(self.engine.calibrator.timed)

        before = progress()
        run = run_batch(self.engine, batch)
        return run if progress() == before else None
