"""Timed parts on a real engine compute what a round does, and change no length."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench import parts as module
from jaxspec.bench.measure import Batch
from jaxspec.bench.parts import copy_bandwidth, cost_ratio, measure_parts, round_bytes
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
)

PROMPTS = [[2, 5, 6, 7], [2, 9, 4]]


FINAL = RequestOutputKind.FINAL_ONLY


def params_of(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(max_tokens=24, ignore_eos=True, temperature=0.0)
    values |= dict(output_kind=RequestOutputKind.DELTA)
    return SamplingParams(**(values | changes))


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    target = make_micro()
    sizes: Any = dict(num_draft_tokens=2, max_num_seqs=2)
    return make_engine(target, make_draft_of(target), runner=OneProgramRunner, **sizes)


def test_bytes_are_those_of_both_models(engine):
    target, (draft,) = engine.runner.params
    assert draft is not None
    size = 16 * 16 * 4  # the embedding alone, in float32
    plain = round_bytes(engine, 0, 0)
    assert plain > size
    one = round_bytes(engine, 1, 0) - plain
    assert size < one < plain
    assert round_bytes(engine, 3, 0) == plain + 3 * one
    # Bytes of keys and values: 2 layers in the target and 1 in the draft, each with 1
    # head of 8 floats.
    assert round_bytes(engine, 0, 10) - plain == 10 * 2 * 2 * 8 * 4
    assert round_bytes(engine, 2, 10) - round_bytes(engine, 2, 0) == 10 * (128 + 2 * 64)
    assert cost_ratio(engine) == one / plain


def test_embedding_of_trimmed_draft_is_not_counted(engine):
    """The trimmed head of the draft is counted instead of the embedding."""
    target = make_micro(seed=3)
    sizes: Any = dict(num_draft_tokens=3, kept=[1, 4, 9, 12], max_num_seqs=2)
    trimmed = make_engine(target, make_draft_of(target), **sizes)
    whole, found = (
        round_bytes(one, 1, 0) - round_bytes(one, 0, 0) for one in (engine, trimmed)
    )
    _, (draft,) = engine.runner.params
    _, (own,) = trimmed.runner.params
    assert draft is not None and own is not None
    assert whole - found == draft["embedding"].nbytes - own["head"].nbytes


@pytest.fixture
def timed(monkeypatch) -> list[Any]:
    """Record the result of every timed part, and the lengths of the rows after it."""
    made, time = [], module._Timer.time

    def record(self, part, *given):
        seconds, result = time(self, part, *given)
        made.append((result, self._runner.state.rows.num_tokens))
        return seconds, result

    monkeypatch.setattr(module._Timer, "time", record)
    return made


@pytest.mark.slow
def test_parts_change_no_length(engine, timed, monkeypatch):
    said = tokens_of(generate(engine, PROMPTS, params_of(output_kind=FINAL)))
    accept = module.accept_part

    def spy(config, tree, params, state, rows, given):
        state, outputs = accept(config, tree, params, state, rows, given)
        return state, (outputs, rows, *given)

    monkeypatch.setattr(module, "accept_part", spy)
    batch = Batch(prompts=PROMPTS, params=[params_of()] * 2)
    plain, drafted = measure_parts(engine, batch, [0, 2], calls=2)
    assert (plain.num_seqs, plain.num_draft_tokens, plain.draft_s) == (2, 0, 0)
    assert (drafted.num_seqs, drafted.num_draft_tokens) == (2, 2)
    for one in (plain, drafted):
        assert 0 <= one.device_s < 60
    assert drafted.num_bytes > plain.num_bytes
    # The last part computes what the round would have: the next greedy tokens.
    (outputs, rows, proposal, logits), lengths = timed[-1]
    moved, _, emitted = outputs
    assert logits.shape == (6, 16)
    for number, (prompt, text) in enumerate(zip(PROMPTS, said, strict=True)):
        row = int(rows[number])
        length, count = int(lengths[row]), int(emitted.num_emitted[number])
        begin = length - len(prompt)
        assert module.FIRST_TOKENS <= begin < 24 - 3
        assert int(moved[row]) == length + count
        tokens = np.asarray(emitted.tokens[number, :count]).tolist()
        assert tokens == text[begin : begin + count]
        drafts = np.asarray(proposal.tokens[number, : count - 1]).tolist()
        assert drafts == tokens[:-1]
    engine.scheduler.check_idle()
    assert not jnp.isnan(logits).any()
    assert tokens_of(generate(engine, PROMPTS, params_of(output_kind=FINAL))) == said


def test_short_requests_continue_until_timed(engine):
    """One request waits for a program while the others run."""
    soon = params_of(max_tokens=module.FIRST_TOKENS - 1)
    (plain,) = measure_parts(
        engine, Batch(prompts=PROMPTS, params=[soon] * 2), [0], calls=1
    )
    assert plain.num_seqs == 2
    engine.scheduler.check_idle()


@pytest.mark.parametrize(
    # Probabilities of 1 would prove little, since greedy drafts are accepted anyway.
    ("probability", "expected"),
    [(0.0, 1), pytest.param(1.0, 3, marks=pytest.mark.slow)],
)
def test_forced_acceptance_applies_to_parts(
    probability, expected, engine, timed, monkeypatch
):
    accept = module.accept_part

    def forced(config, tree, params, state, rows, given):
        state = dataclasses.replace(state, forced_acceptance=jnp.full(2, probability))
        state, outputs = accept(config, tree, params, state, rows, given)
        return dataclasses.replace(state, forced_acceptance=None), outputs

    monkeypatch.setattr(module, "accept_part", forced)
    measure_parts(engine, Batch(prompts=PROMPTS, params=[params_of()] * 2), [2])
    (_, _, last), _ = timed[-1]
    assert last.num_emitted.tolist() == [expected] * 2


def test_copy_bandwidth_is_of_the_fastest_copy():
    # The clock is read twice per copy; the first copy compiles, and is not counted.
    times = iter([0, 0.001, 10, 10.5, 20, 20.25, 30, 31])
    found = copy_bandwidth(
        jax.devices()[0], num_bytes=4096, repeats=3, clock=lambda: next(times)
    )
    assert found == pytest.approx(2 * 4096 / 0.25)
