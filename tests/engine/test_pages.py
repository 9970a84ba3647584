"""A page has as many holders as took it, and a key finds the page it was given to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from jaxspec.engine.pages import PagePool, page_keys, root_key

NUM_PAGES = 8


class Holders(RuleBasedStateMachine):
    """Sequences that take, share and release, against plain lists."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: list[list[int]] = []
        self.keys: dict[bytes, int] = {}
        self.released: list[int] = []  # findable free pages, the oldest first

    def free(self) -> set[int]:
        held = {page for pages in self.held for page in pages}
        return set(range(NUM_PAGES)) - held

    @rule(count=st.integers(0, NUM_PAGES))
    def take(self, count: int) -> None:
        if count > len(self.free()):
            with pytest.raises(AssertionError, match="free ones"):
                self.pool.take(count)
            return
        blank = len(self.free()) - len(self.released)
        lost = self.released[: max(count - blank, 0)]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert set(taken) <= self.free()
        # The least recently used go first, and only when nothing blank is left.
        assert set(taken) & set(self.released) == set(lost)
        self.released = self.released[len(lost) :]
        self.keys = {k: p for k, p in self.keys.items() if p not in taken}
        self.held.append(taken)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([p for pages in self.held for p in pages]))
        key = bytes([data.draw(st.integers(0, 20))])
        if page in self.keys.values():
            return
        assert self.pool.register(page, key) == (key not in self.keys)
        self.keys.setdefault(key, page)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True))
        found = self.pool.find(keys)
        assert found == [self.keys[key] for key in keys]
        assert self.pool.find([*keys, b"unknown", *keys]) == found
        self.pool.share(found)
        self.released = [page for page in self.released if page not in found]
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)
        gone = [page for page in pages if page in self.free()]
        self.released += [page for page in gone if page in self.keys.values()]

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        page = self.keys.pop(key)
        self.pool.forget([page])
        self.released = [other for other in self.released if other != page]

    @rule()
    def reset(self) -> None:
        is_idle = len(self.free()) == NUM_PAGES
        assert self.pool.reset() == is_idle
        if is_idle:
            self.keys, self.released = {}, []

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free())
        assert self.pool.num_findable == len(self.keys)
        for page in range(NUM_PAGES):
            assert self.pool.is_free(page) == (page in self.free())
        for key, page in self.keys.items():
            assert self.pool.find([key]) == [page]


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_page_given_back_twice_is_found():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.release(pages[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(pages[:1])


def test_only_found_pages_are_shared():
    pool = PagePool(4)
    with pytest.raises(AssertionError, match="not found by a key"):
        pool.share(pool.take(1))


@given(
    tokens=st.lists(st.integers(0, 3), max_size=14),
    other=st.lists(st.integers(0, 3), max_size=14),
    page_size=st.sampled_from([1, 2, 4]),
)
def test_keys_are_equal_exactly_when_all_tokens_before_are(tokens, other, page_size):
    root = root_key("all", "")
    first = list(page_keys(root, tokens, page_size))
    second = list(page_keys(root, other, page_size))
    assert len(first) == len(tokens) // page_size
    for index, (one, two) in enumerate(zip(first, second, strict=False), 1):
        end = index * page_size
        assert (one == two) == (tokens[:end] == other[:end])


def test_keys_go_on_where_others_ended():
    root, tokens = root_key("all", ""), np.arange(12).tolist()
    whole = list(page_keys(root, tokens, 4))
    assert list(page_keys(whole[0], tokens[4:], 4)) == whole[1:]


def test_salts_and_groups_have_keys_of_their_own():
    roots = {root_key(kind, salt) for kind in ("salt", "group") for salt in ("", "1")}
    assert len(roots | {root_key("all", "")}) == 5
