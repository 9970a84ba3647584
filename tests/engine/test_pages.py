"""A page belongs to one sequence at a time, and a promised page is always there."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from jaxspec.engine.pages import PagePool


class Owners(RuleBasedStateMachine):
    """Sequences that reserve, grow and end, against plain sets."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(12)
        self.held: list[list[int]] = []
        self.promised: list[int] = []

    @rule(count=st.integers(0, 12))
    def admit(self, count: int) -> None:
        room = 12 - sum(map(len, self.held)) - sum(self.promised)
        assert self.pool.can_reserve(count) == (count <= room)
        if count <= room:
            self.pool.reserve(count)
            self.held.append([])
            self.promised.append(count)

    @precondition(lambda self: any(self.promised))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        growing = [i for i, count in enumerate(self.promised) if count]
        index = data.draw(st.sampled_from(growing))
        count = data.draw(st.integers(1, self.promised[index]))
        pages = self.pool.take(count)
        assert len(pages) == count
        self.held[index] += pages
        self.promised[index] -= count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index), self.promised.pop(index))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(12))
        assert self.pool.num_free == 12 - len(held)
        assert self.pool.num_reserved == sum(self.promised)
        self.pool.check()


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_full_pool_promises_nothing_more():
    pool = PagePool(4)
    pool.reserve(4)
    assert not pool.can_reserve(1)
    with pytest.raises(AssertionError, match="over the pool"):
        pool.reserve(1)


def test_pages_that_nobody_promised_are_not_handed_out():
    pool = PagePool(4)
    pool.reserve(1)
    with pytest.raises(AssertionError, match="2 pages were not reserved"):
        pool.take(2)


def test_a_page_given_back_twice_is_found():
    pool = PagePool(4)
    pool.reserve(2)
    pages = pool.take(2)
    pool.release(pages[:1], 0)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(pages[:1], 0)


def test_giving_up_more_promises_than_there_are_is_found():
    pool = PagePool(4)
    pool.reserve(1)
    with pytest.raises(AssertionError):
        pool.release([], 2)
