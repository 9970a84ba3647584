"""N-gram and suffix drafts: widths of target passes, counts, and repetitive texts.

Properties of all proposers are in `tests/conformance`.
"""

import functools
from typing import Any

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from tests.conformance import proposers
from tests.support import pair
from tests.support.engines import (
    OneProgramRunner,
    generate,
    make_engine,
    tokens_of,
    with_draft,
    with_settings,
)
from tests.support.oracles import make_hf_model

LENGTH = 64
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
NGRAM, SUFFIX, BOTH = "n-gram", "suffix", "n-gram + draft model"
SAME = "n-gram + correct draft model"
# Both kinds of lookup treat a round without a match in the same way.
KINDS = (
    *(NGRAM, BOTH, SAME, SUFFIX),
    pytest.param("suffix + draft model", marks=pytest.mark.slow),
)
# A random model with tied embeddings repeats its last token.
REPEATING_PROMPTS = [[5, 6, 7], [9, 8, 3, 4] * 4, [11] * 9, [20, 21]]


def prompts() -> list[list[int]]:
    """Return random and repetitive prompts."""
    random = pair.prompts(8)
    return random + [(prompt * 40)[:40] for prompt in pair.prompts(8, longest=15)]


@functools.cache
def repeating(name: str) -> tuple[LLMEngine, LLMEngine]:
    """Return a plain engine and one with lookups, of a target that repeats itself."""
    target, options = make_hf_model(seed=2, **pair.SIZES), proposers.PROPOSERS[name]
    settings: dict[str, Any] = dict(pair.SETTINGS, **options.options)
    settings |= dict(num_draft_tokens=options.num_draft_tokens, runner=options.runner)
    plain = make_engine(target, runner=OneProgramRunner, **pair.SETTINGS)
    return plain, make_engine(target, **settings)


@functools.cache
def played(name: str) -> tuple[LLMEngine, list[RequestOutput], list[Any]]:
    """Generate texts; return the engine, its outputs and its launches."""
    if name == SAME:
        engine = with_draft(proposers.first_engine(BOTH), pair.draft("same"))
    else:
        engine = proposers.engine(name)
    with pair.recorded(engine) as rounds:
        outputs = generate(engine, prompts(), GREEDY)
    return engine, outputs, rounds


@functools.cache
def texts() -> list[list[int]]:
    return tokens_of(generate(pair.plain_engine(), prompts(), GREEDY))


@pytest.mark.parametrize("name", KINDS)
def test_rounds_have_no_few_or_all_drafts(name):
    """Rounds have no, few or K drafts; some batches mix rows with and without."""
    engine, outputs, rounds = played(name)
    assert tokens_of(outputs) == texts()
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    decoding = [result for plan, _, result in rounds if plan.decode]
    found = [int(result.num_draft_tokens.max()) for result in decoding]
    if "+" not in name:
        assert {0, engine.config.num_draft_tokens} <= set(found), "one form only"
        assert name == NGRAM or {2, 3, 4} <= set(found), "no narrow form"
        neither = [
            0 in result.num_draft_tokens[:2] and any(result.num_draft_tokens)
            for result in decoding
        ]
        assert any(neither), "no batch in which only one of two matches"
    else:
        # Without a match, the draft model drafts; only last rounds have no room for
        # drafts.
        assert found.count(0) < 0.1 * len(found)


@pytest.mark.parametrize("name", [NGRAM, SUFFIX])
def test_repetitive_text_takes_fewer_rounds(name):
    plain, engine = map(with_settings, repeating(name))
    expected = tokens_of(generate(plain, REPEATING_PROMPTS, GREEDY))
    assert tokens_of(generate(engine, REPEATING_PROMPTS, GREEDY)) == expected
    assert engine.stats.acceptance_rate > 0.5
    assert engine.stats.num_rounds < 0.7 * plain.stats.num_rounds


def test_correct_draft_model_helps_without_matches():
    """The draft model also gets keys of lookup drafts that were accepted."""
    engine, *_ = played(SAME)
    alone, *_ = played(NGRAM)
    assert engine.stats.num_rounds < alone.stats.num_rounds


@pytest.mark.parametrize("name", KINDS)
def test_counts_equal_the_drafts_of_the_rounds(name):
    engine, outputs, rounds = played(name)
    drafted = sum(
        int(result.num_draft_tokens[index])
        for plan, _, result in rounds
        for index in range(len(plan.decode))
        if result.num_emitted[index]
    )
    assert engine.stats.num_draft_tokens == drafted
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert all(one is not None for one in metrics)
    assert sum(one.num_draft_tokens for one in metrics if one) == drafted
    assert sum(one.num_spec_steps for one in metrics if one) == (
        engine.stats.num_draft_rounds
    )
    for plan, _, result in rounds:
        for index, (_, wanted) in enumerate(plan.decode):
            assert (
                result.num_accepted[index] <= result.num_draft_tokens[index] <= wanted
            )


@pytest.mark.parametrize("name", [NGRAM, SUFFIX])
def test_repetitive_texts_end_at_every_offset_of_a_round(name):
    """Texts have every length, and some sequences reach the maximum length."""
    plain, engine = map(with_settings, repeating(name))
    params = [
        SamplingParams(temperature=0, max_tokens=8 + index, ignore_eos=True)
        for index in range(8)
    ]
    some = REPEATING_PROMPTS * 2
    expected = tokens_of(generate(plain, some, params))
    assert tokens_of(generate(engine, some, params)) == expected
    longest = pair.SETTINGS["max_model_len"]
    full = [(prompt * longest)[: longest - 20] for prompt in REPEATING_PROMPTS]
    until = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = tokens_of(generate(plain, full, until))
    assert [len(tokens) for tokens in expected] == [20] * len(full)
    assert tokens_of(generate(engine, full, until)) == expected
