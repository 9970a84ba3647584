"""A warm-up compiles every program that requests will need, and each only once."""

import dataclasses

import pytest

from jaxspec.errors import RequestError
from jaxspec.program.plan import Features
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import make_fake_engine, run_all


def test_warm_up_compiles_every_program_of_traffic():
    engine, runner = make_fake_engine(num_draft_tokens=2)
    asked = []
    runner.executable = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    engine.warm_up()
    for number in range(7):
        engine.add_request(str(number), [2] * (9 * number + 1), SamplingParams())
    run_all(engine)
    assert {shape for _, shape in runner.plans} <= set(asked)
    assert len(set(asked)) == len(asked)


def test_warm_up_compiles_programs_of_special_requests():
    engine, runner = make_fake_engine(num_draft_tokens=2)
    asked = []
    runner.executable = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    special = SamplingParams(presence_penalty=1.0, max_tokens=3)
    with pytest.raises(RequestError, match="max_logprobs"):
        engine.warm_up(10, [SamplingParams(logprobs=1000)])
    engine.warm_up(10, [special])
    most = engine.config.num_logprobs
    plain = {Features(), Features(all_greedy=True)}
    # Requests with controls and with logprobs share programs.
    form = Features(has_controls=True, num_logprobs=most)
    assert {shape.features for shape in asked} == {*plain, form}
    assert len(set(asked)) == len(asked)
    # Short prompts that arrive together need a program with a large chunk.
    for number in range(7):
        params = special if number == 3 else SamplingParams(max_tokens=3)
        engine.add_request(str(number), [2] * 9, params)
    run_all(engine)
    assert {shape for _, shape in runner.plans} <= set(asked)
    assert form in {shape.features for _, shape in runner.plans}
    asked.clear()
    engine.warm_up(10, [SamplingParams(logprobs=1, prompt_logprobs=0)])
    decoding = dataclasses.replace(form, num_prompt_logprobs=most)
    assert {shape.features for shape in asked} == {*plain, form, decoding}
