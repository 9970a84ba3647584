"""A subscriber that applies all KV events knows the cached pages and their tokens."""

from typing import Any

import numpy as np
import pytest

from jaxspec.engine.scheduling.kv_cache import KEY_BYTES, page_keys, root_key
from jaxspec.engine.scheduling.page_events import (
    PageEvent,
    PageEvents,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from tests.support.loops import Loop, make_config, make_requests


class Subscriber:
    """Tracks cached pages from the events alone, as a gateway does."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self.keys: set[bytes] = set()

    def receive(self, events: list[PageEvent]) -> None:
        for event in events:
            match event:
                case PagesStored(keys, parent, token_ids):
                    assert self.keys.isdisjoint(keys)
                    start = root_key("all", "") if parent is None else parent
                    found = page_keys(start, token_ids, self._page_size)
                    assert tuple(found) == keys
                    self.keys |= set(keys)
                case PagesRemoved(keys):
                    assert self.keys >= set(keys)
                    self.keys -= set(keys)
                case PagesCleared():
                    self.keys.clear()


def run(loop: Loop, events: PageEvents, subscriber: Subscriber, requests: Any) -> int:
    """Run requests one by one; return how many pages were removed from the cache."""
    gone = 0
    pool = loop.scheduler.pool
    for request in requests:
        loop.scheduler.add(request)
        is_running = True
        while is_running:
            is_running = loop.step()
            before = set(subscriber.keys)
            subscriber.receive(events.take())
            # Events are for global pages.
            keys = {key for key in pool._page_of if len(key) == KEY_BYTES}
            assert subscriber.keys == keys
            gone += len(before - subscriber.keys)
    return gone


@pytest.mark.parametrize("windows", [{}, dict(window=8, num_pages=48)])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_subscriber_knows_all_findable_pages(num_draft_tokens: int, windows: Any):
    # The texts need more pages than there are, so that some pages are reused.
    config = make_config(
        num_draft_tokens=num_draft_tokens,
        **(dict(num_pages=32, max_num_seqs=1) | windows),
    )
    events = PageEvents()
    loop = Loop(config, 0, page_events=events)
    subscriber = Subscriber(config.page_size)
    requests = make_requests(config, 4)
    random = np.random.default_rng(0)
    for number, request in enumerate(requests):
        other = random.integers(0, 9, 70 - 20 * number).tolist()
        request.prompt_token_ids = request.prompt_token_ids[: 20 * number] + other
    assert run(loop, events, subscriber, requests) > 0
    assert (loop.num_freed > 0) == bool(windows)
    assert subscriber.keys
    assert loop.scheduler.reset_prefix_cache()
    taken = events.take()
    assert taken == [PagesCleared()]
    subscriber.receive(taken)
    assert not subscriber.keys


def test_private_pages_have_no_events():
    config = make_config(num_pages=200, max_num_seqs=1)
    events = PageEvents()
    loop = Loop(config, 0, page_events=events)
    (request,) = make_requests(config, 1, cache_salt="mine")
    loop.run([request])
    assert loop.scheduler.pool._page_of
    assert events.take() == [PagesCleared()]
    # Private pages cause no events when they are removed, either.
    loop.scheduler.pool.forget(range(config.num_pages))
    assert not events.take()


def test_consecutive_pages_are_one_event():
    events = PageEvents()
    assert events.take() == [PagesCleared()]
    events.stored(b"a", None, [1, 2])
    events.stored(b"b", b"a", [3, 4])
    events.stored(b"c", b"a", [5, 6])
    events.removed(b"b")
    events.removed(b"b")
    events.removed(b"c")
    events.removed(b"unknown")
    assert events.take() == [
        PagesStored((b"a", b"b"), None, (1, 2, 3, 4)),
        PagesStored((b"c",), b"a", (5, 6)),
        PagesRemoved((b"b", b"c")),
    ]
    events.cleared()
    events.cleared()
    events.removed(b"a")
    assert events.take() == [PagesCleared()]
