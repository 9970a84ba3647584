"""Forced acceptance accepts drafts at the given rates, whatever the models.

The draft model prefers what the target avoids, so that a real rule would accept almost
none of its drafts.
"""

import functools
import logging
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.program.wire import StepResult
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from tests.support.distributions import check_counts
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
    with_settings,
)

RATES = (0.8, 0.5, 0.45)
DISTRIBUTION = np.array([0.2, 0.3, 0.05, 0.45])
PROMPTS = [[2, 4 + number % 9, 3, number % 5] for number in range(16)]


@functools.cache
def compiled() -> LLMEngine:
    target = make_micro(num_hidden_layers=1)
    return make_engine(
        target,
        make_draft_of(target, sign=-1.0),
        num_draft_tokens=3,
        rule="synthetic",
        acceptance_rates=RATES,
        runner=OneProgramRunner,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )


def params_of(count: int, **changes: Any) -> list[SamplingParams]:
    """Return requests that are greedy, sampled and seeded in turn."""
    kinds: list[dict[str, Any]] = [dict(temperature=0), dict(temperature=0.9)]
    kinds.append(dict(seed=5))
    whole: dict[str, Any] = dict(max_tokens=100, ignore_eos=True)
    return [SamplingParams(**(whole | kinds[i % 3] | changes)) for i in range(count)]


def drafted_rounds(engine: LLMEngine, params: list[SamplingParams]) -> np.ndarray:
    """Return the number of accepted drafts in each round that had all K drafts."""
    kept, fetch = [], engine.runner.fetch

    def note(*launched):
        result = fetch(*launched)
        if not isinstance(result, StepResult):
            return result
        is_whole = (result.num_valid_drafts == 3) & (result.num_emitted > 0)
        kept.extend(result.num_accepted[is_whole])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "fetch", note)
        generate(engine, PROMPTS[: len(params)], params)
    return np.array(kept)


@pytest.mark.usefixtures("unchecked_types")
def test_drafts_are_accepted_at_the_given_rates():
    kept = drafted_rounds(with_settings(compiled()), params_of(16))
    assert len(kept) > 500
    check_counts(np.bincount(kept, minlength=4), DISTRIBUTION)


@pytest.mark.usefixtures("unchecked_types")
def test_request_with_fewer_drafts_uses_the_first_rates():
    fewer = {"num_speculative_tokens": 1}
    engine = with_settings(compiled())
    generate(engine, PROMPTS, params_of(16, extra_args=fewer))
    steps, kept = engine.stats.num_draft_rounds, engine.stats.num_accepted_tokens
    assert engine.stats.num_draft_tokens == steps > 500
    check_counts(np.array([steps - kept, kept]), np.array([0.2, 0.8]))


def test_other_tokens_are_the_targets():
    engine = with_settings(compiled())
    origins = {"return_token_origins": True}
    params = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, extra_args=origins
    )
    output = generate(engine, PROMPTS[:1], params)[0].outputs[0]
    assert output.token_origins is not None
    own = [
        place
        for place, token in enumerate(output.token_origins)
        if token.origin != "draft"
    ]
    assert 10 < len(own) < 30
    known = PROMPTS[0] + list(output.token_ids)
    before = [known[: len(PROMPTS[0]) + place] for place in own]
    plain = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    choices = tokens_of(generate(engine, before, plain))
    assert choices == [[output.token_ids[place]] for place in own]


def test_texts_repeat_with_their_seeds_alone_and_in_a_batch():
    def texts(count: int, **changes: Any) -> list[list[int]]:
        params = params_of(count, **changes)
        return tokens_of(generate(with_settings(compiled()), PROMPTS[:count], params))

    together = texts(4, seed=11, max_tokens=40)
    assert texts(1, seed=11, max_tokens=40) == together[:1]
    assert texts(1, seed=12, max_tokens=40) != together[:1]
    assert texts(3) == texts(3)


def test_outputs_and_logs_report_synthetic_acceptance(caplog):
    engine = with_settings(compiled())
    (output,) = generate(engine, PROMPTS[:1], params_of(1))
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None
    assert metrics.is_synthetic and metrics.snapshot().is_synthetic
    (info,) = [one for one in engine.get_metrics() if "synthetic" in one.name]
    assert info.name == "jaxspec:synthetic_acceptance_info"
    assert info.labels["chances"] == "0.8,0.625,0.9"
    with caplog.at_level(logging.INFO):
        engine.do_log_stats()
    assert "SpecDecoding metrics (synthetic acceptance): Mean" in caplog.text


def test_grammars_are_rejected_with_synthetic_acceptance():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(NotImplementedError, match="'synthetic', which accepts drafts"):
        with_settings(compiled()).add_request("0", PROMPTS[0], params)
