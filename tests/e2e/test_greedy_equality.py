"""Greedy texts equal HuggingFace's token for token, with and without drafts.

The models are float32, and prompts are chosen so that rounding cannot change a token.
In `make test`, `tests/conformance` compares fewer texts.
"""

import functools

import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of, with_settings

LENGTH = 64
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.prompts(24)


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    """Return the texts of plain decoding, which equal HuggingFace's."""
    said = tokens_of(generate(pair.plain_engine(), prompts, GREEDY))
    margins = [pair.greedy_margin(*both) for both in zip(prompts, said, strict=True)]
    assert min(margins) > pair.MIN_MARGIN, "near ties: choose another seed"
    assert all(len(tokens) == LENGTH for tokens in said)
    # A text that repeats one token could be right even with wrong keys and values.
    assert sum(len(set(tokens)) for tokens in said) > 12 * len(said)
    return said


@pytest.mark.slow
def test_unrelated_draft_changes_nothing(prompts, texts):
    engine = pair.engine("unrelated")
    assert tokens_of(generate(engine, prompts, GREEDY)) == texts
    assert 0.001 <= engine.stats.acceptance_rate <= 0.1


@pytest.mark.slow
def test_drafts_of_several_lengths_share_a_batch(prompts, texts):
    wishes = [(None, 0, 1, 3)[index % 4] for index in range(len(prompts))]
    params = [GREEDY.clone() for _ in wishes]
    for own, wish in zip(params, wishes, strict=True):
        own.extra_args = None if wish is None else {"num_speculative_tokens": wish}
    engine = pair.engine("same")
    outputs = generate(engine, prompts, params)
    assert tokens_of(outputs) == texts
    for wish, output in zip(wishes, outputs, strict=True):
        metrics = output.outputs[0].spec_decode_metrics
        if wish == 0:
            assert metrics is None
        else:
            # Every draft is accepted. The last round of a text may have fewer drafts.
            assert metrics is not None
            assert metrics.acceptance_rate == 1.0
            most = (3 if wish is None else wish) + 1
            assert metrics.mean_acceptance_length == pytest.approx(most, rel=0.05)


@functools.cache
def hundred() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts without near ties, and their greedy texts."""
    prompts = pair.prompts(130, seed=5)
    said = tokens_of(generate(pair.plain_engine(), prompts, GREEDY))
    clear = [
        both
        for both in zip(prompts, said, strict=True)
        if pair.greedy_margin(*both) > pair.MIN_MARGIN
    ]
    assert len(clear) >= 104, "too many near ties"
    return [prompt for prompt, _ in clear[:104]], [text for _, text in clear[:104]]


@functools.cache
def widest() -> LLMEngine:
    """Return an engine whose K is the maximum; requests set a smaller one."""
    return pair.own_engine(num_draft_tokens=8, max_num_seqs=8, num_pages=8 * 28)


@pytest.mark.long_suite(name="lossless")
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
def test_hundred_texts_with_every_draft_length(num_draft_tokens):
    """Run eight requests at a time, then one at a time, with the same executable."""
    prompts, texts = hundred()
    params = GREEDY.clone()
    params.extra_args = {"num_speculative_tokens": num_draft_tokens}
    engine = with_settings(widest())
    assert tokens_of(generate(engine, prompts, params)) == texts
    assert 0.3 < engine.stats.acceptance_rate < 0.9
    drafted = engine.stats.num_draft_tokens / engine.stats.num_draft_rounds
    assert num_draft_tokens - 1 < drafted <= num_draft_tokens
    alone = with_settings(engine)
    for prompt, text in zip(prompts[:8], texts, strict=False):
        assert tokens_of(generate(alone, [prompt], params)) == [text]
