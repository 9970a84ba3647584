"""Runs of one engine, timed between the first token and the last."""

import itertools
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

_request_ids = map(str, itertools.count())

# Long enough for every program that a longer request uses.
WARM_UP_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request.

    Attributes:
        decode_s: From the first token to the last, as are the next two.
        num_rounds: Launches that were read.
        host_s: Time of `step` outside of waiting for the device.
        num_draft_rounds: Rounds that proposed drafts.
    """

    token_ids: list[int]
    first_token_s: float
    decode_s: float
    num_rounds: int
    host_s: float
    num_draft_rounds: int
    num_draft_tokens: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s


def sampling(num_tokens: int, num_drafts: int, **controls: Any) -> SamplingParams:
    """Parameters of exactly `num_tokens` tokens with at most `num_drafts` a round."""
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"num_speculative_tokens": num_drafts},
        **controls,
    )


def warm_up(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> None:
    """Build what a request needs, so that nothing is compiled while it is timed.

    Until nothing is asked for: a launch may run in another program than its own while
    that is made.
    """
    short = params.clone()
    short.max_tokens = WARM_UP_TOKENS
    num_compiles = None
    while engine.runner.num_compiles != num_compiles:
        num_compiles = engine.runner.num_compiles
        run_once(engine, prompt, short)
        engine.wait_for_programs()


def run_once(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> Sample:
    """Run one request on an idle engine."""
    stats = engine.stats
    before = stats.num_generated_tokens, stats.num_draft_rounds
    drafted = stats.num_draft_tokens, stats.num_accepted_tokens
    engine.add_request(next(_request_ids), {"prompt_token_ids": prompt}, params)
    first: tuple[float, int, float] | None = None
    end: tuple[float, int, float] | None = None
    last = None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if end is None and stats.num_generated_tokens > before[0]:
            now = time.monotonic(), stats.num_rounds, stats.host_s
            first = first or now
            if outputs:
                (last,), end = outputs, now
    assert first is not None
    assert end is not None
    assert last is not None
    assert last.metrics is not None
    return Sample(
        token_ids=list(last.outputs[0].token_ids),
        first_token_s=last.metrics.first_token_latency,
        decode_s=end[0] - first[0],
        num_rounds=end[1] - first[1],
        host_s=end[2] - first[2],
        num_draft_rounds=stats.num_draft_rounds - before[1],
        num_draft_tokens=stats.num_draft_tokens - drafted[0],
        num_accepted=stats.num_accepted_tokens - drafted[1],
    )


@dataclass(frozen=True, kw_only=True)
class PromptRuns:
    """All repeats of one prompt, with and without speculation in turn."""

    domain: str
    num_prompt_tokens: int
    plain: list[Sample]
    speculative: list[Sample]

    @property
    def speed_up(self) -> float:
        return median_speed(self.speculative) / median_speed(self.plain)

    @property
    def is_equal(self) -> bool:
        """Whether every repeat gave one text."""
        first = self.plain[0].token_ids
        return all(one.token_ids == first for one in self.plain + self.speculative)

    def as_json(self) -> dict[str, Any]:
        def speeds(samples: list[Sample]) -> list[float]:
            return [round(one.tokens_per_s, 2) for one in samples]

        return {
            "domain": self.domain,
            "num_prompt_tokens": self.num_prompt_tokens,
            "plain_tokens_per_s": speeds(self.plain),
            "speculative_tokens_per_s": speeds(self.speculative),
            "speed_up": round(self.speed_up, 4),
            "is_equal": self.is_equal,
        }


def run_in_turn(
    engine: LLMEngine,
    prompt: list[int],
    modes: dict[str, SamplingParams],
    repeats: int,
) -> dict[str, list[Sample]]:
    """Repeat all modes in turn, so that a slow moment of the machine hits them all."""
    samples: dict[str, list[Sample]] = {name: [] for name in modes}
    for params in modes.values():
        warm_up(engine, prompt, params)
    num_compiles = engine.runner.num_compiles
    for repeat in range(repeats):
        names = list(modes) if repeat % 2 == 0 else list(reversed(modes))
        for name in names:
            samples[name].append(run_once(engine, prompt, modes[name]))
    engine.wait_for_programs()
    assert engine.runner.num_compiles == num_compiles, "compiled while measuring"
    return samples


def median_speed(samples: list[Sample]) -> float:
    return median(one.tokens_per_s for one in samples)


def summarise(runs: list[PromptRuns]) -> dict[str, Any]:
    """One row of the result: medians over prompts, acceptance over all rounds."""
    drafted = [one for run in runs for one in run.speculative]
    plain = [one for run in runs for one in run.plain]
    num_accepted = sum(one.num_accepted for one in drafted)
    num_draft_tokens = sum(one.num_draft_tokens for one in drafted)
    num_draft_rounds = sum(one.num_draft_rounds for one in drafted)
    num_rounds = sum(one.num_rounds for one in drafted)
    return {
        "num_prompts": len(runs),
        "num_equal": sum(run.is_equal for run in runs),
        "plain_tokens_per_s": median(median_speed(run.plain) for run in runs),
        "speculative_tokens_per_s": median(
            median_speed(run.speculative) for run in runs
        ),
        "speed_up": median(run.speed_up for run in runs),
        "speed_up_range": [
            min(run.speed_up for run in runs),
            max(run.speed_up for run in runs),
        ],
        "acceptance_rate": num_accepted / max(num_draft_tokens, 1),
        "mean_acceptance_length": 1 + num_accepted / max(num_draft_rounds, 1),
        "tokens_per_round": sum(len(one.token_ids) - 1 for one in drafted) / num_rounds,
        "plain_round": _round_times(plain),
        "speculative_round": _round_times(drafted),
        "plain_first_token_s": median(one.first_token_s for one in plain),
        "speculative_first_token_s": median(one.first_token_s for one in drafted),
    }


def _round_times(samples: list[Sample]) -> dict[str, float]:
    round_s = median(one.decode_s / one.num_rounds for one in samples)
    host_s = median(one.host_s / one.num_rounds for one in samples)
    return {"round_s": round_s, "host_s": host_s, "host_share": host_s / round_s}
