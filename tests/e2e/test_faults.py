"""NaN or a failure in the draft model costs speed; NaN in the target ends requests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.program.propose import DraftModel
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, make_engine, tokens_of

BAD_TOKEN = 40
PROMPTS = [[2, 5, 7, 9], [2, 9, 4, 11], [2, 8, 8, 30]]


def make(*, has_draft: bool = True, **settings: Any) -> LLMEngine:
    """Make an engine with its own parameters, which a test overwrites with NaN."""
    if has_draft:
        return pair.own_engine(**settings)
    return make_engine(pair.target(), has_one_shape=True, **pair.settings(**settings))


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **changes)


def seeded() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=seed)
        for seed in range(len(PROMPTS))
    ]


def ruin(params: Any) -> Any:
    """Return parameters with one NaN per layer norm: one step makes all rows NaN."""
    return jax.tree.map(
        lambda leaf: leaf.at[0].set(jnp.nan) if leaf.ndim == 1 else leaf, params
    )


def ruin_token(params: Any) -> Any:
    """Return parameters with a NaN embedding of one token, in any storage layout."""
    whole = params["embedding"]
    values = np.array(whole.values)
    values[BAD_TOKEN] = np.nan
    placed = jax.device_put(values, jax.tree.leaves(whole)[0].sharding)
    return {**params, "embedding": type(whole).of(placed)}


def test_draft_with_nan_costs_only_speed():
    plain = pair.plain_engine()
    expected = [tokens_of(generate(plain, PROMPTS, p)) for p in (greedy(), seeded())]
    engine = make()
    target, (draft,) = engine.runner.params
    assert tokens_of(generate(engine, PROMPTS, greedy())) == expected[0]
    assert engine.stats.acceptance_rate > 0
    assert not engine.policy.is_stopped
    engine.runner.params = target, (ruin(draft),)
    for params, texts in zip((greedy(), seeded()), expected, strict=True):
        assert tokens_of(generate(engine, PROMPTS, params)) == texts
    assert engine.policy.is_stopped
    engine.scheduler.check_idle()


def test_draft_that_fails_to_compile_costs_only_speed(monkeypatch):
    expected = tokens_of(generate(pair.plain_engine(), PROMPTS, greedy()))
    engine = make()
    # Nothing is cached: a cached program would not fail to compile.
    engine.runner.cache = ProgramCache(None)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(DraftModel, "propose", fail)
    assert tokens_of(generate(engine, PROMPTS, greedy())) == expected
    assert engine.policy.is_stopped
    engine.scheduler.check_idle()


@pytest.mark.parametrize(
    "has_draft", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_target_with_nan_ends_only_affected_requests(has_draft):
    # Plain decoding needs no logit bias, and therefore no programs with controls.
    runner = pair.GeneralRunner if has_draft else None
    engine = make(has_draft=has_draft, runner=runner)
    target, drafts = engine.runner.params
    engine.runner.params = ruin_token(target), drafts
    prompts = [*PROMPTS, [2, 5, BAD_TOKEN, 9]]
    # No drafts are allowed, as a drafted NaN token would spoil earlier positions, whose
    # attention multiplies its values by 0.
    bias = {BAD_TOKEN: -100.0} if has_draft else None
    sampled = [*seeded(), greedy()]
    for one in sampled:
        one.logit_bias = bias
    for params in (greedy(logit_bias=bias), sampled):
        *good, bad = generate(engine, prompts, params)
        assert bad.outputs[0].finish_reason == "error"
        assert bad.outputs[0].token_ids == []
        for output in good:
            assert output.outputs[0].finish_reason == "length"
            # The logit of this token is NaN as well, so the token is forbidden.
            assert BAD_TOKEN not in output.outputs[0].token_ids
    assert not engine.policy.is_stopped
    engine.scheduler.check_idle()
    engine.runner.params = ruin(target), drafts
    outputs = generate(engine, PROMPTS, greedy())
    assert {one.outputs[0].finish_reason for one in outputs} == {"error"}
    engine.runner.params = target, drafts
    outputs = generate(engine, PROMPTS, greedy())
    assert {one.outputs[0].finish_reason for one in outputs} == {"length"}
