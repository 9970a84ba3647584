"""Whatever K every round has, texts are the target's: no choice of K changes them."""

from typing import Any

import numpy as np
import pytest

from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.speculation.policy import (
    Choice,
    RoundEstimates,
    SpeculationPolicy,
)
from jaxspec.program.wire import CaughtUp
from jaxspec.sampling_params import SamplingParams
from tests.e2e import pair, test_trees
from tests.engines import generate, tokens_of

LENGTH = 40


class RandomPolicy(SpeculationPolicy):
    """Any K in any round, and probes of the draft model at any time."""

    def __init__(self, *arguments, seed: int):
        super().__init__(*arguments)
        self.random = np.random.default_rng(seed)

    def is_due(self, num_seqs: int, most: int) -> bool:
        # Each for some rounds, or draft prefill would never end.
        return most > 0 and self.random.random() < 0.15

    def choose(self, estimates: RoundEstimates) -> None:
        most = len(estimates.seconds) - 1
        self.choice = Choice(
            num_drafts=int(self.random.integers(0, most + 1)),
            has_side_branches=bool(self.random.integers(2)),
        )

    def can_probe(self) -> bool:
        return self.random.random() < 0.1


def with_any_drafts(engine: LLMEngine, seed: int) -> LLMEngine:
    engine.policy = RandomPolicy(engine.config.speculative, seed=seed)
    engine.scheduler = engine._make_scheduler()
    return engine


def params_of(kind: str, count: int) -> list[SamplingParams]:
    changes: dict[str, Any] = dict(temperature=0.9, top_p=0.9)
    if kind == "greedy":
        changes = dict(temperature=0)
    return [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=seed, **changes)
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.prompts(28, seed=3)


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("noisy", "seeded"),
        ("same", "greedy"),
        pytest.param("noisy", "greedy", marks=pytest.mark.slow),
        pytest.param("same", "seeded", marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_plain_decoding(draft, kind, prompts):
    params = params_of(kind, len(prompts))
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    engine = with_any_drafts(pair.engine(draft, controller=ADAPTIVE), seed=7)
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, prompts, params)) == expected
    engine.scheduler.check_idle()
    made = {max((k for _, k in plan.decode), default=0) for plan, _, _ in rounds}
    assert made == {0, 1, 2, 3}
    asked = [result for *_, result in rounds if isinstance(result, CaughtUp)]
    likeness = np.concatenate([result.likeness.reshape(-1) for result in asked])
    likeness = likeness[likeness >= 0]
    assert len(likeness) > 30
    assert set(likeness.tolist()) <= {0.0, 1.0}
    if draft == "same":
        # What is not up to date, or fed to the wrong place, would show here.
        assert likeness.min() == 1.0
        assert engine.stats.acceptance_rate == 1.0
    else:
        # Of first drafts, and of those that follow one that stayed: all that is
        # compared. Some three dozen tokens are known by the other way.
        rate = engine.acceptance.num_agreed / engine.acceptance.num_compared
        assert likeness.mean() == pytest.approx(rate, abs=0.15)


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ("tree", "seeded"),
        ("leaves", "greedy"),
        pytest.param("tree", "greedy", marks=pytest.mark.slow),
        pytest.param("both leaves", "seeded", marks=pytest.mark.slow),
        pytest.param("scanned tree", "greedy", marks=pytest.mark.slow),
    ],
)
def test_drafts_beside_others_come_and_go(draft, kind, prompts):
    prompts = prompts[:12]
    params = params_of(kind, len(prompts))
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    engine = test_trees.engine_of(draft, controller=ADAPTIVE)
    with_any_drafts(engine, seed=9)
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, prompts, params)) == expected
    engine.scheduler.check_idle()
    drafting = [shape for plan, shape, _ in rounds if any(k for _, k in plan.decode)]
    chains = [shape.tree.is_chain for shape in drafting]
    assert 5 < sum(chains) < len(chains) - 5
    assert engine.stats.num_beside_tokens > 0


def test_nothing_is_said_of_drafts_that_would_have_been_drawn_without_a_seed(prompts):
    params = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9)
        for _ in prompts
    ]
    engine = with_any_drafts(pair.engine("same", controller=ADAPTIVE), seed=8)
    with pair.recorded(engine) as rounds:
        generate(engine, prompts, params)
    asked = [result for *_, result in rounds if isinstance(result, CaughtUp)]
    assert asked
    assert all((result.likeness < 0).all() for result in asked)
    assert engine.stats.acceptance_rate > 0.95


def test_an_engine_that_chooses_says_the_same(prompts):
    """With the real controller, whatever this machine's clock makes of it."""
    engine, prompts = pair.engine("noisy", controller=ADAPTIVE), prompts[:10]
    for kind in ("greedy", "seeded"):
        params = params_of(kind, len(prompts))
        expected = tokens_of(generate(pair.plain_engine(), prompts, params))
        assert tokens_of(generate(engine, prompts, params)) == expected
    engine.scheduler.check_idle()
