"""What the engine tells of logits has the same bits on every way through it.

The bundled pair in the programs that users get: `tests/models/test_same_bits.py` proves
the same of the network alone. Log-probabilities are compared as floats, not nearly.
"""

from typing import Any

import pytest

from benchmarks.same_bits import (
    NUM_TOKENS,
    TOLD,
    WAYS,
    alone,
    compare,
    make_llm,
    prompts,
    told,
)
from tests.engines import users_programs


@pytest.mark.battery(name="lossless")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@users_programs()
def test_every_way_tells_the_same(dtype):
    plain = make_llm(dtype=dtype)
    first = alone(plain)
    expected = told(first)
    for way in WAYS:
        llm = make_llm(dtype=dtype, **way)
        assert told(llm.generate(prompts(), TOLD, use_tqdm=False)) == expected, way
        preemptions = llm.llm_engine.stats.num_preemptions
        assert (preemptions > 0) == ("num_gpu_blocks_override" in way), way
    # Nothing is told of prompt tokens that are read from pages.
    less = TOLD.clone()
    less.prompt_logprobs = None
    # Each twice in a row: the pool has room for one sequence.
    again: Any = []
    for prompt in prompts():
        plain.generate([prompt], less, use_tqdm=False)
        again += plain.generate([prompt], less, use_tqdm=False)
    assert any(output.num_cached_tokens for output in again), "no prefix was found"
    texts = [row for output in first for row in told([output])[-NUM_TOKENS:]]
    assert told(again) == texts


def test_a_difference_of_one_bit_is_counted():
    expected = [[(3, -1.0), (5, -2.0)], [(3, -1.5)]]
    found = [[(3, -1.0), (5, -2.0000002)], [(3, -1.5)]]
    counted = compare(expected, found)
    assert (counted["num_tokens"], counted["num_equal"]) == (2, 1)
    assert counted["largest_difference"] == pytest.approx(2e-7)
