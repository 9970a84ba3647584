"""Preempted and sharing requests say on the real program what they say alone."""

from typing import Any

import pytest

from jaxspec.sampling_params import SamplingParams
from tests.engines import generate, make_draft_of, make_engine, make_micro, tokens_of

STEM = [2, 5, 7, 9, 4, 11, 3, 8, 12, 6, 5, 10, 13, 4]
PROMPTS = [[*STEM, 5], [*STEM, 7], [2, 9, 4, 11], [*STEM[:9], 14], [*STEM, 5]]


def params(seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=30, ignore_eos=True
    )


@pytest.fixture(scope="module")
def target():
    return make_micro()


@pytest.mark.slow
@pytest.mark.parametrize("num_draft", [0, 3])
@pytest.mark.parametrize("seed", [None, 5])
def test_few_pages_change_nothing_but_the_order(target, num_draft, seed):
    draft = make_draft_of(target) if num_draft else None

    def run(max_num_seqs: int, num_pages: int) -> tuple[list[list[int]], Any]:
        engine = make_engine(
            target,
            draft,
            num_draft_tokens=num_draft,
            max_model_len=48,
            has_one_shape=True,
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
        )
        said = tokens_of(generate(engine, PROMPTS, params(seed)))
        engine.scheduler.check_idle()
        return said, engine.stats

    alone, _ = run(1, 64)
    crowded, stats = run(4, 14)
    assert crowded == alone
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
