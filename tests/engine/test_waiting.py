"""The line equals a sorted list, and whoever comes back has kept his place."""

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.request import Request
from jaxspec.engine.waiting import WaitingLine
from tests.engine.test_request import make_request


def fill(policy: str, priorities: list[int]) -> tuple[WaitingLine, list[Request]]:
    line = WaitingLine(policy)
    requests = [make_request(priority=priority) for priority in priorities]
    for request in requests:
        line.add(request)
    return line, requests


@given(st.lists(st.integers(-2, 2), max_size=8), st.data())
def test_the_order_is_that_of_a_sorted_list(priorities, data):
    for policy in ("fcfs", "priority"):
        line, requests = fill(policy, priorities)
        expected = list(requests)
        if policy == "priority":
            expected.sort(key=lambda request: request.priority)
        assert list(line) == expected
        assert len(line) == len(expected)
        assert line.first is (expected[0] if expected else None)
        gone = [r for r in expected if data.draw(st.booleans())]
        for request in gone:
            line.remove(request)
        assert list(line) == [r for r in expected if r not in gone]
        for request in reversed(gone):
            line.add(request)
        assert list(line) == expected
