"""If there are too few pages, requests get them in order of rank.

A plan only counts pages: it does not allocate them.
"""

from typing import Any

import pytest

from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.page_claims import chunks_of, grant_by_rank, has_pages
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stages import Grant
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.program.plan import TILE
from tests.support.loops import make_config
from tests.support.requests import make_request

SIZE = 4


def make_running(*num_pages: int, free: int) -> tuple[PageTables, list[Request]]:
    """Return running requests in order of rank, each with its own pages."""
    config = make_config(page_size=SIZE)
    tables = PageTables(config, EngineStats())
    tables.pool.take(config.num_pages - sum(num_pages) - free)
    requests = [make_request() for _ in num_pages]
    for row, (request, count) in enumerate(zip(requests, num_pages, strict=True)):
        request.row = request.arrival = row
        tables.grow(request, count * SIZE)
    return tables, requests


def divide(tables: PageTables, running: list[Request], **wanted: int) -> list[Any]:
    """Return (row, rows preempted for it, whether it gets its pages) per request."""
    claims = [Grant(running[int(row[1:])], n * SIZE) for row, n in wanted.items()]
    before = tables.pool.num_free, [list(one.pages) for one in running]
    assert not has_pages(tables, claims)
    # Running requests may be in any order, because preempted ones were admitted again.
    grants = grant_by_rank(tables, claims, running[::-1], lambda one: (0, one.arrival))
    assert before == (tables.pool.num_free, [list(one.pages) for one in running])
    return [
        (one.request.row, [other.row for other in one.preempted], one.is_granted)
        for one in grants
    ]


def test_last_in_rank_is_preempted_for_the_first():
    tables, running = make_running(2, 2, 2, free=0)
    assert divide(tables, running, r2=3, r0=3) == [(0, [2], True)]
    assert divide(tables, running, r1=3, r0=4) == [(0, [2], True), (1, [], False)]


def test_last_request_is_left_out_of_the_launch():
    tables, running = make_running(2, 2, free=1)
    assert divide(tables, running, r0=3, r1=3) == [(0, [], True), (1, [], False)]


def test_shared_pages_are_free_once_all_holders_are_preempted():
    tables, running = make_running(1, 1, 0, free=0)
    shared = running[1].pages[0]
    tables.pool.register(shared, b"key")
    tables.pool.share([shared])
    running[2].pages = [shared]
    assert divide(tables, running, r0=2) == [(0, [2, 1], True)]


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
