"""Drafts looked up in the sequence itself, alone and before the model's, lose nothing.

Equality is with plain decoding, whose texts the other tests compare with HuggingFace.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.config import speculation
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from tests.e2e import pair
from tests.e2e.test_distribution import CONTROLS as LAW_CONTROLS
from tests.e2e.test_distribution import LENGTH as LAW_LENGTH
from tests.e2e.test_distribution import VOCAB, check_law, laws_of, levels_after, sample
from tests.e2e.test_seeded import CONTROLS
from tests.engines import (
    OneProgramRunner,
    OneShapeRunner,
    generate,
    make_draft_of,
    make_engine,
    make_micro,
    tokens_of,
    with_draft,
    with_settings,
)
from tests.oracles import make_hf_model

slow = functools.partial(pytest.param, marks=pytest.mark.slow)

LENGTH = 64
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
LOOKUP = (3, 1)
# What is done where nothing is found is the same for both ways to look.
KINDS = ("ngram", "ngram+noisy", "ngram+same", "suffix", slow("suffix+noisy"))
# Rounds of suffix drafts have three forms: without, of few, and of so many.
NUM_SUFFIX = 16
# A random model with tied embeddings says its last token again and again.
PARROT_PROMPTS = [[5, 6, 7], [9, 8, 3, 4] * 4, [11] * 9, [20, 21]]


@functools.cache
def first_engine(kind: str) -> LLMEngine:
    if kind == "ngram+same":
        return with_draft(first_engine("ngram+noisy"), pair.draft("same"))
    draft = pair.draft("noisy") if kind.endswith("+noisy") else None
    return make_lookup_engine(pair.target(), draft, is_suffix=kind.startswith("suffix"))


def make_lookup_engine(
    target: Any, draft: Any = None, *, is_suffix: bool = False
) -> LLMEngine:
    alone = is_suffix and draft is None
    return make_engine(
        target,
        draft,
        num_draft_tokens=NUM_SUFFIX if alone else pair.NUM_DRAFT,
        lookup=None if is_suffix else LOOKUP,
        suffix={"max_tree_depth": 2 * NUM_SUFFIX} if is_suffix else None,
        # A draft model beside it must keep up with programs that do not run it.
        runner=OneProgramRunner if draft is None else OneShapeRunner,
        **pair.SETTINGS,
    )


@functools.cache
def parrots(kind: str) -> tuple[LLMEngine, LLMEngine]:
    """Plain decoding and lookups, in the programs of the other tests."""
    target = make_hf_model(seed=2, **pair.SIZES)
    engine = make_lookup_engine(target, is_suffix=kind == "suffix")
    return make_engine(target, has_one_shape=True, **pair.SETTINGS), engine


def lookup_engine(kind: str, **changes: Any) -> LLMEngine:
    """A fresh engine over shared executables."""
    return with_settings(first_engine(kind), **changes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


def make_prompts() -> list[list[int]]:
    """Random ones, and ones that repeat themselves."""
    random = pair.prompts(8)
    return random + [(prompt * 40)[:40] for prompt in pair.prompts(8, longest=15)]


@functools.cache
def played(kind: str) -> tuple[LLMEngine, list[RequestOutput], list[Any]]:
    """An engine that has said every greedy text, what it said, and its rounds."""
    engine = lookup_engine(kind)
    with pair.recorded(engine) as rounds:
        outputs = generate(engine, make_prompts(), GREEDY)
    return engine, outputs, rounds


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    return tokens_of(generate(pair.plain_engine(), prompts, GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_the_same(kind, texts):
    engine, outputs, rounds = played(kind)
    assert tokens_of(outputs) == texts
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    decoding = [result for plan, _, result in rounds if plan.decode]
    found = [int(result.num_draft.max()) for result in decoding]
    if "+" not in kind:
        assert {0, engine.config.num_draft_tokens} <= set(found), "one form only"
        assert kind == "ngram" or {2, 3, 4} <= set(found), "no narrow form"
        neither = [
            0 in result.num_draft[:2] and any(result.num_draft) for result in decoding
        ]
        assert any(neither), "no batch in which only one of two matches"
    else:
        # The model drafts where nothing is found; only last rounds have no room.
        assert found.count(0) < 0.1 * len(found)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_parrot_is_read_from_its_own_lips(kind):
    plain, engine = map(with_settings, parrots(kind))
    texts = tokens_of(generate(plain, PARROT_PROMPTS, GREEDY))
    assert tokens_of(generate(engine, PARROT_PROMPTS, GREEDY)) == texts
    assert engine.stats.acceptance_rate > 0.5
    assert engine.stats.num_rounds < 0.7 * plain.stats.num_rounds


def test_every_draft_of_the_same_model_is_right_where_nothing_is_found():
    """Fed what was looked up, the draft model keeps its keys in step."""
    engine, *_ = played("ngram+same")
    # The lookup alone is wrong more often: the model's drafts make up for it.
    alone, *_ = played("ngram")
    assert engine.stats.num_rounds < alone.stats.num_rounds


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_of_what_was_drafted(kind):
    engine, outputs, rounds = played(kind)
    drafted = sum(
        int(result.num_draft[index])
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
            assert result.num_accepted[index] <= result.num_draft[index] <= wanted


@pytest.mark.parametrize("kind", ["ngram", slow("suffix")])
def test_a_requests_own_number_of_drafts(kind, prompts, texts):
    wishes = [(0, 1, 2, None)[index % 4] for index in range(len(prompts))]
    params = []
    for wish in wishes:
        extra = None if wish is None else {"num_speculative_tokens": wish}
        params.append(
            SamplingParams(
                temperature=0, max_tokens=LENGTH, ignore_eos=True, extra_args=extra
            )
        )
    engine = lookup_engine(kind)
    outputs = generate(engine, prompts, params)
    assert tokens_of(outputs) == texts
    for wish, output in zip(wishes, outputs, strict=True):
        metrics = output.outputs[0].spec_decode_metrics
        if wish == 0:
            assert metrics is None
        elif wish is not None:
            assert metrics is not None
            assert not any(metrics.histogram[wish + 1 :])


@pytest.mark.parametrize("kind", [slow("ngram"), "ngram+noisy", slow("suffix")])
def test_drafting_stops_in_a_crowd_and_comes_back(kind, prompts, texts):
    """Without a draft model there is nothing to catch up with."""
    engine = lookup_engine(kind, disable_by_batch_size=2)
    with pair.recorded(engine) as rounds:
        assert tokens_of(generate(engine, prompts, GREEDY)) == texts
    drafts = {shape.num_draft_tokens for plan, shape, _ in rounds if plan.decode}
    assert drafts == {0, engine.config.num_draft_tokens}
    has_caught_up = any(shape.is_catch_up for _, shape, _ in rounds)
    assert has_caught_up == ("+" in kind)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        slow("ngram", "standard"),
        slow("ngram", "block"),
        slow("ngram+noisy", "standard"),
        ("ngram+noisy", "block"),
        slow("suffix", "block"),
        slow("suffix", "standard"),
        slow("suffix+noisy", "block"),
    ],
)
def test_seeded_texts_are_the_same(kind, rule, prompts):
    params = [
        SamplingParams(
            seed=number,
            max_tokens=32,
            ignore_eos=True,
            **CONTROLS[number % len(CONTROLS)],
        )
        for number in range(len(prompts))
    ]
    expected = tokens_of(generate(pair.plain_engine(), prompts, params))
    engine = lookup_engine(kind, rejection_sample_method=rule)
    assert tokens_of(generate(engine, prompts, params)) == expected
    # Drawn texts seldom say two tokens twice, which suffix drafts want.
    assert engine.stats.num_accepted_tokens > (1 if kind == "suffix" else 10)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_ends_within_runs_of_drafts(kind):
    """A parrot's end token, and lengths that cut a run at every place."""
    plain, engine = map(with_settings, parrots(kind))
    params = [
        SamplingParams(temperature=0, max_tokens=8 + index, ignore_eos=True)
        for index in range(8)
    ]
    prompts = PARROT_PROMPTS * 2
    expected = tokens_of(generate(plain, prompts, params))
    assert tokens_of(generate(engine, prompts, params)) == expected
    longest = pair.SETTINGS["max_model_len"]
    full = [(prompt * longest)[: longest - 20] for prompt in PARROT_PROMPTS]
    until = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    expected = tokens_of(generate(plain, full, until))
    assert [len(tokens) for tokens in expected] == [20] * len(full)
    assert tokens_of(generate(engine, full, until)) == expected


# Repeats itself, so that the next token is looked up at once.
LAW_PROMPT = [2, 7, 3, 11, 5, 7, 3, 11, 9, 7, 3]


@pytest.fixture(scope="module")
def micro() -> Any:
    return make_micro(seed=3)


@pytest.fixture(scope="module")
def levels(micro) -> list[np.ndarray]:
    return levels_after(micro, LAW_PROMPT)


def law_engine(micro: Any, kind: str) -> LLMEngine:
    is_suffix = kind.startswith("suffix")
    return make_engine(
        micro,
        make_draft_of(micro, num_layers=2) if "+" in kind else None,
        num_draft_tokens=3,
        lookup=None if is_suffix else (2, 1),
        suffix={"max_spec_factor": 2.0} if is_suffix else None,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_pages=1024,
        max_model_len=32,
        has_one_shape=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "ngram+model", "suffix", "suffix+model"])
def test_every_position_follows_the_target(kind, micro, levels, monkeypatch):
    monkeypatch.setattr(speculation, "LONG_MATCH", 1)  # the prompt repeats few tokens
    engine = law_engine(micro, kind)
    for rule in ("standard", "block", "seeded"):
        drawn = sample(engine, rule, 700, prompt=LAW_PROMPT)
        for controls, tokens in zip(LAW_CONTROLS, drawn, strict=True):
            assert tokens.shape[1] == LAW_LENGTH
            assert tokens.max() < VOCAB
            check_law(tokens, laws_of(levels, controls), (rule, controls))
