"""A text does not depend on which programs run it, even if they change midway."""

import functools
from typing import Any

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.runner import Runner
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import Features, StepShape
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of
from tests.support.loops import SomePrograms

PROMPTS = pair.prompts(6, seed=11)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, min_tokens=12),
    SamplingParams(temperature=1.0, seed=3, max_tokens=18),
    SamplingParams(temperature=0.7, seed=4, top_p=0.9, max_tokens=16),
    SamplingParams(temperature=1.2, seed=5, top_k=9, min_p=0.01, max_tokens=15),
    SamplingParams(
        temperature=0.9,
        seed=6,
        max_tokens=14,
        extra_args={"num_speculative_tokens": 1},
    ),
]
SPECIAL = Features(has_controls=True, num_logprobs=1, num_prompt_logprobs=1)


class GivenRunner(Runner):
    """Uses only given programs of another runner, and one of `coming` per launch."""

    programs: Any = None

    def __init__(self, other: Runner, given: list[StepShape], coming: Any = ()):
        self.__dict__ |= other.__dict__
        self.programs, self.coming = SomePrograms(*given), list(coming)
        self.shapes: list[StepShape] = []

    def launch(self, plan: Any, shape: StepShape) -> Any:
        self.shapes.append(shape)
        if self.coming:
            self.programs.add(self.coming.pop(0))
        return super().launch(plan, shape)


@functools.cache
def plain_texts() -> list[list[int]]:
    """Return the texts of requests that run alone, without drafts."""
    return [
        tokens_of(generate(pair.plain_engine(), [prompt], params))[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


# `test_parameters.py` runs plain requests in a program with controls and logprobs.
@pytest.mark.parametrize(
    "features", [[Features()], pytest.param([SPECIAL], marks=pytest.mark.slow)]
)
def test_most_general_program_gives_the_same_texts(features):
    first = pair.engine()
    (universal, *_) = first.scheduler.shapes.all(features=features)
    (draft_prefill,) = first.scheduler.shapes.draft_prefills
    runner = GivenRunner(first.runner, [universal, draft_prefill])
    engine = LLMEngine(first.config, runner=runner, tokenizer=first.tokenizer)
    said = tokens_of(generate(engine, PROMPTS, PARAMS))
    assert set(runner.shapes) == {universal, draft_prefill}
    assert said == plain_texts()
    assert engine.stats.num_accepted_tokens > 0


def test_programs_compiled_midway_change_no_text():
    """Each launch adds one more program, beginning with the largest."""
    first = pair.engine()
    (universal, *others) = first.scheduler.shapes.all()
    runner = GivenRunner(first.runner, [universal], coming=others)
    engine = LLMEngine(first.config, runner=runner, tokenizer=first.tokenizer)
    said = tokens_of(generate(engine, PROMPTS, PARAMS))
    assert runner.shapes[0] == universal
    assert len(set(runner.shapes)) > 3
    assert said == plain_texts()


def test_batch_invariant_requests_run_in_one_program():
    """One program runs plain rounds, drafts and prompts.

    Logprobs then do not depend on the batch.
    """
    engine = pair.own_engine(batch_invariant=True, has_one_shape=False)
    assert tokens_of(generate(engine, PROMPTS, PARAMS)) == plain_texts()
    # The other program is for draft prefill.
    assert engine.runner.num_compiles == 2
    assert engine.stats.num_accepted_tokens


@pytest.mark.slow
def test_batch_invariant_requests_may_begin_with_logprobs():
    """Only the program for logprobs is compiled then, and it also reads the prompt."""
    first = pair.own_engine(batch_invariant=True, has_one_shape=False)
    shapes = first.scheduler.shapes.all(features=(Features(num_logprobs=2),))
    runner = GivenRunner(first.runner, shapes)
    engine = LLMEngine(first.config, runner=runner, tokenizer=first.tokenizer)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    engine.add_request("0", PROMPTS[0], params)
    outputs = list[RequestOutput]()
    for _ in range(60):
        if not engine.has_unfinished_requests():
            break
        outputs = engine.step()
    assert not engine.has_unfinished_requests(), "the request is never admitted"
    assert len(outputs[0].outputs[0].logprobs or ()) == 4
