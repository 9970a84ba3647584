"""A PARD model predicts all drafts in one pass, from the text and mask tokens.

The expected drafts are those of HuggingFace's model on whole texts followed by masks.
With forced acceptance, rounds have any length, so that the next round would read wrong
keys if those of masks and rejected drafts were not replaced. Properties of all
proposers are in `tests/conformance`.
"""

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
from tests.support.heads import Round
from tests.support.oracles import hf_logits

NUM_DRAFT, LENGTH = pair.NUM_DRAFT, 32
GEMMA3 = "draft model, Gemma 3"


def greedy(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return SamplingParams(**values | changes)


def wanting(count: int) -> SamplingParams:
    return greedy(extra_args={"num_speculative_tokens": count})


def check_drafts(rounds: list[Round], *, draft: Any = None) -> None:
    """Compare the drafts of a text with HuggingFace's.

    Args:
        draft: HuggingFace's draft model; by default that of the pair.
    """
    draft = draft or pair.draft("noisy")
    for known, drafts in rounds:
        tokens = np.array(known + [MASK] * (NUM_DRAFT - 1))
        logits = hf_logits(draft, tokens)[len(known) - 1 :]
        for place, token in enumerate(drafts):
            assert logits[place, token] > logits[place].max() - 1e-4, (known, place)
    assert sum(len(drafts) for _, drafts in rounds) > 5


def check_all_drafts(engine: LLMEngine, **options: Any) -> None:
    """Check drafts after prompts of one token to several chunks, and any rounds."""
    lengths = set()
    for prompt in ([7], pair.prompts(10, longest=70)[-1], list(range(3, 36)) * 2):
        _, rounds = heads.forced_rounds(with_settings(engine), prompt, greedy())
        lengths |= {len(drafts) for _, drafts in rounds}
        check_drafts(rounds, **options)
    assert lengths == set(range(NUM_DRAFT + 1))


def test_drafts_equal_huggingface_after_rounds_of_any_length():
    check_all_drafts(proposers.forced_engine("pard"))


def test_cached_pages_hold_no_keys_of_masks_or_rejected_drafts():
    """The cached keys equal those recomputed from the text."""
    engine = with_settings(proposers.forced_engine("pard"))
    size, tails = engine.config.page_size, [[4, 4], [21, 30, 4], [4, 44]]
    known: list[int] = []
    for tail in tails:
        prompt = (known or STEM) + tail
        output, rounds = heads.forced_rounds(engine, prompt, greedy(max_tokens=13))
        # The last token of the text has no keys in the cache yet.
        cached = (len(known) - 1) // size * size if known else 0
        assert output.num_cached_tokens == cached
        check_drafts(rounds)
        known = prompt + list(output.outputs[0].token_ids)
    engine.scheduler.check_idle()


def test_request_without_drafts_leaves_no_draft_keys():
    """A request with prefix hits on its pages then runs the draft prefill again."""
    engine = with_settings(proposers.forced_engine("pard"))
    params = [wanting(0), wanting(NUM_DRAFT)]
    # The text is so short that one round with drafts would have computed all its keys.
    first, _ = generate(engine, [STEM[:2], claims.prompts()[3]], params)
    prompt = STEM[:2] + list(first.outputs[0].token_ids) + [9]
    output, rounds = heads.forced_rounds(engine, prompt, greedy(max_tokens=14))
    assert (output.num_cached_tokens or 0) > len(STEM)
    check_drafts(rounds)


@pytest.mark.long_suite(name="lossless")
def test_drafts_for_gemma_3_equal_huggingface():
    settings = dict(mask_token_id=MASK, runner=OneGreedyProgramRunner)
    engine = proposers.make(GEMMA3, **settings)
    params = claims.mixed_params(len(claims.prompts()), is_greedy=True)
    texts = claims.plain_texts(pair.GEMMA3, is_greedy=True)
    assert tokens_of(generate(engine, claims.prompts(), params)) == texts
    assert 0 < engine.stats.acceptance_rate < 1
    forced = proposers.make(GEMMA3, **settings | heads.FORCED)
    check_all_drafts(forced, draft=pair.draft("noisy", pair.GEMMA3))
