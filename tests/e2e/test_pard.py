"""A draft model makes all drafts in one pass: texts stay, and each draft is its own.

What the model says of whole texts with masks behind them is HuggingFace's: without
pages, launches and rounds. Where rounds end anywhere, by acceptance that is given,
what was fed in the places of masks and drafts is all that the next round goes by.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.sharding import make_mesh
from tests.e2e import heads, pair
from tests.e2e.test_distribution import (
    FEWER,
    check_law,
    laws_of,
    levels_after,
    make_law_engine,
    sample,
)
from tests.e2e.test_distribution import PROMPT as LAW_PROMPT
from tests.engines import (
    OneProgramRunner,
    generate,
    make_engine,
    make_micro,
    tokens_of,
    with_settings,
)
from tests.oracles import hf_logits

NUM_DRAFT, MASK, LENGTH = 3, 0, 32
SETTINGS: dict[str, Any] = pair.settings(
    num_draft_tokens=NUM_DRAFT, mask_token_id=MASK, rule="block"
)
# Vocabulary of the small models of `tests.e2e.test_distribution`.
MICRO_MASK = 15


def told_engine(**options: Any) -> LLMEngine:
    """Of one program, which tells its drafts, and so is not kept."""
    engine = make_engine(
        pair.target(),
        pair.draft("noisy"),
        runner=OneProgramRunner,
        **(SETTINGS | options),
    )
    engine.runner.cache = ProgramCache(None)
    with heads.told_drafts():
        generate(engine, [[5, 6, 7]], greedy(max_tokens=6))
    heads.heard()
    return engine


@functools.cache
def first_engine() -> LLMEngine:
    return told_engine()


@functools.cache
def forced_engine() -> LLMEngine:
    """Rounds of every length, whatever the target says."""
    return told_engine(rule="synthetic", acceptance_rates=(0.9, 0.75, 0.6))


def greedy(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = dict(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return SamplingParams(**values | changes)


def wanting(count: int, params: SamplingParams) -> SamplingParams:
    own = params.clone()
    own.extra_args = {"num_speculative_tokens": count}
    return own


@functools.cache
def prompts() -> list[list[int]]:
    """Of a token to more than a chunk."""
    return pair.prompts(10, longest=70)


def params_of(count: int) -> list[SamplingParams]:
    """Greedy and seeded requests in turn, which want three drafts or fewer."""
    seeded: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True, temperature=0.8)
    return [
        wanting(
            (3, 3, 1, 0)[index % 4],
            greedy() if index % 2 else SamplingParams(seed=index, top_p=0.9, **seeded),
        )
        for index in range(count)
    ]


def check_drafts(prompt: list[int], text: list[int], *, draft: Any = None) -> int:
    """Every draft of one request is the model's, given the text and masks alone.

    Args:
        draft: HuggingFace's draft model, if not the pair's.

    Returns:
        How many have been looked at.
    """
    whole, count = prompt + text, 0
    draft = draft or pair.draft("noisy")
    for _, known, drafts in heads.heard():
        if known > len(whole):
            continue
        tokens = np.array(whole[:known] + [MASK] * (NUM_DRAFT - 1))
        logits = hf_logits(draft, tokens)[known - 1 :]
        for place, token in enumerate(drafts):
            assert logits[place, token] > logits[place].max() - 1e-4, (known, place)
        count += len(drafts)
    return count


def test_texts_are_those_of_plain_decoding():
    """In batches and chunk by chunk; some want fewer drafts than others, or none."""
    engine, params = with_settings(first_engine()), params_of(len(prompts()))
    expected = tokens_of(generate(pair.plain_engine(), prompts(), params))
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert engine.stats.num_draft_tokens > 100
    assert 0 < engine.stats.acceptance_rate < 1
    engine.scheduler.check_idle()
    heads.heard()


def test_drafts_are_the_models_after_rounds_of_any_length():
    """After prompts of a token to several chunks, over windows and pages."""
    lengths = set()
    for prompt in ([7], prompts()[-1], list(range(3, 36)) * 2):
        engine = with_settings(forced_engine())
        with pair.recorded(engine) as rounds:
            (text,) = tokens_of(generate(engine, [prompt], greedy()))
        lengths |= {int(one.num_emitted[0]) for plan, _, one in rounds if plan.decode}
        assert check_drafts(prompt, text) > 20
    assert lengths >= set(range(1, NUM_DRAFT + 2))


STEM = [5, 9, 33, 12, 8, 40, 7, 22, 19, 3, 50, 31, 6, 17, 60, 25]


def test_cached_pages_hold_no_masks():
    """Nor drafts that were rejected; and what is fed again is what was there."""
    engine = with_settings(forced_engine())
    size, tails = engine.config.page_size, [[4, 4], [21, 30, 4], [4, 44]]
    known: list[list[int]] = []
    for tail in tails:
        prompt = (known[-1] if known else STEM) + tail
        (output,) = generate(engine, [prompt], greedy(max_tokens=13))
        text = list(output.outputs[0].token_ids)
        # The last of what is known has been fed to nobody.
        cached = (len(known[-1]) - 1) // size * size if known else 0
        assert output.num_cached_tokens == cached
        assert check_drafts(prompt, text) > 5
        known.append(prompt + text)
    engine.scheduler.check_idle()


def test_a_request_that_wants_no_drafts_leaves_none_behind():
    """Its pages lack the draft model's part, and whoever finds them is told so."""
    engine = with_settings(first_engine())
    params = [wanting(0, greedy()), wanting(NUM_DRAFT, greedy())]
    # So short that its tokens would have been fed.
    first, _ = generate(engine, [STEM[:2], prompts()[3]], params)
    heads.heard()
    prompt = STEM[:2] + list(first.outputs[0].token_ids) + [9]
    (output,) = generate(engine, [prompt], greedy(max_tokens=12))
    assert (output.num_cached_tokens or 0) > len(STEM)
    assert check_drafts(prompt, list(output.outputs[0].token_ids)) > 10


@pytest.mark.slow
def test_preemption_crowds_and_aborts_change_nothing():
    family = [STEM * 2 + prompt[:12] for prompt in prompts()]
    params = params_of(len(family))
    expected = tokens_of(generate(pair.plain_engine(), family, params))
    engine = with_settings(first_engine(), disable_by_batch_size=2)
    assert tokens_of(generate(engine, family, params)) == expected
    engine = with_settings(first_engine())
    engine = LLMEngine(
        replace(engine.config, num_pages=30),
        runner=engine.runner,
        tokenizer=engine.tokenizer,
    )
    engine.add_request("gone", STEM, greedy(max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.abort_request("gone")
    assert tokens_of(generate(engine, family, params)) == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hits > 0
    engine.scheduler.check_idle()
    heads.heard()


@functools.cache
def law_engine(**options: Any) -> LLMEngine:
    return make_law_engine(make_micro(seed=3), mask_token_id=MICRO_MASK, **options)


@functools.cache
def levels() -> list[np.ndarray]:
    return levels_after(make_micro(seed=3), LAW_PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("num_leaves", [0, 2])
@pytest.mark.parametrize("rule", ["standard", "block", "seeded"])
def test_every_position_follows_the_target(rule, num_leaves):
    """Whose drafts are independent of one another, given the text."""
    engine = law_engine(num_side_leaves=num_leaves)
    counted = sample(engine, rule, 700, every=FEWER)
    for controls, tokens in zip(FEWER, counted, strict=True):
        check_law(tokens, laws_of(levels(), controls), ("pard", rule, controls))


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        dict(num_side_leaves=2),
        dict(tree=TREE, num_draft_tokens=9),
        dict(controller="adaptive"),
        dict(num_scheduler_steps=4),
        dict(num_draft_tokens=16),
    ],
    ids=["leaves", "tree", "adaptive", "several", "most"],
)
def test_no_form_of_rounds_changes_a_text(shape):
    engine = make_engine(
        pair.target(),
        pair.draft("noisy"),
        has_one_shape=True,
        **(SETTINGS | dict(max_num_seqs=8, num_pages=160) | shape),
    )
    params = params_of(len(prompts()))
    expected = tokens_of(generate(pair.plain_engine(), prompts(), params))
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert engine.stats.num_draft_tokens > 0
    if "adaptive" not in shape.values():
        assert engine.stats.num_accepted_tokens > 0
    engine.scheduler.check_idle()


CONTROLLED: dict[str, dict[str, Any]] = {
    "penalties": dict(presence_penalty=0.5, repetition_penalty=1.3),
    "bad words": dict(bad_words=["K", "L M"]),
    "logprobs": dict(logprobs=2, prompt_logprobs=1),
    "stop": dict(stop=["KK", "A"], stop_token_ids=[45, 41]),
    "grammar": dict(
        structured_outputs=StructuredOutputsParams(regex="[A-Z]{4,40}"),
    ),
}


@functools.cache
def shaped_engine() -> LLMEngine:
    return make_engine(
        pair.target(), pair.draft("noisy"), has_one_shape=True, **SETTINGS
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLLED)
def test_what_requests_ask_of_tokens_holds(name):
    own: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True) | CONTROLLED[name]
    params = [
        SamplingParams(temperature=0, **own)
        if index % 2
        else SamplingParams(temperature=0.9, seed=index, **own)
        for index in range(len(prompts()))
    ]
    engine = with_settings(shaped_engine())
    found = generate(engine, prompts(), params)
    expected = generate(with_settings(pair.plain_engine()), prompts(), params)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.stats.num_draft_tokens > 20
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("draft_devices", [8, 2])
def test_eight_devices_say_the_same(draft_devices):
    sizes: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4)
    model = make_micro(seed=3, **sizes)
    some = [prompt[:9] for prompt in ([2, 7, 3, 11, 5], [4] * 9, [13, 2])]
    expected = tokens_of(generate(make_engine(model), some, greedy(max_tokens=16)))
    engine = make_engine(
        model,
        make_micro(seed=3, **sizes),
        num_draft_tokens=NUM_DRAFT,
        mask_token_id=MICRO_MASK,
        tensor_parallel_size=8,
        draft_tensor_parallel_size=draft_devices,
    )
    assert make_mesh(8, draft_devices) == engine.runner.mesh
    assert tokens_of(generate(engine, some, greedy(max_tokens=16))) == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.slow
def test_bfloat16_says_the_same_with_and_without():
    plain = make_engine(pair.target(), dtype="bfloat16", **pair.SETTINGS)
    engine = make_engine(
        pair.target(), pair.draft("noisy"), dtype="bfloat16", **SETTINGS
    )
    expected = tokens_of(generate(plain, prompts(), greedy()))
    assert tokens_of(generate(engine, prompts(), greedy())) == expected
    assert engine.stats.num_draft_tokens > 0
