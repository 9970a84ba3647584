"""Quantized drafts change no text; a quantized target says its own, drafts or not.

On the bundled pair, whose drafts are often right, and as often wrong when rounded. That
what is sampled without a seed follows the target is counted, of a smaller pair.
"""

import functools
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.engine import loader
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.sampling_params import SamplingParams
from tests.e2e import pair
from tests.e2e.test_distribution import (
    FEWER,
    PROMPT,
    SHORT,
    acceptance_of,
    check_law,
    laws_of,
    levels_after,
    make_law_engine,
    sample,
)
from tests.engines import QuickRunner, make_micro

PROMPTS = [
    "<start_of_turn>user\nTell me a story about a fox.<end_of_turn>\n",
    "The quick brown fox",
    "def main():",
    "Tom has 3 apples and buys 4 more.",
]
# Greedy ones and seeded ones, which share a program.
PARAMS = [
    SamplingParams(
        max_tokens=64, ignore_eos=True, temperature=number % 2, seed=number or None
    )
    for number in range(len(PROMPTS))
]
NUM_DRAFTS = 3


def texts(**options: Any) -> tuple[list[list[int]], float]:
    """Token ids of every request, and how many drafts stayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "Runner", QuickRunner)
        llm = LLM(
            BUNDLED_TARGET,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            **options,
        )
        made = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        rate = llm.llm_engine.stats.acceptance_rate
    return [list(one.outputs[0].token_ids) for one in made], rate


def drafts(kind: str | None) -> dict[str, Any]:
    return dict(
        speculative_config={
            "model": BUNDLED_DRAFT,
            "num_speculative_tokens": NUM_DRAFTS,
            "quantization": kind,
            "controller": "fixed",
        }
    )


@functools.cache
def plain() -> list[list[int]]:
    return texts()[0]


@pytest.mark.parametrize(
    ("kind", "has_embedding"),
    [
        ("int8", True),
        ("int4", True),
        pytest.param("int8", False, marks=pytest.mark.slow),
        pytest.param("int4", False, marks=pytest.mark.slow),
        pytest.param("fp8", False, marks=pytest.mark.slow),
    ],
)
def test_a_quantized_draft_changes_no_text(kind, has_embedding):
    said, rate = texts(**drafts(kind), quantize_embedding=has_embedding)
    assert said == plain()
    assert 0.2 < rate < 1


@pytest.mark.parametrize("kind", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_quantized_target_says_the_same_with_drafts_and_without(kind):
    alone, _ = texts(quantization=kind)
    said, rate = texts(quantization=kind, **drafts("int8"))
    assert said == alone
    assert 0.2 < rate < 1
    if kind == "int4":  # int8 is too close to say anything else so soon
        assert alone != plain()


@pytest.mark.parametrize(
    ("scheme", "rule"),
    [
        (pair.INT4, "block"),
        *(
            pytest.param(scheme, rule, marks=pytest.mark.slow)
            for scheme in (pair.INT8, pair.INT4)
            for rule in ("standard", "block", "seeded")
            if (scheme, rule) != (pair.INT4, "block")
        ),
    ],
    ids=lambda one: getattr(one, "kind", one),
)
def test_every_position_follows_the_target(scheme, rule):
    target = make_micro(seed=3)
    engine = make_law_engine(target, draft_scheme=scheme)
    # It is another draft than the one that was quantized.
    rate, whole = (acceptance_of(one, "greedy") for one in (engine, law_engine()))
    assert 0.1 < rate < 0.9 and rate != whole
    counted = sample(engine, rule, 700, every=FEWER, length=SHORT)
    levels = levels_after(target, PROMPT, SHORT)
    for controls, tokens in zip(FEWER, counted, strict=True):
        check_law(tokens, laws_of(levels, controls), (scheme.kind, rule, controls))


@functools.cache
def law_engine() -> LLMEngine:
    return make_law_engine(make_micro(seed=3))
