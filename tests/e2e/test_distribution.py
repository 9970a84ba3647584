"""What a whole engine emits follows the target, at every position, by every rule.

Thousands of requests with one prompt, longer than the window, through paging, batching
and several rounds each; counts against probabilities from HuggingFace's float32 model.
"""

import copy
import functools
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
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
from tests.laws import check_counts, filtered_law

VOCAB, LENGTH, DRAFTS = 16, 5, 3
# Of most tests: a token fewer, and a sixteenth of the texts to enumerate.
SHORT = LENGTH - 1
PROMPT = [2, 7, 3, 11, 5, 14, 9, 4, 12, 6]
CONTROLS: list[dict[str, Any]] = [
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=9, top_p=0.85, min_p=0.02),
    dict(temperature=1.0),
]
FEWER = CONTROLS[:2]
RULES = ("standard", "block", "seeded")
# HuggingFace's name for keys and values, which is another since transformers 5.24.
OLD_CACHE, NEW_CACHE = "past_key_values", "cache"

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def target():
    return make_micro(seed=3)


def make_law_engine(
    target: Any, *, has_draft: bool = True, is_optimized: bool = False, **options: Any
) -> LLMEngine:
    """An engine that thousands of short requests are sent to.

    Args:
        has_draft: With a draft model, in place of a head among the options.
        options: More of `make_engine`'s.
    """
    return make_engine(
        target,
        make_draft_of(target, num_layers=2) if has_draft else None,
        num_draft_tokens=DRAFTS,
        max_num_seqs=64,
        max_num_batched_tokens=512,  # of the rows a third ends in a round
        num_pages=1024,
        max_model_len=32,
        # Nearly every round has prompts.
        runner=OneShapeRunner if is_optimized else OneProgramRunner,
        is_optimized=is_optimized,
        **options,
    )


@pytest.fixture(scope="module")
def engine(target) -> LLMEngine:
    """An engine whose executables all tests here share."""
    return make_law_engine(target)


@pytest.fixture(scope="module")
def fast_engine(target) -> LLMEngine:
    """For counts that take longer than the programs take to compile."""
    return make_law_engine(target, is_optimized=True)


@pytest.fixture(scope="module")
def next_logits(target) -> list[np.ndarray]:
    return levels_after(target, PROMPT, SHORT)


@pytest.fixture(scope="module")
def all_logits(target) -> list[np.ndarray]:
    return levels_after(target, PROMPT)


def levels_after(
    target: Any, prompt: list[int], length: int = LENGTH
) -> list[np.ndarray]:
    """Level l: logits after every continuation of l tokens, `[vocab^l, vocab]`."""
    known = inspect.signature(target.forward).parameters
    cache_name = NEW_CACHE if NEW_CACHE in known else OLD_CACHE
    levels = []
    with torch.no_grad():
        # All but the prompt's last token is run once.
        first = target(torch.tensor([prompt[:-1]]), use_cache=True)
        start = getattr(first, cache_name)
        for level in range(length):
            every = np.indices((VOCAB,) * level).reshape(level, VOCAB**level).T
            lasts = np.full((len(every), 1), prompt[-1])
            tokens = torch.tensor(np.concatenate([lasts, every], axis=1)).long()
            parts = []
            for part in tokens.split(8192):
                cache = copy.deepcopy(start)
                cache.batch_repeat_interleave(len(part))
                after = target(part, **{cache_name: cache}, logits_to_keep=1)
                parts.append(after.logits[:, -1].numpy())
            levels.append(np.concatenate(parts))
    return levels


def laws_of(next_logits: list[np.ndarray], controls: dict) -> list[np.ndarray]:
    """Law of the first l + 1 tokens for every l, `[vocab^(l+1)]`."""
    laws, law = [], np.ones(1)
    exact: dict[str, Any] = {
        name: value if name == "top_k" else np.float32(value)
        for name, value in controls.items()
    }
    for level in next_logits:
        law = (law[:, None] * filtered_law(level, **exact)).reshape(-1)
        laws.append(law)
    return laws


def sample(
    engine: LLMEngine,
    rule: str,
    count: int,
    *,
    prompt: list[int] = PROMPT,
    every: list[dict[str, Any]] = CONTROLS,
    length: int = LENGTH,
) -> list[np.ndarray]:
    """`count` texts for each of the controls, all in the same batches."""
    if rule == "seeded":
        engine = with_settings(engine)
    else:
        engine = with_settings(engine, seed=11, rejection_sample_method=rule)
    params = [
        SamplingParams(
            **controls,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=number if rule == "seeded" else None,
        )
        for number in range(count)
        for controls in every
    ]
    outputs = generate(engine, [prompt] * len(params), params)
    tokens = np.array(tokens_of(outputs))
    assert engine.stats.num_accepted_tokens
    return [tokens[index :: len(every)] for index in range(len(every))]


def check_law(tokens: np.ndarray, laws: list[np.ndarray], what: object) -> None:
    """Every position alone, and every pair of neighbours together."""
    for position in range(len(laws)):
        law = laws[position].reshape(-1, VOCAB).sum(axis=0)
        counts = np.bincount(tokens[:, position], minlength=VOCAB)
        check_counts(counts, law, (what, position))
    for position in range(1, len(laws)):
        pair = laws[position].reshape(-1, VOCAB**2).sum(axis=0)
        cell = tokens[:, position - 1] * VOCAB + tokens[:, position]
        counts = np.bincount(cell, minlength=VOCAB**2)
        check_counts(counts, pair, (what, position, "pair"))


@pytest.mark.parametrize("rule", RULES)
def test_every_position_follows_the_target(engine, next_logits, rule):
    counted = sample(engine, rule, 700, every=FEWER, length=SHORT)
    for controls, tokens in zip(FEWER, counted, strict=True):
        check_law(tokens, laws_of(next_logits, controls), (rule, controls))


@pytest.mark.battery(name="counts")
@pytest.mark.parametrize("rule", RULES)
def test_every_position_follows_the_target_closely(fast_engine, all_logits, rule):
    counted = sample(fast_engine, rule, 10_000)
    for controls, tokens in zip(CONTROLS, counted, strict=True):
        check_law(tokens, laws_of(all_logits, controls), (rule, controls))


def acceptance_of(engine: LLMEngine, rule: str, temperature: float = 1.0) -> float:
    if rule in ("standard", "block"):
        engine = with_settings(engine, rejection_sample_method=rule)
    else:
        engine = with_settings(engine)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB, 4 + i % 9).tolist() for i in range(128)]
    params = [
        SamplingParams(
            temperature=0.0 if rule == "greedy" else temperature,
            seed=number if rule == "seeded" else None,
            max_tokens=17,
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]
    generate(engine, prompts, params)
    assert engine.stats.num_draft_tokens > 1000
    return engine.stats.acceptance_rate


@pytest.mark.parametrize("rule", [slow("standard"), "block", slow("seeded")])
def test_adverse_draft_changes_the_speed_only(engine, target, next_logits, rule):
    """A draft that prefers what the target avoids."""
    adverse = with_draft(engine, make_draft_of(target, num_layers=2, sign=-1.0))
    assert acceptance_of(adverse, rule) < 0.5 * acceptance_of(engine, rule)
    counted = sample(adverse, rule, 700, every=FEWER, length=SHORT)
    for controls, tokens in zip(FEWER, counted, strict=True):
        check_law(tokens, laws_of(next_logits, controls), ("adverse", rule, controls))


@pytest.mark.parametrize(
    "rule",
    # Programs for greedy requests alone are those of tests/e2e/test_greedy_equality.py.
    [*RULES, slow("greedy")],
)
def test_target_as_its_own_draft_has_every_draft_accepted(engine, target, rule):
    assert acceptance_of(with_draft(engine, target), rule) == 1.0
