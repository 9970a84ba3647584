"""The queue keeps the order of a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.waiting_queue import WaitingQueue
from tests.support.requests import make_request


def fill(policy: str, priorities: list[int]) -> tuple[WaitingQueue, list[Request]]:
    line = WaitingQueue(policy)
    requests = [make_request(priority=priority) for priority in priorities]
    for request in requests:
        line.add(request)
    return line, requests


@given(st.lists(st.integers(-2, 2), max_size=8), st.data())
def test_order_equals_a_sorted_list(priorities, data):
    for policy in ("fcfs", "priority"):
        line, requests = fill(policy, priorities)
        expected = list(requests)
        if policy == "priority":
            expected.sort(key=lambda request: request.priority)
        assert list(line) == expected
        assert len(line) == len(expected)
        assert next(iter(line), None) is (expected[0] if expected else None)
        gone = [r for r in expected if data.draw(st.booleans())]
        for request in gone:
            line.remove(request)
        assert list(line) == [r for r in expected if r not in gone]
        for request in reversed(gone):
            line.add(request)
        assert list(line) == expected
