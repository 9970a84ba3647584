"""A launch runs several rounds if no request waits, and counts each of them."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.scheduling import prefill_budget
from jaxspec.engine.scheduling.prefill_budget import MAX_LAUNCH_S
from jaxspec.engine.scheduling.request import Request
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_engines import make_fake_engine, run_one
from tests.support.loops import (
    Loop,
    make_config,
    make_request,
    make_requests,
    run_random_traffic,
)

STEPS = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "one_row": dict(max_num_seqs=1),
    "plain": dict(num_draft_tokens=0),
    "many_rows_few_pages": dict(max_num_seqs=8, num_pages=30),
    "pages_of_one": dict(page_size=1, num_pages=200),
    "long_drafts": dict(num_draft_tokens=8),
    "switching": dict(max_num_seqs=4, disable_by_batch_size=2),
    "tight_length": dict(max_model_len=75),
    "short_drafts": dict(longest_drafted=20, max_num_seqs=4, num_pages=40),
    "priorities": dict(scheduling_policy="priority", max_num_seqs=8, num_pages=30),
    "adaptive": dict(controller=ADAPTIVE),
}
QUICK_DROPPED = ["many_rows_few_pages", "adaptive"]
QUICK = [(name, 1) for name in ("many_rows_few_pages", "switching", "adaptive")]


def make_loop(changes: dict[str, Any], seed: int = 0, depth: int = 1) -> Loop:
    """Make a loop whose rounds are so short that launches run the maximum number."""
    loop = Loop(make_config(num_scheduler_steps=STEPS, **changes), seed, depth)
    loop.fastest_s, loop.prompt_token_s = MAX_LAUNCH_S / 50, MAX_LAUNCH_S / 5000
    return loop


def mostly_final_only(number: int, random: np.random.Generator, config: Any) -> Request:
    """Make a request that with probability 0.8 returns only its final output."""
    request = make_request(number, random, config)
    if random.random() < 0.8:
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        request.only_final_output = True
    return request


def most_rounds(
    changes: dict[str, Any], seed: int, depth: int = 1, *, drop_share: float = 0.0
) -> int:
    """Run random traffic; return the largest number of rounds of a launch."""
    loop, shares = make_loop(changes, seed, depth), dict(drop_share=drop_share)
    run_random_traffic(loop, seed, mostly_final_only, arrival_share=0.1, **shares)
    for launch in loop.launches:
        if launch.num_rounds > 1:
            assert not launch.plan.tiles
            assert all(request.only_final_output for request in launch.decoding)
    return max(launch.num_rounds for launch in loop.launches)


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        # Engines use depth 1: one launch runs ahead of the results that they have read.
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in itertools.product(CONFIGS, (0, 1))
    ],
)
@pytest.mark.parametrize("num_seeds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_random_traffic_finishes(name, depth, num_seeds):
    most = max(most_rounds(CONFIGS[name], seed, depth) for seed in range(num_seeds))
    assert most == STEPS


@pytest.mark.parametrize(
    "name", [pytest.param("base", marks=pytest.mark.slow), *QUICK_DROPPED]
)
@pytest.mark.parametrize("num_seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_requests_can_be_dropped_at_any_time(name, num_seeds):
    config, seeds = CONFIGS[name], range(num_seeds)
    assert max(most_rounds(config, seed, drop_share=0.05) for seed in seeds) == STEPS


def run_all(loop: Loop, requests: list[Request]) -> list[int]:
    """Run requests that start together; return the rounds of each decoding launch."""
    loop.run(requests)
    loop.check_ended(requests)
    return [
        launch.num_rounds
        for launch in loop.launches
        if launch.decoding and not launch.plan.tiles
    ]


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_launch_has_the_allowed_number_of_rounds(num_draft_tokens):
    changes: dict[str, Any] = dict(num_draft_tokens=num_draft_tokens)
    single = Loop(make_config(**changes), 0)
    ones = run_all(single, make_requests(single.config, 1, only_final_output=True))
    assert set(ones) == {1}
    loop = make_loop(changes)
    counts = run_all(loop, make_requests(loop.config, 1, only_final_output=True))
    assert counts[0] == 1, "first what a round takes is seen"
    # The texts have twenty tokens, and no launch may run past the last one.
    assert max(counts) == min(STEPS, 3 if num_draft_tokens else 19)
    assert len(counts) < len(ones)
    if not num_draft_tokens:
        # The first of the twenty tokens is sampled after the prompt.
        assert sum(counts) == sum(ones) == 19


def test_waiting_requests_limit_a_launch_to_one_round():
    """There is one row for two requests: while the first runs, the second waits."""
    loop = make_loop(dict(max_num_seqs=1))
    first, second = make_requests(loop.config, 2, only_final_output=True)
    for request in (first, second):
        loop.scheduler.add(request)
    while first not in loop.finished:
        loop.step()
    assert {launch.num_rounds for launch in loop.launches} == {1}
    loop.run()
    loop.check_ended([first, second])
    assert max(launch.num_rounds for launch in loop.launches) == STEPS


@pytest.mark.parametrize("num_free", [0, 1, 2, 3, 4, 5])
def test_rounds_are_limited_by_free_pages(num_free):
    changes = dict(num_draft_tokens=0, page_size=1, num_pages=200)
    loop = make_loop(changes)
    (request,) = make_requests(loop.config, 1, only_final_output=True)
    loop.scheduler.add(request)
    while not loop.launches or loop.launches[-1].num_rounds < STEPS:
        loop.step()
    pages = loop.scheduler.pool
    taken = pages.take(pages.num_free - num_free)
    count = len(loop.launches)
    loop.step()
    assert loop.scheduler.stats.num_preemptions == 0
    # Without a free page, the step launches nothing; it only reads the result of an
    # earlier launch.
    found = [launch.num_rounds for launch in loop.launches[count:]]
    assert found == ([min(num_free, STEPS)] if num_free else [])
    pages.release(taken)
    loop.run()
    loop.check_ended([request])


def test_rounds_are_counted_and_timed_one_by_one():
    loop = make_loop(dict(num_draft_tokens=0))
    run_all(loop, make_requests(loop.config, 1, only_final_output=True))
    seconds = loop.scheduler.step_times.seconds
    decoding = [one for one in seconds if not one.shape.max_prompt_tokens]
    assert decoding
    for one in decoding:
        assert seconds[one] == pytest.approx(loop.fastest_s)


def test_metrics_count_rounds_and_not_launches(monkeypatch):
    # No machine is too slow for several rounds.
    monkeypatch.setattr(prefill_budget, "MAX_LAUNCH_S", 60.0)
    found, launches = [], []
    for steps in (1, STEPS):
        engine, runner = make_fake_engine(num_draft_tokens=3, num_scheduler_steps=steps)
        params = SamplingParams(
            max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        completion = run_one(engine, params)
        metrics = [
            one
            for one in engine.get_metrics()
            if "seconds" not in one.name and "compile" not in one.name
        ]
        stats = engine.stats
        counts = stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens
        found.append((completion.token_ids, metrics, counts))
        launches.append(runner.num_launches)
        assert stats.num_rounds == launches[0]
    assert found[0] == found[1]
    assert launches[1] < launches[0]
