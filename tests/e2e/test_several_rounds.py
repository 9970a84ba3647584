"""Launches of several rounds return the texts and counts of single-round launches."""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.conformance import proposers
from tests.support import pair
from tests.support.engines import generate, tokens_of, with_settings
from tests.support.rounds import STEPS, at_most, constant_times

FINAL = RequestOutputKind.FINAL_ONLY
# Tokens that are frequent in the target's texts: as stop tokens, they end texts.
FREQUENT = [45, 41]


@functools.cache
def looped() -> LLMEngine:
    # Until a launch of several rounds is read, its local pages are not freed: with few
    # pages, requests would be preempted that single rounds do not preempt.
    return pair.own_engine(num_scheduler_steps=STEPS, num_pages=90)


def counts_of(engine: LLMEngine) -> dict[str, Any]:
    """Return the counters that do not depend on time."""
    stats = vars(engine.stats).copy()
    for name in ("host_s", "wait_s", "busy_s", "num_rounds"):
        del stats[name]
    return stats


def said(output: RequestOutput) -> tuple[Any, ...]:
    (completion,) = output.outputs
    metrics = completion.spec_decode_metrics
    return (
        list(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        metrics and (metrics.num_draft_tokens, metrics.histogram),
    )


def play(
    engine: LLMEngine, num_rounds: int, params: list[SamplingParams], **speculative: Any
) -> tuple[list[Any], dict[str, Any], list[tuple[int, int]]]:
    """Run two prompts at a time, so that no waiting request limits a launch."""
    made = with_settings(engine, seed=3, **speculative)
    prompts, texts = pair.prompts(len(params), longest=20), []
    with at_most(made, num_rounds) as ran:
        for start in range(0, len(prompts), 2):
            both = slice(start, start + 2)
            outputs = generate(made, prompts[both], params[both])
            texts += [said(output) for output in outputs]
    made.scheduler.check_idle()
    return texts, counts_of(made), ran


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [dict(temperature=0, ignore_eos=True)] * 4,
    "ends": [dict(temperature=0, stop_token_ids=FREQUENT)] * 6,
    "lengths": [
        dict(temperature=0, ignore_eos=True, max_tokens=count)
        for count in (1, 2, 5, 9, 23, 60)
    ],
    "plain": [
        dict(temperature=0, ignore_eos=True, extra_args={"num_speculative_tokens": 0})
    ]
    * 2,
    "seeded": [dict(seed=number, temperature=0.9) for number in range(4)],
    "sampled": [dict(temperature=1.0, top_p=0.9)] * 6,
}


def params_of(kind: str) -> list[SamplingParams]:
    values: dict[str, Any] = dict(max_tokens=60, output_kind=FINAL)
    return [SamplingParams(**(values | one)) for one in KINDS[kind]]


@functools.cache
def expected(kind: str) -> tuple[list[Any], dict[str, Any]]:
    texts, counts, ran = play(pair.engine(), 1, params_of(kind))
    assert set(ran) == {(1, 1)}
    return texts, counts


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_counts_equal_single_rounds(kind):
    """Unseeded texts are equal too; their noise depends on where a round starts."""
    launches, num_stopped = [], 0
    for num_rounds in (1, 2, 4, STEPS):
        texts, counts, ran = play(looped(), num_rounds, params_of(kind))
        assert (texts, counts) == expected(kind)
        assert max(planned for planned, _ in ran) == num_rounds
        num_stopped += sum(run < planned for planned, run in ran)
        launches.append(len(ran))
    assert launches == sorted(launches, reverse=True)
    assert launches[0] > launches[-1]
    assert num_stopped > 0, "no sequence ended in the middle"


def test_block_rule_samples_as_in_single_rounds():
    params = params_of("sampled")
    one, several = (
        play(engine, num_rounds, params, rejection_sample_method="block")[:2]
        for engine, num_rounds in ((pair.engine(), 1), (looped(), STEPS))
    )
    assert several == one


@pytest.mark.parametrize(
    "changes",
    [
        dict(output_kind=RequestOutputKind.DELTA),
        dict(output_kind=RequestOutputKind.CUMULATIVE),
        dict(stop=["~~"]),
    ],
    ids=["delta", "cumulative", "stop"],
)
def test_requests_with_stop_strings_or_grammars_run_single_rounds(changes):
    params = [one.clone() for one in params_of("greedy")[:2]]
    for name, value in changes.items():
        setattr(params[0], name, value)
    params[1].max_tokens = 10
    made = with_settings(looped())
    with at_most(made, STEPS) as ran:
        generate(made, pair.prompts(2, longest=20), params)
    assert {planned for planned, _ in ran} == {1}


def test_request_can_be_aborted_between_rounds():
    params = params_of("greedy")[:2]
    prompts = pair.prompts(2)
    made = with_settings(looped())
    with at_most(made, STEPS):
        for name, prompt, own in zip("ab", prompts, params, strict=True):
            made.add_request(name, prompt, own)
        while not made._launched or made._launched[-1][0].num_rounds < STEPS:
            made.step()
        made.abort_request("a")
        outputs = []
        while made.has_unfinished_requests():
            outputs += made.step()
    assert [one.request_id for one in outputs] == ["b"]
    alone = tokens_of(generate(pair.engine(), [prompts[1]], [params[1]]))
    assert tokens_of(outputs) == alone
    made.scheduler.check_idle()


@pytest.mark.slow
def test_preemption_and_prefix_hits_change_nothing():
    """Two requests share a prefix, and together need too many pages."""
    random = np.random.default_rng(4)
    # The prompts have two tiles, which are prefilled in chunks.
    prompts = random.integers(3, 64, (2, 40)).tolist()
    prompts[1][:32] = prompts[0][:32]
    params = SamplingParams(
        temperature=0, max_tokens=70, ignore_eos=True, output_kind=FINAL
    )
    expected = tokens_of(generate(pair.engine(), prompts, params))
    made = proposers.with_config(looped(), num_pages=50)
    with constant_times(), at_most(made, STEPS) as ran:
        for _ in range(2):
            assert tokens_of(generate(made, prompts, params)) == expected
        for _ in range(2):  # alone, so that its pages stay in the cache
            assert tokens_of(generate(made, prompts[:1], params)) == expected[:1]
    assert max(run for _, run in ran) > 1
    assert made.stats.num_preemptions > 0
    assert made.stats.num_prefix_hits > 0
    made.scheduler.check_idle()
