"""Logprobs are bit for bit the same on every path of the engine.

The bundled pair runs with users' compile options. `tests/models/test_same_bits.py`
tests the network alone.
"""

from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.bench.data import read_prompts
from jaxspec_checkpoints import bundled_draft, bundled_target
from tests.support.engines import users_programs

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
NUM_PROMPTS, NUM_TOKENS = 8, 48
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=2,
)
# Arguments that differ from those of an engine without drafts that runs one sequence at
# a time.
WAYS: list[dict[str, Any]] = [
    dict(max_num_seqs=8),
    dict(num_speculative_tokens=5),
    dict(num_speculative_tokens=5, max_num_seqs=8, max_num_batched_tokens=64),
    dict(num_speculative_tokens=1, max_num_seqs=4, num_gpu_blocks_override=20),
]

Logprobs = list[list[tuple[int, float]]]


def prompts() -> list[str]:
    return [one.text for one in read_prompts(PROMPTS)][:NUM_PROMPTS]


def make_llm(**changes: Any) -> LLM:
    """Load the bundled pair, or its target alone."""
    arguments: dict[str, Any] = dict(
        model=str(bundled_target()), max_model_len=256, max_num_seqs=1
    )
    if "num_speculative_tokens" in changes:
        arguments["speculative_model"] = str(bundled_draft())
    return LLM(**(arguments | changes))


def logprobs_of(outputs: Any) -> Logprobs:
    """Return the logprobs of every token, in prompts and in texts."""
    rows = []
    for output in outputs:
        for row in [*(output.prompt_logprobs or []), *output.outputs[0].logprobs]:
            pairs = (row or {}).items()
            rows.append(sorted((token, one.logprob) for token, one in pairs))
    return rows


def alone(llm: LLM) -> list[Any]:
    """Run the prompts one after the other; return their outputs."""
    return [llm.generate([one], PARAMS, use_tqdm=False)[0] for one in prompts()]


@pytest.mark.long_suite(name="lossless")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@users_programs()
def test_logprobs_have_the_same_bits_on_every_path(dtype):
    plain = make_llm(dtype=dtype)
    first = alone(plain)
    expected = logprobs_of(first)
    for way in WAYS:
        llm = make_llm(dtype=dtype, **way)
        assert (
            logprobs_of(llm.generate(prompts(), PARAMS, use_tqdm=False)) == expected
        ), way
        preemptions = llm.llm_engine.stats.num_preemptions
        assert (preemptions > 0) == ("num_gpu_blocks_override" in way), way
    # Prompt tokens in prefix hits have no logprobs, so they are not compared.
    less = PARAMS.clone()
    less.prompt_logprobs = None
    # The pages hold one sequence, so each prompt runs twice in a row to have prefix
    # hits.
    again: Any = []
    for prompt in prompts():
        plain.generate([prompt], less, use_tqdm=False)
        again += plain.generate([prompt], less, use_tqdm=False)
    assert any(output.num_cached_tokens for output in again), "no prefix was found"
    texts = [row for output in first for row in logprobs_of([output])[-NUM_TOKENS:]]
    assert logprobs_of(again) == texts
