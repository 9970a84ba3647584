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
)
from tests.support.oracles import make_hf_model

LENGTH = 64
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
NGRAM, SUFFIX, BOTH = "n-gram", "suffix", "n-gram + draft model"
SAME = "n-gram + correct draft model"
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Both kinds of lookup treat a round without a match in the same way; so do all draft
# models.
KINDS = (NGRAM, slow(BOTH), SAME, SUFFIX, slow("suffix + draft model"))


def prompts() -> list[list[int]]:
    """Return random and repetitive prompts."""
    random = pair.prompts(8)
    return random + [(prompt * 40)[:40] for prompt in pair.prompts(8, longest=15)]


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
def test_rounds_have_no_few_or_all_drafts_and_are_counted(name):
    """Rounds have no, few or K drafts; some batches mix rows with and without."""
    engine, outputs, rounds = played(name)
    stats = engine.stats
    assert tokens_of(outputs) == texts()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafted, found, has_mixed = 0, [], False
    for plan, _, result in rounds:
        if not plan.decode:
            continue
        counts = result.num_valid_drafts
        for index, (_, wanted) in enumerate(plan.decode):
            assert result.num_accepted[index] <= counts[index] <= wanted
            drafted += int(counts[index]) * bool(result.num_emitted[index])
        found.append(int(counts.max()))
        has_mixed |= 0 in counts[:2] and bool(counts.any())
    assert stats.num_draft_tokens == drafted
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert all(one is not None for one in metrics)
    assert sum(one.num_draft_tokens for one in metrics if one) == drafted
    steps = sum(one.num_spec_steps for one in metrics if one)
    assert steps == stats.num_draft_rounds
    if "+" not in name:
        assert {0, engine.config.max_draft_tokens} <= set(found), "one form only"
        assert name == NGRAM or {2, 3, 4} <= set(found), "no narrow form"
        assert has_mixed, "no batch in which only one of two matches"
    else:
        # Without a match, the draft model drafts; only last rounds have no room for
        # drafts.
        assert found.count(0) < 0.1 * len(found)
    if name == SAME:
        # The draft model also gets keys of lookup drafts that were accepted.
        assert stats.num_rounds < played(NGRAM)[0].stats.num_rounds


@pytest.mark.parametrize("name", [NGRAM, slow(SUFFIX)])
def test_repetitive_text_takes_fewer_rounds_and_ends_at_every_offset(name):
    # A random model with tied embeddings repeats its last token.
    prompts = [[5, 6, 7], [9, 8, 3, 4] * 4, [11] * 9, [20, 21]]
    plain, engine = repeating(name)

    def lengths(some: list[list[int]], *limits: int | None) -> list[int]:
        """Check that texts equal plain ones; return their lengths."""
        params = [
            SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
            for limit in limits
        ]
        expected = tokens_of(generate(plain, some, params))
        assert tokens_of(generate(engine, some, params)) == expected
        return [len(tokens) for tokens in expected]

    assert lengths(prompts, *[LENGTH] * 4) == [LENGTH] * 4
    assert engine.stats.acceptance_rate > 0.5
    assert engine.stats.num_rounds < 0.7 * plain.stats.num_rounds
    assert lengths(prompts * 2, *range(8, 16)) == [*range(8, 16)]
    # Sequences reach the maximum length of the context.
    longest = pair.SETTINGS["max_model_len"]
    full = [(prompt * longest)[: longest - 20] for prompt in prompts]
    assert lengths(full, *[None] * 4) == [20] * 4
