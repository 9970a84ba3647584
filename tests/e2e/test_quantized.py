"""Quantized drafts change no text; nor do drafts or devices of a quantized target.

These tests use the bundled pair, whose drafts are often accepted even if it is
quantized. Properties of all proposers are tested on a smaller pair in
`tests/conformance`.
"""

import functools
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.engine import loader
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.sampling_params import SamplingParams
from tests.support.engines import QuickRunner

PROMPTS = [
    "<start_of_turn>user\nTell me a story about a fox.<end_of_turn>\n",
    "The quick brown fox",
    "def main():",
    "Tom has 3 apples and buys 4 more.",
]
# Greedy and seeded requests use the same program.
PARAMS = [
    SamplingParams(
        max_tokens=64, ignore_eos=True, temperature=number % 2, seed=number or None
    )
    for number in range(len(PROMPTS))
]
NUM_DRAFTS = 3


def texts(**options: Any) -> tuple[list[list[int]], float]:
    """Return the token ids of every request, and the acceptance rate."""
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_draft_changes_no_text(kind):
    """The embedding is not quantized here; another test quantizes it."""
    said, rate = texts(**drafts(kind), quantize_embedding=False)
    assert said == plain()
    assert 0.2 < rate < 1


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_texts_of_quantized_target_do_not_depend_on_drafts(kind):
    alone, _ = texts(quantization=kind)
    said, rate = texts(quantization=kind, **drafts("int8"))
    assert said == alone
    assert 0.2 < rate < 1
    if kind == "int4":  # int8 is so precise that texts of this length do not change
        assert alone != plain()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_texts_of_quantized_target_do_not_depend_on_devices(kind):
    alone, _ = texts(quantization=kind)
    assert texts(quantization=kind, tensor_parallel_size=2)[0] == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "has_embedding"),
    [("int8", True), ("int4", False), ("int4", True), (None, False)],
)
def test_bundled_draft_with_a_quarter_of_its_head_changes_no_text(kind, has_embedding):
    """A trimmed draft, quantized or not, changes no text and hardly the acceptance.

    The untrimmed draft model is tested as well.
    """
    whole, trimmed = drafts(kind), drafts(kind)
    trimmed["speculative_config"]["draft_vocab_size"] = 2048
    options: dict[str, Any] = dict(quantize_embedding=has_embedding)
    said, rate = texts(**trimmed, **options)
    assert said == plain()
    before, whole_rate = texts(**whole, **options)
    assert said == before
    assert whole_rate - 0.08 < rate < 1
