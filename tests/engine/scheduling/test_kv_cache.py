"""Held and cached pages equal those of a simple model, alone and with the scheduler.

If there are too few pages, requests get them in order of rank. With the scheduler, this
tests `page_releases` too.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.engine.scheduling.kv_cache import (
    PagePool,
    PageTables,
    PlannedPages,
    local_key,
    page_keys,
    root_key,
)
from jaxspec.engine.scheduling.page_claims import chunks_of, grant_by_rank, has_pages
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stages import Grant
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.program.plan import TILE
from tests.support.loops import Loop, make_config, make_requests, run_traffic
from tests.support.requests import make_request

NUM_PAGES = 8


class Holders(RuleBasedStateMachine):
    """Compares takes, shares and releases of pages with a model made of plain lists."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: list[list[int]] = []
        self.keys: dict[bytes, int] = {}
        self.released: list[int] = []  # cached free pages, oldest first

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
        # Free pages without a key are taken first, then the least recently used ones.
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
        assert len(self.pool._key_of) == len(self.keys)
        for page in range(NUM_PAGES):
            assert self.pool.is_free(page) == (page in self.free())
        for key, page in self.keys.items():
            assert self.pool.find([key]) == [page]


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=25)


def test_detects_pages_freed_twice_or_shared_without_a_key():
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(AssertionError, match="not found by a key"):
        pool.share(pages[1:])
    pool.release(pages[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(pages[:1])


@given(
    tokens=st.lists(st.integers(0, 3), max_size=14),
    other=st.lists(st.integers(0, 3), max_size=14),
    page_size=st.sampled_from([1, 2, 4]),
    after=st.integers(0, 1),
)
def test_page_keys_are_equal_only_if_all_tokens_so_far_are(
    tokens, other, page_size, after
):
    """Keys may include the token after each page."""
    root = root_key("all", "")
    first = list(page_keys(root, tokens, page_size, after))
    second = list(page_keys(root, other, page_size, after))
    assert len(first) == max(len(tokens) - after, 0) // page_size
    for index, (one, two) in enumerate(zip(first, second, strict=False), 1):
        end = index * page_size
        assert (one == two) == (tokens[: end + after] == other[: end + after])
        # Keys can be continued from the key of an earlier page.
        assert list(page_keys(one, tokens[end:], page_size, after)) == first[index:]


def test_page_keys_depend_on_salt_and_group():
    roots = {root_key(kind, salt) for kind in ("salt", "group") for salt in ("", "1")}
    assert len(roots | {root_key("all", "")}) == 5


WINDOWS = [{}, dict(window=8, num_local=2), dict(window=30, num_draft_tokens=0)]


@pytest.mark.parametrize("windows", WINDOWS)
def test_shared_prefix_is_prefilled_once(windows):
    config = make_config(
        max_num_seqs=4, num_pages=200, max_num_batched_tokens=32, **windows
    )
    requests = make_requests(config, 4)
    loop = run_traffic(config, requests)
    # The first request's pages are reused, except the page of the last prompt token.
    assert [request.num_cached_tokens for request in requests] == [0, 68, 68, 68]
    num_prefilled = sum(launch.num_prefilled for launch in loop.launches)
    assert num_prefilled == 70 + 3 * 2
    stats = loop.scheduler.stats
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (280, 3 * 68)


@pytest.mark.parametrize(
    ("config", "request_", "cached"),
    [
        ({}, dict(can_read_prefix_cache=False), 0),
        (dict(enable_prefix_caching=False), {}, 0),
        (dict(enable_prefix_caching=False), dict(cache_group=7), 68),
    ],
)
@pytest.mark.parametrize("windows", WINDOWS[:2])
def test_only_some_requests_read_the_prefix_cache(windows, config, request_, cached):
    config = make_config(num_pages=200, **config, **windows)
    requests = make_requests(config, 2, **request_)
    run_traffic(config, requests)
    assert [request.num_cached_tokens for request in requests] == [0, cached]


@pytest.mark.parametrize("windows", WINDOWS[:2])
def test_salts_do_not_share_pages(windows):
    config = make_config(num_pages=200, max_num_seqs=1, **windows)
    requests = make_requests(config, 4)
    for request, salt in zip(requests, ("a", "b", "a", None), strict=True):
        request.cache_salt = salt
    loop = run_traffic(config, requests)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 68, 0]
    pool, tables = loop.scheduler.pool, loop.scheduler.tables
    found = list[int]()
    for request in requests[1:]:
        keys = tables.keys(request, 17)
        found += map(pool.page_of, keys)
        if windows:
            found += [pool.page_of(local_key(key)) for key in keys]
    assert len(set(found)) == len(found) == 3 * 17 * (2 if windows else 1)


def test_texts_of_one_request_share_local_pages():
    """With n > 1, texts share pages even if prefix caching is off."""
    config = make_config(
        window=8, num_local=2, num_pages=200, enable_prefix_caching=False
    )
    requests = make_requests(config, 3, cache_group=7)
    requests += make_requests(config, 1, cache_group=8)
    loop = Loop(config, 0)
    loop.add(requests[:3])
    while len(loop.scheduler.running) < 3:
        loop.step()
    shared = {tuple(request.pages[:17]) for request in requests[:3]}
    local = {
        tuple(request.local_pages[15 - request.first_local :][:2])
        for request in requests[:3]
    }
    # The query at position 68 sees 61 to 68: shared pages 15 and 16, and an own page.
    assert len(shared) == len(local) == 1
    assert len(min(local)) == 2
    loop.run(requests[3:])
    assert requests[3].num_cached_tokens == 0
    loop.check_ended(requests)


@pytest.mark.parametrize("windows", WINDOWS[:2])
def test_generated_tokens_are_found_in_the_cache(windows):
    """The next turn of a conversation begins with the previous answer."""
    for num_draft_tokens in (0, 3):
        config = make_config(
            num_pages=200, num_draft_tokens=num_draft_tokens, **windows
        )
        prompt = [1] * 30
        drafts = dict(max_draft_tokens=num_draft_tokens)
        (first,) = make_requests(
            config, 1, prompt_token_ids=prompt, max_total=92, **drafts
        )
        loop = run_traffic(config, [first])
        (second,) = make_requests(config, 1, max_total=95, **drafts)
        second.prompt_token_ids = [*prompt, *first.output_token_ids, 1]
        loop.run([second])
        loop.assert_said_the_truth(second)
        # Of 92 tokens, the last one has no keys and values yet, so its page is not
        # full.
        assert second.num_cached_tokens == 88
        if num_draft_tokens:
            assert second.num_draft_cached == 88


@pytest.mark.parametrize(
    "seed",
    [
        *range(15),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 40)),
    ],
)
@pytest.mark.parametrize(
    "windows",
    [{}, dict(window=5, num_pages=30), dict(window=6, num_local=3, num_pages=24)],
)
def test_planned_pages_equal_allocated_pages(windows, seed):
    """Planned pages, for growth and admission, equal those taken from the pool."""
    random = np.random.default_rng(seed)
    config = make_config(
        **(dict(page_size=2, num_pages=16, max_model_len=24) | windows)
    )
    tables = PageTables(config, EngineStats())
    stem = random.integers(0, 16, 24).tolist()

    def make() -> Request:
        """Return a request with a shared prompt, and possibly a private suffix."""
        shared, own = random.integers(1, 12), random.integers(0, 3)
        prompt = [*stem[:shared], *random.integers(0, 16, own).tolist()]
        return make_request(prompt_token_ids=prompt, tokens_to_prefill=prompt)

    def start(request: Request, num_found: int, end: int) -> list[int]:
        tables.begin(request, num_found)
        found = request.pages[:num_found]
        tables.grow(request, end + 1)
        tables.register(request, end)
        return found

    def num_found_of(request: Request) -> int:
        return len(tables.cached_prefix(request).pages)

    running = list[Request]()
    for request in [make() for _ in range(6)]:
        end = int(random.integers(1, request.num_tokens + 1))
        num_found = num_found_of(request)
        end = max(end, 2 * num_found)
        if 2 * tables.count(end + 1) > tables.pool.num_free:
            continue
        start(request, num_found, end)
        if random.random() < 0.6:
            tables.release(request)
        else:
            running.append(request)

    planned, steps = PlannedPages(tables), list[tuple]()
    for request in running:
        end = request.num_tokens
        if tables.missing(request, end + 1) <= planned.num_free:
            planned.grow(request, end + 1)
            planned.register(request, request.num_registered, end)
            steps.append((request, None, end, planned.num_free))
    for request in [make() for _ in range(4)]:
        found = planned.find(request)
        end = int(random.integers(2 * len(found.pages) + 1, request.num_tokens + 1))
        count = tables.count(end + 1)
        needed = tables.num_needed(found, count, count)
        needed += planned.num_revived(found)
        if needed <= planned.num_free:
            planned.begin(request, found, end)
            steps.append((request, found, end, planned.num_free))

    for request, found, end, num_free in steps:
        if found is None:
            tables.grow(request, end + 1)
            tables.register(request, end)
        else:
            assert num_found_of(request) == len(found.pages)
            pages = start(request, len(found.pages), end)
            pairs = zip(pages, found.pages, strict=True)
            assert all(page == plan for page, plan in pairs if plan is not None)
        assert tables.pool.num_free == num_free
    assert steps
    tables.pool.check()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_prefix_ends_where_both_kinds_of_pages_are_found(num_draft_tokens):
    config = make_config(
        num_pages=200, window=8, num_local=2, num_draft_tokens=num_draft_tokens
    )
    first, *others = make_requests(config, 4)
    loop = run_traffic(config, [first])
    pool, found = loop.scheduler.pool, []
    # (page that is lost, whether it is the local one)
    for request, (lost, is_local) in zip(
        others, [(16, True), (15, True), (9, False)], strict=True
    ):
        key = loop.scheduler.tables.reusable_keys(request)[lost]
        pool.forget([pool.page_of(local_key(key) if is_local else key)])
        found.append(len(loop.scheduler.tables.cached_prefix(request).pages))
    assert found == [16, 15, 9]
    loop.scheduler.add(others[0])
    loop.run()
    assert others[0].num_cached_tokens == 9 * 4
    loop.assert_said_the_truth(others[0])


def test_a_local_page_outside_the_window_is_not_needed():
    config = make_config(num_pages=200, window=8, num_draft_tokens=0)
    first, second = make_requests(config, 2)
    loop = run_traffic(config, [first])
    pool = loop.scheduler.pool
    keys = loop.scheduler.tables.reusable_keys(second)
    pool.forget([pool.page_of(local_key(key)) for key in keys[:15]])
    assert len(loop.scheduler.tables.cached_prefix(second).pages) == 17
    # The query at position 68 sees 61 to 68: pages 15 to 17.
    pool.forget([pool.page_of(local_key(keys[15]))])
    assert len(loop.scheduler.tables.cached_prefix(second).pages) == 0


def test_draft_model_reads_local_pages_that_only_the_target_has_filled():
    """A lost local page is filled again by a request without drafts."""
    config = make_config(num_pages=200, window=8, num_local=2)
    first, plain, third = make_requests(config, 3, max_draft_tokens=3)
    plain.max_draft_tokens = 0
    loop = run_traffic(config, [first])
    pool, keys = loop.scheduler.pool, loop.scheduler.tables.reusable_keys(plain)
    pool.forget([pool.page_of(local_key(keys[15]))])
    loop.run([plain])
    assert all(pool.is_drafted(pool.page_of(key)) for key in keys)
    assert not pool.is_drafted(pool.page_of(local_key(keys[15])))
    loop.run([third])
    # The query at position 68 sees pages 15 to 17, the query at 60 pages 13 to 15.
    assert (third.num_cached_tokens, third.num_draft_cached) == (68, 60)
    loop.assert_said_the_truth(third)
    loop.assert_idle()


def test_requests_give_up_drafts_before_one_is_preempted():
    """Prompts that the draft model has not read keep pages that others need."""
    config = make_config(
        window=4, num_pages=100, max_num_seqs=3, disable_by_batch_size=2
    )
    requests = make_requests(config, 3, max_draft_tokens=3)
    for number, request in enumerate(requests):
        request.prompt_token_ids = [number] * 70
    loop, has_given_up, num_running = Loop(config, 0), False, 0
    loop.add(requests)
    while loop.step():
        rows = [request.row for request in loop.scheduler.running]
        has_given_up |= bool((loop.scheduler.rows.max_draft_tokens[rows] == 0).any())
        num_running = max(num_running, len(rows))
    assert has_given_up
    assert 0 < loop.scheduler.stats.num_given_up <= 3
    # With all local pages, they would take 3 * 46 units.
    assert num_running == 3
    assert loop.scheduler.stats.num_preemptions == 0
    loop.check_ended(requests)


PAGE_SIZE = 4


def make_running(*num_pages: int, free: int) -> tuple[PageTables, list[Request]]:
    """Return running requests in order of rank, each with its own pages."""
    config = make_config(page_size=PAGE_SIZE)
    tables = PageTables(config, EngineStats())
    tables.pool.take(config.num_pages - sum(num_pages) - free)
    requests = [make_request() for _ in num_pages]
    for row, (request, count) in enumerate(zip(requests, num_pages, strict=True)):
        request.row = request.arrival = row
        tables.grow(request, count * PAGE_SIZE)
    return tables, requests


def divide(
    tables: PageTables, running: list[Request], wanted: dict[int, int]
) -> list[Any]:
    """Return (row, rows preempted for it, whether it gets its pages) per request."""
    claims = [Grant(running[row], count * PAGE_SIZE) for row, count in wanted.items()]
    before = tables.pool.num_free, [list(one.pages) for one in running]
    assert not has_pages(tables, claims)
    # Running requests may be in any order, because preempted ones were admitted again.
    grants = grant_by_rank(tables, claims, running[::-1], lambda one: (0, one.arrival))
    assert before == (tables.pool.num_free, [list(one.pages) for one in running])
    return [
        (one.request.row, [other.row for other in one.preempted], one.is_granted)
        for one in grants
    ]


def test_last_in_rank_is_left_out_or_preempted_for_the_first():
    tables, running = make_running(2, 2, free=1)
    assert divide(tables, running, {0: 3, 1: 3}) == [(0, [], True), (1, [], False)]
    tables, running = make_running(2, 2, 2, free=0)
    assert divide(tables, running, {2: 3, 0: 3}) == [(0, [2], True)]
    assert divide(tables, running, {1: 3, 0: 4}) == [(0, [2], True), (1, [], False)]


def test_shared_pages_are_free_once_all_holders_are_preempted():
    tables, running = make_running(1, 1, 0, free=0)
    shared = running[1].pages[0]
    tables.pool.register(shared, b"key")
    tables.pool.share([shared])
    running[2].pages = [shared]
    assert divide(tables, running, {0: 2}) == [(0, [2, 1], True)]


@pytest.mark.parametrize("num_tiles", range(5))
def test_prompts_continue_in_order_while_there_is_room(num_tiles: int):
    first, second = make_request(), make_request()
    for request, length in ((first, TILE + 1), (second, 5 * TILE)):
        request.tokens_to_prefill = [1] * length
    second.num_prefilled = TILE
    chunks = chunks_of([first, second], num_tiles)
    assert sum(chunk.num_tiles for chunk in chunks) == num_tiles
    ends = [(chunk.start, chunk.end) for chunk in chunks]
    expected = [(0, min(num_tiles * TILE, TILE + 1)), (TILE, (num_tiles - 1) * TILE)]
    assert ends == expected[: len(ends)]
    assert len(ends) == (num_tiles > 0) + (num_tiles > 2)
