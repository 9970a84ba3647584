"""A Gemma 3 pair: correct drafts are accepted, and texts equal plain decoding.

The models have eight layers with a period of six, one KV head, normalized query and key
heads, and scaled positions in global layers. `test_lossless.py` plays all proposers and
engine paths on the same pair.
"""

import functools
from typing import Any

import jax
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.sampling_params import SamplingParams
from tests.e2e import heads, pair, test_heads, test_pard
from tests.engines import (
    OneGreedyProgramRunner,
    generate,
    make_engine,
    tokens_of,
    with_draft,
    with_settings,
)

LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SETTINGS: dict[str, Any] = pair.settings(runner=OneGreedyProgramRunner)
# Sizes that eight devices divide; the one KV head is copied to each.
SPLIT: dict[str, Any] = dict(
    num_attention_heads=8, hidden_size=24, intermediate_size=32
)


@functools.cache
def prompts() -> list[list[int]]:
    """Return prompts of 1 to 72 tokens: up to three chunks and nine windows."""
    return pair.prompts(8, longest=72)


@functools.cache
def texts() -> list[list[int]]:
    """Return the texts of plain decoding, which HuggingFace's argmax confirms."""
    target = pair.target(pair.GEMMA3)
    said = tokens_of(generate(make_engine(target, **SETTINGS), prompts(), GREEDY))
    check_clear(said, target)
    return said


def check_clear(said: list[list[int]], target: Any) -> None:
    for both in zip(prompts(), said, strict=True):
        assert pair.greedy_margin(*both, model=target) > pair.MIN_MARGIN
    assert sum(len(set(tokens)) for tokens in said) > 8 * len(said)


def engine_of(draft: str, **options: Any) -> LLMEngine:
    return make_engine(
        pair.target(pair.GEMMA3),
        pair.draft(draft, pair.GEMMA3),
        num_draft_tokens=pair.NUM_DRAFT,
        **(SETTINGS | options),
    )


def test_draft_equal_to_target_is_accepted_whole():
    engine = engine_of("noisy")
    assert tokens_of(generate(engine, prompts(), GREEDY)) == texts()
    assert 0.1 < engine.stats.acceptance_rate < 0.9
    same = with_draft(engine, pair.draft("same", pair.GEMMA3))
    assert tokens_of(generate(same, prompts(), GREEDY)) == texts()
    assert same.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("draft_shards", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_eight_devices_equal_plain_decoding_on_one(draft_shards):
    """KV heads are copied to every device, norms of heads replicated."""
    target = pair.make_model(2, family=pair.GEMMA3, **SPLIT)
    draft = pair.add_noise(pair.make_model(2, family=pair.GEMMA3, **SPLIT))
    plain = make_engine(target, **SETTINGS)
    expected = tokens_of(generate(plain, prompts(), GREEDY))
    check_clear(expected, target)
    engine = make_engine(
        target,
        draft,
        num_draft_tokens=pair.NUM_DRAFT,
        tensor_parallel_size=8,
        draft_tensor_parallel_size=draft_shards,
        **SETTINGS,
    )
    (pages, *_) = engine.runner.state.target_pages
    assert isinstance(pages, jax.Array)
    assert pages.shape[2] == 8 * 2 and pages.addressable_shards[0].data.shape[2] == 2
    norms = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(engine.runner.params)
        if "q_norm" in jax.tree_util.keystr(path)
        or "k_norm" in jax.tree_util.keystr(path)
    ]
    assert len(norms) == 2 * 2 * 8
    for norm in norms:
        assert norm.sharding.is_fully_replicated
    assert tokens_of(generate(engine, prompts(), GREEDY)) == expected
    assert 0.1 < engine.stats.acceptance_rate < 0.9
    same = with_draft(engine, target)
    assert tokens_of(generate(same, prompts(), GREEDY)) == expected
    assert same.stats.acceptance_rate == 1.0


def with_told_drafts(engine: LLMEngine) -> LLMEngine:
    """Compile the engine's program so that it records its drafts."""
    engine.runner.cache = ProgramCache(None)
    with heads.told_drafts():
        generate(engine, [[5, 6, 7]], GREEDY)
    heads.heard()
    return with_settings(engine)


@pytest.mark.battery(name="lossless")
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_heads_read_the_hidden_states_of_gemma_3(kind):
    """Drafts of a random head are those of the trainer's passes over whole texts."""
    changes = dict(target_layers=(1, 5, 7)) if kind == "eagle3" else {}
    engine = heads.make_head_engine(
        kind,
        config=heads.config_of(kind, **changes),
        target=pair.GEMMA3,
        **SETTINGS,
    )
    engine = with_told_drafts(engine)
    assert tokens_of(generate(engine, prompts(), GREEDY)) == texts()
    heads.heard()
    for prompt in ([7], prompts()[-1]):
        (text,) = tokens_of(generate(with_settings(engine), [prompt], GREEDY))
        assert test_heads.check_drafts(engine, prompt, text) > 20


@pytest.mark.battery(name="lossless")
def test_pard_drafts_equal_huggingface():
    engine = with_told_drafts(engine_of("noisy", mask_token_id=test_pard.MASK))
    assert tokens_of(generate(engine, prompts(), GREEDY)) == texts()
    assert 0 < engine.stats.acceptance_rate < 1
    heads.heard()
    for prompt in ([7], prompts()[-1]):
        (text,) = tokens_of(generate(with_settings(engine), [prompt], GREEDY))
        draft = pair.draft("noisy", pair.GEMMA3)
        assert test_pard.check_drafts(prompt, text, draft=draft) > 20
