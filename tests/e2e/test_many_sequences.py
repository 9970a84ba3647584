"""Hundreds of sequences at once say what they say among few."""

from typing import Any

import numpy as np
import pytest

from jaxspec.program import forward, verify
from jaxspec.sampling_params import SamplingParams
from tests.engines import generate, make_engine, make_micro, tokens_of

NUM_SEQS = 256
SIZES: dict[str, Any] = dict(
    num_pages=2048, max_num_batched_tokens=2048, has_one_shape=True
)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 16, random.integers(1, 12)) for _ in range(NUM_SEQS)]
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.8])),
            seed=number,
            max_tokens=6,
            ignore_eos=True,
            extra_args={"num_speculative_tokens": int(random.integers(6))},
        )
        for number in range(NUM_SEQS)
    ]
    return [prompt.tolist() for prompt in prompts], params


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    engine = make_engine(make_micro(), max_num_seqs=8, **SIZES)
    return tokens_of(generate(engine, *requests()))


@pytest.mark.parametrize(
    "is_grouped", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_hundreds_of_sequences_with_every_k(expected, is_grouped, monkeypatch):
    """Greedy and seeded ones, each with 0 to 5 drafts a round."""
    if is_grouped:
        for module in (forward, verify):
            monkeypatch.setattr(module, "MAX_GROUP_BYTES", 2**14)
    target = make_micro()
    engine = make_engine(
        target,
        make_micro(seed=1),
        num_draft_tokens=5,
        max_num_seqs=NUM_SEQS,
        **SIZES,
    )
    outputs = generate(engine, *requests())
    assert tokens_of(outputs) == expected
    assert engine.stats.num_draft_tokens > NUM_SEQS
    assert 0 < engine.stats.acceptance_rate < 1
