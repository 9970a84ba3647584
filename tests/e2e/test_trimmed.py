"""A draft that proposes some tokens only: texts stay the target's, whichever those.

What it cannot say comes in every text here, so that rounds end there again and again.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.engine import loader
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.engine.program_cache import ProgramCache
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.sharding import make_mesh
from tests.e2e import heads, pair, test_quantized
from tests.e2e.lossless import TREE
from tests.e2e.pair import KEPT
from tests.e2e.test_distribution import (
    FEWER,
    PROMPT,
    acceptance_of,
    check_law,
    laws_of,
    levels_after,
    make_law_engine,
    sample,
)
from tests.engines import (
    FIRST_CHARACTER,
    OneProgramRunner,
    OneShapeRunner,
    QuickGreedyRunner,
    generate,
    make_engine,
    make_micro,
    tokens_of,
    with_settings,
)
from tests.oracles import hf_logits

LENGTH = 32
SETTINGS: dict[str, Any] = pair.settings(num_draft_tokens=pair.NUM_DRAFT, kept=KEPT)
# Of 16, for the small models of `tests.e2e.test_distribution`.
MICRO_KEPT = [1, 3, 4, 5, 8, 9, 11, 14]


def trimmed_engine(**options: Any) -> LLMEngine:
    return make_engine(pair.target(), pair.draft("noisy"), **(SETTINGS | options))


@functools.cache
def shaped_engine() -> LLMEngine:
    return trimmed_engine(runner=OneProgramRunner)


@functools.cache
def prompts() -> list[list[int]]:
    return pair.prompts(10, longest=50)


def params_of(count: int, **changes: Any) -> list[SamplingParams]:
    """Greedy and seeded requests in turn."""
    both: dict[str, Any] = dict(max_tokens=LENGTH, ignore_eos=True) | changes
    return [
        SamplingParams(temperature=0.9, seed=index, **both)
        if index % 2
        else SamplingParams(temperature=0, **both)
        for index in range(count)
    ]


def check_texts(engine: LLMEngine, **changes: Any) -> list[list[int]]:
    """Equal to plain decoding's, with drafts that stay and drafts that do not."""
    params = params_of(len(prompts()), **changes)
    plain = with_settings(pair.plain_engine())
    expected = tokens_of(generate(plain, prompts(), params))
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert 0 < engine.stats.acceptance_rate < 1
    engine.scheduler.check_idle()
    return expected


def test_no_text_changes_and_no_draft_is_of_what_was_cut():
    """And each draft is the best, to HuggingFace's draft, of what was kept."""
    engine = trimmed_engine(runner=OneProgramRunner)
    engine.runner.cache = ProgramCache(None)
    with heads.told_drafts():
        texts = check_texts(engine)
    said = {token for text in texts for token in text}
    assert said - set(KEPT), "the texts need nothing that was cut"
    told = heads.heard()
    drafted = {token for _, _, drafts in told for token in drafts}
    assert drafted <= set(KEPT) and len(drafted) > len(KEPT) // 2
    prompt = prompts()[0]
    (text,) = tokens_of(generate(with_settings(engine), [prompt], params_of(1)))
    whole, cut = prompt + text, np.setdiff1d(np.arange(64), KEPT)
    count = 0
    for _, known, drafts in heads.heard():
        if known > len(whole) or not drafts:
            continue
        tokens = np.array(whole[:known] + drafts[:-1])
        logits = hf_logits(pair.draft("noisy"), tokens)[known - 1 :]
        logits[:, cut] = -np.inf
        for row, token in zip(logits, drafts, strict=True):
            assert row[token] > row.max() - 1e-4
            count += 1
    assert count > 20


def test_a_target_that_drafts_for_itself_is_accepted_where_all_was_kept():
    """Whole where the text needs nothing else; up to what was cut elsewhere."""
    plain = with_settings(pair.plain_engine())
    params = [one for one in params_of(10) if not one.temperature]
    some = prompts()[: len(params)]
    texts = tokens_of(generate(plain, some, params))
    said = sorted({token for text in texts for token in text})
    assert len(said) < 60
    options: dict[str, Any] = SETTINGS | dict(kept=said, has_one_shape=True)
    engine = make_engine(pair.target(), pair.draft("same"), **options)
    assert tokens_of(generate(engine, some, params)) == texts
    assert engine.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(scan_layers=True), id="scanned"),
        pytest.param(dict(lookup=(3, 1)), id="ngram"),
        pytest.param(dict(tree=TREE, num_draft_tokens=9), id="tree"),
        pytest.param(
            dict(tree=TREE, num_draft_tokens=9, runner=OneShapeRunner),
            id="tree in several programs",
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(num_side_leaves=2), id="side leaves", marks=pytest.mark.slow),
        pytest.param(
            dict(mask_token_id=0, rule="block"), id="pard", marks=pytest.mark.slow
        ),
        pytest.param(
            # Several rounds are of programs without prompts.
            dict(controller="adaptive", num_scheduler_steps=4, runner=OneShapeRunner),
            id="adaptive",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_form_of_rounds_changes_a_text(options):
    check_texts(trimmed_engine(**(dict(runner=OneProgramRunner) | options)))


def characters(ids: list[int]) -> str:
    escaped = (f"\\x{FIRST_CHARACTER + token:02x}" for token in ids)
    return f"[{''.join(escaped)}]"


CUT = [token for token in range(4, 64) if token not in KEPT]


@pytest.mark.parametrize(
    "asked",
    [
        # The draft has none of what is allowed, at the first place or at all.
        dict(
            structured_outputs=StructuredOutputsParams(
                regex=f"{characters(CUT[:6])}{characters(KEPT[2:])}{{4,40}}"
            )
        ),
        dict(
            structured_outputs=StructuredOutputsParams(
                regex=f"{characters(CUT[:9])}{{12}}"
            )
        ),
        pytest.param(dict(allowed_token_ids=CUT), marks=pytest.mark.slow),
        pytest.param(
            dict(presence_penalty=0.5, repetition_penalty=1.3, min_p=0.02),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(logit_bias={CUT[3]: 50.0}), marks=pytest.mark.slow),
        pytest.param(dict(top_k=3, logprobs=2), marks=pytest.mark.slow),
    ],
    ids=["first", "none", "allowed", "penalties", "bias", "top-k"],
)
def test_what_requests_ask_of_tokens_holds(asked):
    engine = with_settings(shaped_engine())
    params = params_of(len(prompts()), **(dict(ignore_eos=False) | asked))
    found = generate(engine, prompts(), params)
    expected = generate(with_settings(pair.plain_engine()), prompts(), params)
    assert tokens_of(found) == tokens_of(expected)
    assert engine.stats.num_draft_tokens > 20
    engine.scheduler.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize("draft_devices", [8, 2])
def test_eight_devices_say_the_same(draft_devices):
    check_devices(8, draft_devices)


def test_two_devices_say_the_same():
    check_devices(2, 2)


def check_devices(devices: int, draft_devices: int) -> None:
    sizes: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4)
    model = make_micro(seed=3, **sizes)
    some, params = [[2, 7, 3, 11, 5], [4] * 9, [13, 2]], params_of(3, max_tokens=16)
    plain = make_engine(model, runner=OneProgramRunner)
    expected = tokens_of(generate(plain, some, params))
    engine = make_engine(
        model,
        make_micro(seed=3, **sizes),
        num_draft_tokens=pair.NUM_DRAFT,
        kept=MICRO_KEPT,
        runner=OneProgramRunner,
        tensor_parallel_size=devices,
        draft_tensor_parallel_size=draft_devices,
    )
    assert make_mesh(devices, draft_devices) == engine.runner.mesh
    assert tokens_of(generate(engine, some, params)) == expected
    assert engine.stats.num_accepted_tokens > 0


@functools.cache
def law_engine() -> LLMEngine:
    return make_law_engine(make_micro(seed=3), kept=MICRO_KEPT)


@functools.cache
def levels() -> list[np.ndarray]:
    return levels_after(make_micro(seed=3), PROMPT, 4)


@pytest.mark.parametrize(
    "rule",
    [
        "block",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("standard", "seeded")),
    ],
)
def test_every_position_follows_the_target(rule):
    """Also with tokens that the draft never says: half of them."""
    counted = sample(law_engine(), rule, 700, every=FEWER, length=4)
    for controls, tokens in zip(FEWER, counted, strict=True):
        assert not np.isin(tokens[:, 0], MICRO_KEPT).all()
        check_law(tokens, laws_of(levels(), controls), ("trimmed", rule, controls))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block", "seeded", "greedy"])
def test_acceptance_is_less_than_of_the_whole_head_and_not_none(rule):
    assert 0.1 < acceptance_of(law_engine(), rule) < 0.9


@pytest.mark.slow
def test_bfloat16_says_the_same_with_and_without():
    plain = make_engine(pair.target(), dtype="bfloat16", **pair.SETTINGS)
    engine = trimmed_engine(dtype="bfloat16")
    params = params_of(len(prompts()))
    expected = tokens_of(generate(plain, prompts(), params))
    assert tokens_of(generate(engine, prompts(), params)) == expected
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "has_embedding"),
    [
        ("int8", True),
        pytest.param("int4", False, marks=pytest.mark.slow),
        pytest.param("int4", True, marks=pytest.mark.slow),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
def test_the_bundled_draft_says_the_same_with_a_quarter_of_its_head(
    kind, has_embedding
):
    """By the map in its folder, quantized or not; and it loses few drafts."""
    whole, trimmed = test_quantized.drafts(kind), test_quantized.drafts(kind)
    trimmed["speculative_config"]["draft_vocab_size"] = 2048
    options: dict[str, Any] = dict(quantize_embedding=has_embedding)
    said, rate = test_quantized.texts(**trimmed, **options)
    assert said == test_quantized.plain()
    before, whole_rate = test_quantized.texts(**whole, **options)
    assert said == before
    assert whole_rate - 0.08 < rate < 1


def test_a_trimmed_head_is_there_again_after_a_sleep():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "Runner", QuickGreedyRunner)
        config = {"model": BUNDLED_DRAFT, "draft_vocab_size": 2048}
        llm = LLM(
            BUNDLED_TARGET,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            speculative_config=config | {"num_speculative_tokens": 2},
        )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for level in (None, 1, 2):
        if level is not None:
            llm.sleep(level=level)
            llm.wake_up()
        (output,) = llm.generate(["The quick brown fox"], params, use_tqdm=False)
        counts = llm.llm_engine.stats
        found.append((output.outputs[0].token_ids, counts.num_accepted_tokens))
    assert found[0][0] == found[1][0] == found[2][0]
    first = found[0][1]
    assert [accepted for _, accepted in found] == [first, 2 * first, 3 * first]
