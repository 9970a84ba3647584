"""A PARD model predicts all drafts in one pass, from the text and mask tokens.

The expected drafts are those of HuggingFace's model on whole texts followed by masks.
With forced acceptance, rounds have any length, so that the next round would read wrong
keys if those of masks and rejected drafts were not replaced. Properties of all
proposers are in `tests/conformance`.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import SamplingParams
from tests.conformance import claims, proposers
from tests.conformance.claims import STEM
from tests.conformance.proposers import MASK
from tests.support import heads, pair
from tests.support.engines import (
    OneGreedyProgramRunner,
    generate,
    tokens_of,
    with_settings,
)
from tests.support.oracles import hf_logits

NUM_DRAFT, LENGTH = pair.NUM_DRAFT, 32
GEMMA3 = "draft model, Gemma 3"


@functools.cache
def forced_engine() -> LLMEngine:
    """Return an engine with forced acceptance, whose rounds have every length."""
    rates = (0.9, 0.75, 0.6)
    engine = proposers.make("pard", rule="synthetic", acceptance_rates=rates)
    return proposers.record_drafts(engine)


def greedy(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return SamplingParams(**values | changes)


def wanting(count: int) -> SamplingParams:
    return greedy(extra_args={"num_speculative_tokens": count})


def check_drafts(prompt: list[int], text: list[int], *, draft: Any = None) -> int:
    """Compare a request's drafts with HuggingFace's; return the number of drafts.

    Args:
        draft: HuggingFace's draft model; by default that of the pair.
    """
    whole, count = prompt + text, 0
    draft = draft or pair.draft("noisy")
    for _, known, drafts in heads.recorded_drafts():
        if known > len(whole):
            continue
        tokens = np.array(whole[:known] + [MASK] * (NUM_DRAFT - 1))
        logits = hf_logits(draft, tokens)[known - 1 :]
        for place, token in enumerate(drafts):
            assert logits[place, token] > logits[place].max() - 1e-4, (known, place)
        count += len(drafts)
    return count


def test_drafts_equal_huggingface_after_rounds_of_any_length():
    """Prompts have one token to several chunks, and texts cross windows and pages."""
    lengths = set()
    for prompt in ([7], pair.prompts(10, longest=70)[-1], list(range(3, 36)) * 2):
        engine = with_settings(forced_engine())
        with pair.recorded(engine) as rounds:
            (text,) = tokens_of(generate(engine, [prompt], greedy()))
        lengths |= {int(one.num_emitted[0]) for plan, _, one in rounds if plan.decode}
        assert check_drafts(prompt, text) > 20
    assert lengths >= set(range(1, NUM_DRAFT + 2))


def test_cached_pages_hold_no_keys_of_masks_or_rejected_drafts():
    """The cached keys equal those recomputed from the text."""
    engine = with_settings(forced_engine())
    size, tails = engine.config.page_size, [[4, 4], [21, 30, 4], [4, 44]]
    known: list[list[int]] = []
    for tail in tails:
        prompt = (known[-1] if known else STEM) + tail
        (output,) = generate(engine, [prompt], greedy(max_tokens=13))
        text = list(output.outputs[0].token_ids)
        # The last token of the text has no keys in the cache yet.
        cached = (len(known[-1]) - 1) // size * size if known else 0
        assert output.num_cached_tokens == cached
        assert check_drafts(prompt, text) > 5
        known.append(prompt + text)
    engine.scheduler.check_idle()


def test_request_without_drafts_leaves_no_draft_keys():
    """A request with prefix hits on its pages then runs the draft prefill again."""
    engine = with_settings(forced_engine())
    params = [wanting(0), wanting(NUM_DRAFT)]
    # The text is so short that one round with drafts would have computed all its keys.
    first, _ = generate(engine, [STEM[:2], claims.prompts()[3]], params)
    heads.recorded_drafts()
    prompt = STEM[:2] + list(first.outputs[0].token_ids) + [9]
    (output,) = generate(engine, [prompt], greedy(max_tokens=12))
    assert (output.num_cached_tokens or 0) > len(STEM)
    assert check_drafts(prompt, list(output.outputs[0].token_ids)) > 10


@pytest.mark.long_suite(name="lossless")
def test_drafts_for_gemma_3_equal_huggingface():
    settings = dict(mask_token_id=MASK, runner=OneGreedyProgramRunner)
    engine = proposers.record_drafts(proposers.make(GEMMA3, **settings))
    params = claims.mixed_params(len(claims.prompts()), is_greedy=True)
    texts = claims.plain_texts(pair.GEMMA3, is_greedy=True)
    assert tokens_of(generate(engine, claims.prompts(), params)) == texts
    assert 0 < engine.stats.acceptance_rate < 1
    heads.recorded_drafts()
    for prompt in ([7], pair.prompts(10, longest=70)[-1]):
        (text,) = tokens_of(generate(with_settings(engine), [prompt], greedy()))
        draft = pair.draft("noisy", pair.GEMMA3)
        assert check_drafts(prompt, text, draft=draft) > 20
