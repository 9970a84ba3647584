"""The queue of waiting requests, in the order in which they run."""

import bisect
import itertools
from collections.abc import Iterator

from jaxspec.engine.scheduling.request import Request


class WaitingQueue:
    """Waiting requests, the first to run first.

    By arrival, or by priority and then by arrival. A preempted request keeps its place.
    """

    def __init__(self, policy: str):
        self._has_priorities = policy == "priority"
        self._arrivals = itertools.count()
        self._line: list[Request] = []

    def rank(self, request: Request) -> tuple[int, int]:
        """Return the sort key of a request; the lowest runs first."""
        return (request.priority if self._has_priorities else 0, request.arrival)

    def add(self, request: Request) -> None:
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        bisect.insort(self._line, request, key=self.rank)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._line, self.rank(request), key=self.rank)
        assert self._line[index] is request, f"{request.request_id} does not wait"
        del self._line[index]

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)
