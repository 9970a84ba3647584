"""Run random traffic: arrivals, aborts, preemptions and changing K.

The fake device knows every sequence in full. It asserts at every launch that each slot
that it reads was written for the same prefix; freed pages are overwritten. Between
launches, every page must be held, cached or free.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.program.plan import StepPlan, StepShape
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.long_suites import members
from tests.support.engines import StubTokenizer
from tests.support.fake_device import FakeRunner, random_truth
from tests.support.loops import Loop, make_config, make_request

# Windows of the local layers, and local layers per global one; none: no local layers.
WINDOWS: list[dict[str, int]] = [{}, dict(window=6), dict(window=13, num_local=5)]
# All requests must end within this number of steps after the last arrival.
PATIENCE = 3000


class MovingPolicy(SpeculationPolicy):
    """A policy whose number of drafts is limited to `cap`, which the test changes."""

    cap = 8

    def max_draft_tokens(self, num_running: int) -> int:
        return min(super().max_draft_tokens(num_running), self.cap)


class Traffic(RuleBasedStateMachine):
    """Sends random requests and aborts to a scheduler with a fake device."""

    num_steps = 0
    num_preemptions = 0
    num_prefix_hits = 0
    num_draft_prefills = 0
    num_freed = 0
    num_given_up = 0

    @initialize(
        seed=st.integers(0, 2**16),
        num_spare=st.sampled_from([0, 2, 8, 36]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        policy=st.sampled_from(["fcfs", "priority"]),
        num_draft_tokens=st.sampled_from([0, 3, 8]),
        caching=st.booleans(),
        depth=st.integers(0, 2),
        windows=st.sampled_from(WINDOWS),
    )
    def start(self, *, seed, num_spare, max_num_seqs, policy, num_draft_tokens, **rest):
        config = make_config(
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,
            num_draft_tokens=num_draft_tokens,
            enable_prefix_caching=rest["caching"],
            **rest["windows"],
        )
        num_pages = config.units_per_seq + num_spare
        self.config = dataclasses.replace(config, num_pages=num_pages)
        self.random = np.random.default_rng(seed)
        self.policy = MovingPolicy(self.config.speculative)
        self.loop = Loop(self.config, seed, rest["depth"], policy=self.policy)
        self.numbers = itertools.count()
        self.alive: list[Request] = []

    @rule(count=st.integers(1, 3), group=st.none() | st.integers(0, 2))
    def arrive(self, count: int, group: int | None) -> None:
        for _ in range(count):
            request = make_request(next(self.numbers), self.random, self.config)
            request.cache_group = group
            self.alive.append(request)
            self.loop.scheduler.add(request)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            type(self).num_steps += 1
            self.loop.step()
        for request in [r for r in self.alive if r.status is Status.FINISHED]:
            self.alive.remove(request)
            self.loop.assert_said_the_truth(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        pages = self.loop.scheduler.pool
        free = pages.num_free
        is_running = request.row >= 0
        self.loop.scheduler.finish(request, "abort", None)
        assert request.pages == []
        assert pages.num_free >= free
        assert is_running or pages.num_free == free

    @rule(cap=st.sampled_from([0, 0, 0, 1, 2, 8]))
    def change_drafts(self, cap: int) -> None:
        self.policy.cap = cap

    @rule()
    def forget(self) -> None:
        self.loop.scheduler.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for _ in range(PATIENCE):
            type(self).num_steps += 1
            if not self.loop.step():
                break
        for request in self.alive:
            assert request.status is Status.FINISHED, "a request never ends"
            self.loop.assert_said_the_truth(request)
        self.loop.assert_idle()
        totals, stats = type(self), self.loop.scheduler.stats
        totals.num_preemptions += stats.num_preemptions
        totals.num_prefix_hits += stats.num_prefix_hits
        totals.num_given_up += stats.num_given_up
        totals.num_freed += self.loop.num_freed
        totals.num_draft_prefills += sum(
            launch.shape.is_draft_prefill for launch in self.loop.launches
        )


def run(max_examples: int, steps: int) -> type[Traffic]:
    class Fresh(Traffic):
        """A copy of the class, so that its counts are separate."""

    run_state_machine_as_test(
        Fresh,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,  # the counts checked below are then the same in every run
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    return Fresh


def test_short_random_traffic_takes_steps():
    assert run(8, 25).num_steps > 0


@pytest.mark.long_suite(name="traffic")
def test_random_traffic_of_hundred_thousand_steps():
    ran = run(750, 60)
    assert ran.num_steps >= 100_000
    assert ran.num_preemptions > 200
    assert ran.num_prefix_hits > 1000
    assert ran.num_draft_prefills > 10
    assert ran.num_freed > 1000
    assert ran.num_given_up > 10


class ForgetfulRunner(FakeRunner):
    """A fake runner that records only the shapes of launches, to save memory."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.shapes: set[StepShape] = set()

    def launch(self, plan: StepPlan, shape: StepShape) -> object:
        result = super().launch(plan, shape)
        self.shapes.add(shape)
        self.events.clear()
        self.plans.clear()
        return result


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "total", members("traffic", (500, 20_000), is_example=lambda total: total == 500)
)
def test_memory_does_not_grow_with_the_number_of_requests(total: int):
    window = 12
    config = make_config(max_num_seqs=8, num_pages=60, num_draft_tokens=3)
    runner = ForgetfulRunner(config, random_truth(16))
    engine = LLMEngine(config, runner=runner, tokenizer=StubTokenizer(16))
    random = np.random.default_rng(0)
    stems = random.integers(3, 16, (4, 8)).tolist()
    alive: set[str] = set()
    middle = 0
    for number in range(total):
        if number == total // 2:
            middle = resident_bytes()
        prompt = stems[random.integers(4)] + random.integers(3, 16, 2).tolist()
        kind = list(RequestOutputKind)[random.integers(3)]
        params = SamplingParams(
            max_tokens=int(random.integers(1, 5)),
            output_kind=kind,
            n=1 + int(random.random() < 0.05),
            stop=["!!"] if random.random() < 0.2 else None,
        )
        engine.add_request(str(number), prompt, params)
        alive.add(str(number))
        if random.random() < 0.1:
            gone = sorted(alive)[random.integers(len(alive))]
            engine.abort_request(gone)
            alive.discard(gone)
        while engine.get_num_unfinished_requests() > window:
            for output in engine.step():
                if output.finished:
                    alive.discard(output.request_id)
    while engine.has_unfinished_requests():
        engine.step()
    engine.scheduler.check_idle()
    # Every launched shape is one that `warm_up` compiles. After a warm-up, no request
    # would wait for a program.
    assert runner.shapes <= set(engine.scheduler.shapes.all(with_on_demand=True))
    if total >= 20_000:  # in shorter runs, Python's free lists matter
        assert resident_bytes() <= 1.01 * middle
    assert not engine.output_processor.streams
    assert not engine.output_processor.parents
