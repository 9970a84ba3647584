"""More requests than the server can do: those let in are answered, and rightly."""

import asyncio

import pytest

from benchmarks.overload import GOAL_RECOVERY_S, measure
from tests.serving import PROMPT, site_of

PLACES = 4
ENGINE = {"max_num_seqs": PLACES, "num_pages": 96}
QUEUE_LENGTH = 6


@pytest.mark.parametrize("seconds", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_five_times_what_it_can_do(seconds: int):
    with site_of(ENGINE, max_num_queued_reqs=QUEUE_LENGTH) as site:
        site.delay_s = 0.02
        prompts = (PROMPT, PROMPT * 2, PROMPT * 5)
        found = asyncio.run(
            measure(site.url, clients=4, seconds=seconds, prompts=prompts, size=12)
        )
    print(found)
    assert not found["anything_else"]
    assert found["refused"] > found["answered_right"] > seconds * 4
    assert QUEUE_LENGTH <= found["most_inside"] <= QUEUE_LENGTH + PLACES
    assert found["refused_median_s"] < found["answered_median_s"]
    assert found["normal_again_s"] < GOAL_RECOVERY_S
