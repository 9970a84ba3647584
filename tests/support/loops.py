"""Run a scheduler on a fake device, without detokenization."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.config.engine import EngineConfig, SpeculativeConfig
from jaxspec.config.speculation import FIXED
from jaxspec.engine.runner import pool_of
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.programs import EveryProgram
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.scheduler import Scheduler
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.models.families import config_from_hf
from jaxspec.outputs import RequestStateStats
from jaxspec.program.plan import TILE, StepShape
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.defaults import DEFAULTS
from tests.support.fake_device import FakeDevice, random_truth, reference_tokens
from tests.support.sizes import MICRO, TINY

VOCAB = 16
MODEL = config_from_hf(TINY | MICRO | {"model_type": "gemma2"})


def make_config(**changes) -> EngineConfig:
    values: dict[str, Any] = DEFAULTS | dict(
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
        disable_hybrid_kv_cache_manager=True,
    )
    num_draft_tokens = changes.pop("num_draft_tokens", 3)
    window, num_local = changes.pop("window", None), changes.pop("num_local", 1)
    model = MODEL
    if window is not None:
        model = replace(
            MODEL,
            num_layers=num_local + 1,
            local_pattern=(True,) * num_local + (False,),
            sliding_window=window,
        )
        values |= dict(model_config=model, disable_hybrid_kv_cache_manager=False)
    threshold = changes.pop("disable_by_batch_size", None)
    longest_drafted = changes.pop("longest_drafted", None)
    forced = changes.pop("forced_acceptance", None)
    controller = changes.pop("controller", FIXED)
    keys = changes.pop("speculative_keys", {})
    if num_draft_tokens:
        values["draft_model_config"] = model
        speculative = SpeculativeConfig(
            model="draft",
            num_speculative_tokens=num_draft_tokens,
            disable_by_batch_size=threshold,
            max_model_len=longest_drafted,
            controller=controller,
            **keys,
        )
        if forced is not None:
            speculative = speculative.with_forced_acceptance(forced)
        values["speculative"] = speculative
    return EngineConfig(**(values | changes))


def make_prompt(random: np.random.Generator, length: int) -> list[int]:
    """Return one of a few prefixes, sometimes with a random suffix."""
    stem = np.random.default_rng(random.integers(2)).integers(0, VOCAB, length)
    own = int(random.choice([0, 1, length // 2]))
    stem[length - own :] = random.integers(0, VOCAB, own)
    return stem.tolist()


def make_request(number: int, random: np.random.Generator, config) -> Request:
    length = int(random.choice([1, 2, TILE - 1, TILE, TILE + 1, 70]))
    budget = int(random.integers(1, 40))
    stops = tuple(random.integers(0, VOCAB, random.integers(0, 2)).tolist())
    return Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=make_prompt(random, length),
        params=SamplingParams(
            max_tokens=budget,
            min_tokens=int(random.integers(0, budget + 1)),
            output_kind=list(RequestOutputKind)[random.integers(3)],
        ),
        priority=int(random.integers(3)),
        cache_salt="a" if random.random() < 0.25 else None,
        can_read_prefix_cache=bool(random.random() < 0.9),
        max_total=min(length + budget, config.max_model_len),
        max_draft_tokens=int(random.integers(0, config.max_draft_tokens + 1)),
        seed=(number, 0),
        rule=0,
        stop_ids=stops,
        stats=RequestStateStats(),
        spec_metrics=None,
    )


class SomePrograms(EveryProgram):
    """Pretends that only the given programs are compiled; records requested ones."""

    def __init__(self, *there: StepShape):
        self.there, self.asked = set(there), list[StepShape]()

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self.there

    def request(self, shape: StepShape) -> None:
        self.asked.append(shape)

    def add(self, shape: StepShape) -> None:
        self.there.add(shape)
        self.version += 1


class Loop:
    """Runs a scheduler as an engine does: plan, launch, read one launch late."""

    def __init__(
        self,
        config: EngineConfig,
        seed: int,
        depth: int = 1,
        programs: EveryProgram | None = None,
        page_events: PageEvents | None = None,
        policy: SpeculationPolicy | None = None,
    ):
        self.config, self.depth = config, depth
        policy = policy or SpeculationPolicy(config.speculative)
        self.scheduler = Scheduler(
            config, policy, programs=programs, page_events=page_events
        )
        self.pool = pool_of(config)
        self.truth = random_truth(VOCAB)
        self.device = FakeDevice(
            self.pool,
            self.truth,
            has_draft=config.draft_model_config is not None,
            seed=seed,
            window=config.local_window,
        )
        self.freed: list[int] = []
        self.num_freed = 0
        if config.local_window is not None:
            self._record_freed_pages()
        self.fastest_s, self.prompt_token_s = 1.0, 1 / 128
        self.launched: deque = deque()
        self.launches: list[Launch] = []
        self.finished: list[Request] = []

    def _record_freed_pages(self) -> None:
        """Record the local pages that can no longer be found once they are free."""
        tables, pool = self.scheduler.tables, self.scheduler.pool
        free = tables.free_behind

        def free_behind(request: Request, first_local: int) -> None:
            pages = request.local_pages[: first_local - request.first_local]
            free(request, first_local)
            self.freed += [page for page in pages if pool.is_blank(page)]
            self.num_freed += len(pages)

        tables.free_behind = free_behind

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.scheduler.add(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, requests: Iterable[Request] = ()) -> None:
        """Add requests, and run until all have ended."""
        self.add(requests)
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("requests do not end")

    def step(self) -> bool:
        launch = self.scheduler.plan()
        # The plan may have allocated them again: then it also overwrites them.
        self.device.spoil(self.freed)
        self.freed = []
        if launch is not None:
            self.launches.append(launch)
            result = self.device.run(launch.plan, launch.shape)
            self.launched.append((launch, result))
        self.scheduler.rows.check()
        if self.launched and (launch is None or len(self.launched) > self.depth):
            launch, result = self.launched.popleft()
            self.scheduler.settle(launch, len(result.rounds))
            for one in result.rounds:
                self.scheduler.record_time(launch, one, self.cost(launch))
                for part in self.scheduler.commit(launch, one).parts:
                    if part.is_done:
                        self.scheduler.finish(part.request, "length", None)
                        self.finished.append(part.request)
            self.scheduler.rows.check()
        self.scheduler.pool.check()
        self.scheduler.step_times.check()
        self.scheduler.acceptance.check()
        return self.scheduler.has_unfinished() or bool(self.launched)

    def cost(self, launch: Launch) -> float:
        """Return the seconds of a launch: a constant, plus a time per prompt token."""
        return self.fastest_s + launch.shape.max_prompt_tokens * self.prompt_token_s

    def assert_idle(self) -> None:
        self.scheduler.check_idle()

    def assert_said_the_truth(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        expected = reference_tokens(self.truth, request.seed, prompt, request)
        assert request.output_token_ids == expected

    def check_ended(self, requests: Iterable[Request]) -> None:
        """Assert that requests have their texts, and that nothing is left of them."""
        for request in requests:
            self.assert_said_the_truth(request)
        self.assert_idle()


def run_traffic(config: EngineConfig, requests: list[Request], seed: int = 0) -> Loop:
    loop = Loop(config, seed)
    loop.run(requests)
    assert len(loop.finished) == len(requests)
    loop.check_ended(requests)
    return loop


def run_random_traffic(
    loop: Loop,
    seed: int,
    make: Callable[..., Request] = make_request,
    *,
    arrival_share: float = 0.5,
    drop_share: float = 0.0,
) -> None:
    """Run ten requests that arrive at random; drop a share of those that are left."""
    random = np.random.default_rng(seed)
    coming = deque(make(number, random, loop.config) for number in range(10))
    dropped = []
    for _ in range(3000):
        while coming and random.random() < arrival_share:
            loop.scheduler.add(coming.popleft())
        alive = [*loop.scheduler.running, *loop.scheduler.waiting]
        if drop_share and alive and random.random() < drop_share:
            dropped.append(alive[random.integers(len(alive))])
            loop.scheduler.finish(dropped[-1], "abort", None)
        if not loop.step() and not coming:
            break
    assert bool(dropped) == bool(drop_share)
    assert len(loop.finished) + len(dropped) == 10
    loop.check_ended(loop.finished)
    shapes = set(loop.scheduler.shapes.all(with_on_demand=True))
    assert {launch.shape for launch in loop.launches} <= shapes


def make_requests(config: EngineConfig, count: int, **changes: Any) -> list[Request]:
    """Return requests with the same 70 prompt tokens, each for 20 more tokens."""
    random = np.random.default_rng(0)
    requests = [make_request(number, random, config) for number in range(count)]
    for request in requests:
        request.prompt_token_ids = list(range(10)) * 7
        request.max_total, request.stop_ids = 90, ()
        request.cache_salt, request.can_read_prefix_cache = None, True
        request.priority = 0
        request.params.output_kind = RequestOutputKind.FINAL_ONLY
        for name, value in changes.items():
            setattr(request, name, value)
    return requests
