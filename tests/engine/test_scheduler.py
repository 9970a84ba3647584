"""Whatever is asked, every plan is one that the device can run, and all requests end.

`FakeDevice` asserts what a plan may not do: read a slot that holds something else,
draft where the draft model lacks keys and values, write into another's page.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.config import EngineConfig, SpeculativeConfig
from jaxspec.engine.controller import Controller
from jaxspec.engine.request import Request, Status
from jaxspec.engine.scheduler import Launch, Scheduler
from jaxspec.outputs import RequestStateStats
from jaxspec.program.plan import TILE, PoolShape
from jaxspec.sampling_params import SamplingParams
from tests.engines import MICRO
from tests.fake_device import FakeDevice, random_truth, reference_tokens
from tests.oracles import TINY, model_config

VOCAB = 16
MODEL = model_config(
    SimpleNamespace(
        config=SimpleNamespace(to_dict=lambda: TINY | MICRO | {"model_type": "gemma2"})
    )
)


def make_config(**changes) -> EngineConfig:
    values: dict[str, Any] = dict(
        model="target",
        tokenizer="stub",
        served_model_name="target",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        page_size=4,
        num_pages=48,
        seed=0,
        tensor_parallel_size=1,
        model_config=MODEL,
    )
    num_draft = changes.pop("num_draft_tokens", 3)
    threshold = changes.pop("disable_by_batch_size", None)
    if num_draft:
        values["draft_model_config"] = MODEL
        values["speculative"] = SpeculativeConfig(
            model="draft",
            num_speculative_tokens=num_draft,
            disable_by_batch_size=threshold,
        )
    return EngineConfig(**(values | changes))


def make_request(number: int, random: np.random.Generator, config) -> Request:
    length = int(random.choice([1, 2, TILE - 1, TILE, TILE + 1, 70]))
    budget = int(random.integers(1, 40))
    stops = tuple(random.integers(0, VOCAB, random.integers(0, 2)).tolist())
    return Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=random.integers(0, VOCAB, length).tolist(),
        params=SamplingParams(
            max_tokens=budget, min_tokens=int(random.integers(0, budget + 1))
        ),
        max_total=min(length + budget, config.max_model_len),
        num_draft_tokens=int(random.integers(0, config.num_draft_tokens + 1)),
        seed=(number, 0),
        rule=0,
        stop_ids=stops,
        stats=RequestStateStats(),
        spec_metrics=None,
    )


class Loop:
    """The engine's loop without texts: plan, launch, read one launch late."""

    def __init__(self, config: EngineConfig, seed: int, depth: int = 1):
        self.config, self.depth = config, depth
        self.scheduler = Scheduler(config, Controller(config.speculative))
        self.pool = PoolShape(
            num_rows=config.max_num_seqs,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_model_len=config.max_model_len,
            vocab_size=config.model_config.vocab_size,
        )
        self.truth = random_truth(VOCAB)
        self.device = FakeDevice(
            self.pool,
            self.truth,
            has_draft=config.draft_model_config is not None,
            seed=seed,
        )
        self.launched: deque = deque()
        self.launches: list = []
        self.finished: list[Request] = []

    def step(self) -> bool:
        launch = self.scheduler.plan()
        if launch is not None:
            self.launches.append(launch)
            result = self.device.run(launch.plan, launch.shape)
            self.launched.append((launch, result))
        self.scheduler.rows.check()
        if self.launched and (launch is None or len(self.launched) > self.depth):
            launch, result = self.launched.popleft()
            self.scheduler.record_time(launch, self.cost(launch))
            for part in self.scheduler.commit(launch, result):
                if part.is_done:
                    self.scheduler.finish(part.request, "length", None)
                    self.finished.append(part.request)
        self.scheduler.pages.check()
        return self.scheduler.has_unfinished() or bool(self.launched)

    def cost(self, launch: Launch) -> float:
        """Seconds that the device takes: less for a chunk than for a round."""
        return 1.0 + launch.shape.chunk / 128

    def assert_idle(self) -> None:
        self.scheduler.check_idle()

    def assert_said_the_truth(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        expected = reference_tokens(self.truth, request.seed, prompt, request)
        assert request.output_token_ids == expected


CONFIGS = {
    "base": {},
    "one_row": dict(max_num_seqs=1),
    "many_rows_few_pages": dict(max_num_seqs=8, num_pages=30),
    "one_sequence_fits": dict(num_pages=24),
    "long_drafts": dict(num_draft_tokens=8),
    "odd_drafts": dict(num_draft_tokens=7),
    "plain": dict(num_draft_tokens=0),
    "big_pages": dict(page_size=32, num_pages=12),
    "pages_of_one": dict(page_size=1, num_pages=200),
    "switching": dict(max_num_seqs=4, disable_by_batch_size=2),
    "switching_one_tile": dict(
        max_num_seqs=8, disable_by_batch_size=2, max_num_batched_tokens=32
    ),
    "many_tiles": dict(max_num_seqs=8, max_num_batched_tokens=512, num_pages=200),
    "tight_length": dict(max_model_len=75),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("depth", [0, 1])
def test_random_traffic_runs_to_its_ends(name, depth):
    config = make_config(**CONFIGS[name])
    for seed in range(3):
        random = np.random.default_rng(seed)
        loop = Loop(config, seed, depth)
        requests = [make_request(i, random, config) for i in range(10)]
        coming = deque(requests)
        for _ in range(3000):
            while coming and random.random() < 0.5:
                loop.scheduler.add(coming.popleft())
            if not loop.step() and not coming:
                break
        assert len(loop.finished) == len(requests)
        for request in requests:
            loop.assert_said_the_truth(request)
        loop.assert_idle()
        shapes = set(loop.scheduler.shapes())
        assert {launch.shape for launch in loop.launches} <= shapes


@pytest.mark.parametrize("name", ["base", "switching_one_tile", "many_rows_few_pages"])
def test_requests_can_be_dropped_at_any_time(name):
    config = make_config(**CONFIGS[name])
    for seed in range(6):
        random = np.random.default_rng(seed)
        loop = Loop(config, seed)
        requests = [make_request(i, random, config) for i in range(10)]
        coming = deque(requests)
        dropped = []
        for _ in range(3000):
            while coming and random.random() < 0.5:
                loop.scheduler.add(coming.popleft())
            alive = [*loop.scheduler.running, *loop.scheduler.waiting]
            if alive and random.random() < 0.1:
                dropped.append(alive[random.integers(len(alive))])
                loop.scheduler.finish(dropped[-1], "abort", None)
            if not loop.step() and not coming:
                break
        assert dropped
        assert len(loop.finished) + len(dropped) == len(requests)
        for request in loop.finished:
            loop.assert_said_the_truth(request)
        loop.assert_idle()


def run_together(config: EngineConfig, count: int, **changes) -> Loop:
    """`count` equal requests of 4 prompt tokens and 12 generated ones."""
    loop = Loop(config, seed=0)
    for number in range(count):
        values: dict[str, Any] = dict(
            request_id=str(number),
            prompt=None,
            prompt_token_ids=[1, 2, 3, 4],
            params=SamplingParams(max_tokens=12),
            max_total=16,
            num_draft_tokens=config.num_draft_tokens,
            seed=(number, 0),
            rule=0,
            stop_ids=(),
            stats=RequestStateStats(),
            spec_metrics=None,
        )
        loop.scheduler.add(Request(**(values | changes)))
    while loop.step():
        pass
    return loop


def test_first_come_first_served():
    loop = run_together(make_config(max_num_seqs=2), 7)
    admitted = [
        admission.seed[0]
        for launch in loop.launches
        for admission in launch.plan.admissions
    ]
    assert admitted == list(range(7))


def test_decoding_never_waits_for_prompts():
    """A long prompt comes in beside rounds of those who run already."""
    loop = Loop(make_config(num_draft_tokens=0, max_num_batched_tokens=32), seed=0)
    random = np.random.default_rng(0)
    first = make_request(0, random, loop.config)
    first.max_total, first.stop_ids = 90, ()
    loop.scheduler.add(first)
    while first.status is not Status.DECODE:
        loop.step()
    second = make_request(1, random, loop.config)
    second.prompt_token_ids, second.max_total = [1] * 90, 95
    loop.scheduler.add(second)
    while second.status is Status.WAITING:
        loop.step()  # first the time of a round without prompts becomes known
    before = len(loop.launches) - 1
    while second.status is not Status.DECODE:
        loop.step()
    both = loop.launches[before : before + 3]
    assert [len(launch.plan.tiles) for launch in both] == [1, 1, 1]
    assert [launch.decoding for launch in both] == [[first]] * 3


def test_a_chunk_holds_no_more_than_the_budget():
    loop = run_together(make_config(max_num_seqs=8, num_pages=200), 8)
    assert max(len(launch.plan.tiles) for launch in loop.launches) == 64 // TILE


def test_drafting_stops_in_a_crowd_and_comes_back():
    config = make_config(max_num_seqs=4, disable_by_batch_size=2)
    loop = Loop(config, seed=0)
    random = np.random.default_rng(0)
    requests = [make_request(i, random, config) for i in range(4)]
    for request, budget in zip(requests, (60, 14, 14, 14), strict=True):
        request.prompt_token_ids, request.max_total = [1, 2, 3], 3 + budget
        request.num_draft_tokens, request.stop_ids = 3, ()
        loop.scheduler.add(request)
    while loop.step():
        pass
    drafts = [launch.shape.num_draft_tokens for launch in loop.launches]
    assert drafts[-1] == 3
    crowded = [
        launch.shape.num_draft_tokens
        for launch in loop.launches
        if len(launch.decoding) > 2
    ]
    assert crowded
    assert set(crowded) == {0}
    caught_up = [
        tile
        for launch in loop.launches
        for tile in launch.plan.tiles
        if tile.is_draft_only
    ]
    assert caught_up
    loop.assert_said_the_truth(requests[0])


def test_the_program_drafts_no_more_than_anybody_asks_for():
    loop = run_together(make_config(num_draft_tokens=8), 2, num_draft_tokens=2)
    drafts = {launch.shape.num_draft_tokens for launch in loop.launches}
    assert drafts == {0, 2}
    loop = run_together(make_config(num_draft_tokens=8), 2, num_draft_tokens=0)
    assert {launch.shape.num_draft_tokens for launch in loop.launches} == {0}


def test_nobody_drafts_past_the_end():
    """The last token needs no draft: it comes from the target in any case."""
    loop = run_together(make_config(num_draft_tokens=8), 1)
    entries = [entry for launch in loop.launches for entry in launch.plan.decode]
    # Four prompt tokens and the first generated one, then one at least per round.
    for known, (_, drafts) in enumerate(entries, 5):
        assert drafts <= 16 - known - 1


def test_shapes_follow_the_prompts_that_are_expected():
    scheduler = Loop(make_config(max_num_seqs=3), seed=0).scheduler
    chunks = {shape.chunk for shape in scheduler.shapes()}
    assert chunks == {0, 32, 128}
    assert {shape.num_seqs for shape in scheduler.shapes()} == {1, 2, 4}
    assert {shape.num_draft_tokens for shape in scheduler.shapes()} == {0, 1, 2, 3}
