"""A request's tokens, counts and invariant, and the queue in which requests wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduling.request import Status
from jaxspec.engine.scheduling.waiting_queue import WaitingQueue
from tests.support.requests import make_request


def test_tokens_span_prompt_and_output():
    request = make_request(output_token_ids=[8, 9])
    assert request.status is Status.WAITING
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    whole = [5, 6, 7, 8, 9]
    for start in range(6):
        for end in range(start, 6):
            assert request.tokens(start, end) == whole[start:end]


@pytest.mark.parametrize(
    "broken", [dict(num_prefilled=4), dict(max_total=2), dict(num_prefilled=-1)]
)
def test_inconsistent_token_counts_fail_a_check(broken):
    make_request().check()
    with pytest.raises(AssertionError):
        make_request(**broken).check()


@given(st.lists(st.integers(-2, 2), max_size=8), st.data())
def test_order_of_the_queue_equals_a_sorted_list(priorities, data):
    for policy in ("fcfs", "priority"):
        queue = WaitingQueue(policy)
        expected = [make_request(priority=priority) for priority in priorities]
        for request in expected:
            queue.add(request)
        if policy == "priority":
            expected.sort(key=lambda request: request.priority)
        assert list(queue) == expected
        assert len(queue) == len(expected)
        gone = [request for request in expected if data.draw(st.booleans())]
        for request in gone:
            queue.remove(request)
        assert list(queue) == [one for one in expected if one not in gone]
        for request in reversed(gone):
            queue.add(request)
        assert list(queue) == expected
