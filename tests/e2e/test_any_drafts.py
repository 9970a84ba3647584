"""Probes of a draft model predict its acceptance, and choices of K change no text."""

from typing import Any

import numpy as np
import pytest

from jaxspec.config.speculation import ADAPTIVE
from jaxspec.program.wire import DraftPrefillResult
from jaxspec.sampling_params import SamplingParams
from tests.conformance.claims import with_random_policy
from tests.support import pair
from tests.support.engines import generate, tokens_of

LENGTH = 40


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
def test_probed_acceptance_probabilities_agree_with_rounds(draft, kind, prompts):
    params = params_of(kind, len(prompts))
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    engine = with_random_policy(pair.engine(draft, controller=ADAPTIVE), seed=7)
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, prompts, params)) == expected
    engine.scheduler.check_idle()
    made = {max((k for _, k in plan.decode), default=0) for plan, _, _ in rounds}
    assert made == {0, 1, 2, 3}
    asked = [result for *_, result in rounds if isinstance(result, DraftPrefillResult)]
    acceptance_probabilities = np.concatenate(
        [result.acceptance_probabilities.reshape(-1) for result in asked]
    )
    acceptance_probabilities = acceptance_probabilities[acceptance_probabilities >= 0]
    assert len(acceptance_probabilities) > 30
    assert set(acceptance_probabilities.tolist()) <= {0.0, 1.0}
    if draft == "same":
        # This fails if draft keys are missing or misplaced.
        assert acceptance_probabilities.min() == 1.0
        assert engine.stats.acceptance_rate == 1.0
    else:
        # Drafts are compared only if the drafts before them were accepted. About three
        # dozen tokens have both a probe and a round.
        rate = engine.acceptance.num_agreed / engine.acceptance.num_compared
        assert acceptance_probabilities.mean() == pytest.approx(rate, abs=0.15)


def test_probes_of_unseeded_requests_have_no_estimate(prompts):
    params = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9)
        for _ in prompts
    ]
    engine = with_random_policy(pair.engine("same", controller=ADAPTIVE), seed=8)
    with pair.recorded(engine) as rounds:
        generate(engine, prompts, params)
    asked = [result for *_, result in rounds if isinstance(result, DraftPrefillResult)]
    assert asked
    assert all((result.acceptance_probabilities < 0).all() for result in asked)
    assert engine.stats.acceptance_rate > 0.95
