"""Pages of KV memory: reference counts, page tables of requests, the prefix cache.

One pool of page ids serves everything: page i is row i of every layer's arrays, in
target and draft model, and of the array of token ids. Other requests may share a page
once the launch that fills it is planned: the device runs launches in order, and a
launch writes keys and values before it attends. A page may lack the draft model's keys
and values. Host code only.

With `EngineConfig.local_window`, layers with a sliding window (local layers) keep only
their window, in pages and page tables of their own. The pool then allocates units of
`unit_pages` consecutive page ids. A unit holds either

- `unit_pages` global pages: `unit_pages * page_size` tokens in the global layers; or
- one local page: `page_size` tokens in all local layers. Its id is the unit's first.

Both take the same bytes if there are `unit_pages` local layers for each global layer:
the i-th local layer after a global one uses page id + i in the same array. So any free
unit serves either kind, no memory is divided in advance, and no page is ever copied.
(The local layers at the end of a network, which no global layer follows, have arrays of
one page per unit.)

`page_releases` describes when a local page is freed, and why that is safe.

A prefix is found if the cache has all its global pages, and the local pages of the
window before its end; otherwise the longest shorter prefix that has both.
"""

import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.program.plan import PageUpdate

KEY_BYTES = 16
NO_PAGES: Set[int] = frozenset()


def root_key(kind: str, salt: str) -> bytes:
    """Return the parent key of the first pages; sequences with one root share pages."""
    return hashlib.blake2b(f"{kind}:{salt}".encode(), digest_size=KEY_BYTES).digest()


def page_keys(
    parent: bytes, token_ids: Sequence[int], page_size: int, num_ahead: int = 0
) -> Iterable[bytes]:
    """Yield the keys of the full pages that follow the page or root of key `parent`.

    A key identifies all tokens up to the end of its page, not those of the page alone:
    keys and values depend on the tokens before.

    Args:
        num_ahead: Number of tokens after the page on which its contents also depend.
    """
    length = page_size + num_ahead
    for start in range(0, len(token_ids) - length + 1, page_size):
        tokens = np.array(token_ids[start : start + length], np.int32).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()
        yield parent


def local_key(key: bytes) -> bytes:
    """Return the key of the local page of the same tokens."""
    return b"local" + key


class PagePool:
    """Units with reference counts, and keys of full pages: the prefix cache.

    A unit is `unit_pages` pages, which are allocated together; by default one page. It
    is free if none of its pages has a holder. A free unit with a page that has a key
    can still be found. It is allocated only after all free units without keys, the
    least recently used first.

    Invariant: a unit is in a free list, once, exactly when it has no holder.
    """

    def __init__(
        self, num_units: int, events: PageEvents | None = None, unit_pages: int = 1
    ):
        """Make a pool of free units.

        Args:
            events: Records the pages that can no longer be found.
        """
        self.num_units, self._events = num_units, events
        self._unit_pages = unit_pages
        self._holders = [0] * num_units
        self._blank = list(range(num_units - 1, -1, -1))
        # Free units with keys, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # Findable pages that only the target has filled.
        self._undrafted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of units without holders, findable ones included."""
        return len(self._blank) + len(self._cached)

    def unit_of(self, page: int) -> int:
        """Return the unit of a page."""
        return page // self._unit_pages

    def is_free(self, page: int) -> bool:
        """Return whether no page of a page's unit has a holder."""
        return not self._holders[self.unit_of(page)]

    def is_blank(self, page: int) -> bool:
        """Return whether a page's unit is free, and none of its pages can be found."""
        return self.is_free(page) and not self._keyed_pages(self.unit_of(page))

    def take(self, count: int) -> list[int]:
        """Allocate free units, and drop the keys of their pages.

        Returns:
            The first page of each unit, with one holder.
        """
        assert count <= self.num_free, f"{count} units of {self.num_free} free ones"
        num_left = max(len(self._blank) - count, 0)
        taken = self._blank[num_left:][::-1]  # the one freed last is taken first
        del self._blank[num_left:]
        while len(taken) < count:
            unit, _ = self._cached.popitem(last=False)
            for page in self._keyed_pages(unit):
                self._drop_key(page)
            taken.append(unit)
        for unit in taken:
            self._holders[unit] = 1
        return [unit * self._unit_pages for unit in taken]

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to further pages of units that `take` returned."""
        for page in pages:
            assert not self.is_free(page), f"page {page} was not taken"
            self._holders[self.unit_of(page)] += 1

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that `find` returned."""
        for page in pages:
            assert page in self._key_of, f"page {page} was not found by a key"
            unit = self.unit_of(page)
            self._holders[unit] += 1
            self._cached.pop(unit, None)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one holder of each page; the first ones freed are reused first."""
        for page in pages:
            unit = self.unit_of(page)
            assert self._holders[unit] > 0, f"page {page} was freed twice"
            self._holders[unit] -= 1
            if not self._holders[unit]:
                self._put_back(unit)

    def _put_back(self, unit: int) -> None:
        if self._keyed_pages(unit):
            self._cached[unit] = None
        else:
            self._blank.append(unit)

    def _keyed_pages(self, unit: int) -> list[int]:
        first = unit * self._unit_pages
        pages = range(first, first + self._unit_pages)
        return [page for page in pages if page in self._key_of]

    def register(self, page: int, key: bytes, *, is_drafted: bool = True) -> bool:
        """Make a full page in use findable; return False if an equal one already is.

        Args:
            is_drafted: It also has the draft model's keys and values. Such a page
                replaces one that lacks them.
        """
        assert not self.is_free(page), f"page {page} has no holder"
        other = self._page_of.get(key)
        if other is not None:
            if not is_drafted or other not in self._undrafted:
                return False
            if other == page:
                self._undrafted.discard(page)
                return False
            self.forget([other])
        assert page not in self._key_of, f"page {page} has a key"
        self._key_of[page], self._page_of[key] = key, page
        if not is_drafted:
            self._undrafted.add(page)
        return True

    def complete(self, pages: Iterable[int]) -> None:
        """Record that pages have the draft model's keys and values."""
        self._undrafted.difference_update(pages)

    def is_drafted(self, page: int, completed: Set[int] = NO_PAGES) -> bool:
        """Return whether a page is findable, and the draft model has filled it.

        Args:
            completed: Pages filled by the launch that is being planned.
        """
        is_filled = page not in self._undrafted or page in completed
        return page in self._key_of and is_filled

    def num_freed(self, pages: Iterable[int], released: Counter[int]) -> int:
        """Count the units that become free once each page in `pages` loses one holder.

        Args:
            released: Holders already released in the same plan, by unit; updated.
        """
        released.update(units := [self.unit_of(page) for page in pages])
        return sum(self._holders[unit] == released[unit] for unit in set(units))

    def _drop_key(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self._events is not None:
            self._events.removed(key)
        self._undrafted.discard(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable."""
        for page in pages:
            if page not in self._key_of:
                continue
            self._drop_key(page)
            unit = self.unit_of(page)
            if unit in self._cached and not self._keyed_pages(unit):
                del self._cached[unit]
                self._blank.append(unit)

    def has_key(self, key: bytes) -> bool:
        """Return whether a page with this key is in the cache."""
        return key in self._page_of

    def page_of(self, key: bytes) -> int:
        """Return the page with a key."""
        return self._page_of[key]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest prefix of keys that are in the cache."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def reset(self) -> bool:
        """Drop all keys; do nothing and return False while any page is in use."""
        if self.num_free < self.num_units:
            return False
        if self._events is not None:
            self._events.cleared()
        self.forget(list(self._key_of))
        return True

    def check(self) -> None:
        """Assert the invariant."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a unit was freed twice"
        in_use = {unit for unit, count in enumerate(self._holders) if count}
        assert in_use.isdisjoint(free), "a unit in use is free"
        assert len(in_use) + len(free) == self.num_units, "a unit was lost"
        keyed = set(map(self.unit_of, self._key_of))
        assert set(self._cached) <= keyed, "a cached unit has no key"
        assert not keyed & set(self._blank), "a findable unit is blank"
        assert {key: page for page, key in self._key_of.items()} == self._page_of
        assert self._undrafted <= self._key_of.keys(), "an undrafted page has no key"


class CachedPrefix(NamedTuple):
    """The pages of the prefix that a waiting request may reuse.

    A page is None if the plan that is being made fills it.

    Attributes:
        pages: Global pages, from the first.
        first_local: Index of the first local page that the request needs.
        local_pages: Local pages that were found, by index. The others, up to the end of
            the prefix, are new: only the draft model fills and reads them.
    """

    pages: list[int | None]
    first_local: int = 0
    local_pages: Mapping[int, int | None] = {}

    @property
    def num_new_local(self) -> int:
        """Local pages before the end of the prefix that must be allocated."""
        return len(self.pages) - self.first_local - len(self.local_pages)


class NewPages(NamedTuple):
    """Entries of the page tables of requests: global and local pages."""

    pages: list[PageUpdate]
    local_pages: list[PageUpdate]


class PageTables:
    """Assigns pages of one pool to requests."""

    def __init__(
        self,
        config: EngineConfig,
        stats: EngineStats,
        events: PageEvents | None = None,
    ):
        """Make the tables of a new pool.

        Args:
            events: Records which pages can be found; None if KV events are off.
        """
        if events is not None:
            events.cleared()
        self._unit_pages = config.unit_pages or 1
        self.pool = PagePool(config.num_pages, events, self._unit_pages)
        self._events, self.page_size = events, config.page_size
        self.has_local = config.local_window is not None
        self._max_local = config.max_local_pages
        self._units_per_seq = config.units_per_seq
        self._has_draft_model = config.draft_model_config is not None
        # Positions before a query that it sees. The first pass of a parallel draft
        # model computes the keys and values of known tokens again.
        self._reach = (config.local_window or 1) - 1
        speculative = config.speculative
        if speculative is not None and speculative.method_info.is_parallel:
            self._reach += config.max_draft_tokens - 1
        self.stats = stats
        self._is_shared = config.enable_prefix_caching
        # With an EAGLE head, a page also depends on the token after it: the head's keys
        # and values come from a token's hidden state and the next token.
        head = config.head_config
        self._num_ahead = int(head is not None and head.reads_next_token)

    def count(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def num_held(self, request: Request) -> int:
        """Return the number of leading pages that are allocated to a request."""
        return request.local_end if self.has_local else len(request.pages)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Return the number of units that a request lacks for its first tokens."""
        count, have = -(-num_tokens // self.page_size), len(request.pages)
        if not self.has_local:
            return max(count - have, 0)
        return self._num_units(have, count) + max(count - request.local_end, 0)

    def _num_units(self, have: int, count: int) -> int:
        """Return the number of units to take for global pages up to `count`."""
        if count <= have:
            return 0
        return -(-count // self._unit_pages) - have // self._unit_pages

    def num_left(self, first_local: int, have: int, count: int) -> int:
        """Return the maximum number of units that a prompt of `count` pages needs.

        Args:
            have: Pages for which it has units, from local page `first_local` on.
        """
        if not self.has_local:
            return max(count - have, 0)
        have = min(have, count)
        unit = self._unit_pages
        num_local = min(count - first_local, self._max_local) - (have - first_local)
        return -(-count // unit) - -(-have // unit) + max(num_local, 0)

    def num_needed(self, cached: CachedPrefix, first_count: int, count: int) -> int:
        """Return the maximum number of units that a new request of `count` pages needs.

        Cached pages without holders are not counted.

        Args:
            first_count: Pages of the first part of its prompt.
        """
        num_found = len(cached.pages)
        if not self.has_local:
            return count - num_found
        num_local = min(count - cached.first_local, self._max_local)
        num_local = max(
            num_local - len(cached.local_pages),
            cached.num_new_local + first_count - num_found,
        )
        return self._num_units(num_found, count) + num_local

    @property
    def num_per_page(self) -> int:
        """Units that a request takes at most when it grows by one page."""
        return 1 + self.has_local

    def first_local(self, position: int) -> int:
        """Return the index of the first local page that a query at `position` sees."""
        return max(position - self._reach, 0) // self.page_size

    def first_local_of(self, positions: np.ndarray) -> np.ndarray:
        """Return `first_local` of many positions."""
        return np.maximum(positions - self._reach, 0) // self.page_size

    def reusable_keys(self, request: Request) -> list[bytes]:
        """Return keys of the pages that a waiting request may reuse.

        The last token's page is left out: at least one token must be prefilled, because
        its logits are needed.
        """
        if not request.can_read_prefix_cache:
            return []
        return self.keys(request, (request.num_tokens - 1) // self.page_size)

    def cached_prefix(
        self,
        request: Request,
        count: int | None = None,
        first_local: int | None = None,
        *,
        has_key: Callable[[bytes], bool] | None = None,
        page_of: Callable[[bytes], int | None] | None = None,
    ) -> CachedPrefix:
        """Return the longest prefix of a waiting request that is in the cache.

        Args:
            count: Maximum number of pages.
            first_local: Index of the first local page, if it has been decided.
            has_key, page_of: Look up a key; by default in the pool.
        """
        has_key, page_of = has_key or self.pool.has_key, page_of or self.pool.page_of
        keys = self.reusable_keys(request)[:count]
        keys = keys[: self._num_found(keys, has_key)]
        pages = [page_of(key) for key in keys]
        if not self.has_local:
            return CachedPrefix(pages)
        # The pages may come from many requests, and then take more units than a
        # sequence's own pages would: one sequence must always fit the pool.
        units = {page if page is None else self.pool.unit_of(page) for page in pages}
        num_units = len(units - {None}) + pages.count(None)
        num_more = num_units - -(-len(pages) // self._unit_pages)
        room = self.pool.num_units - self._units_per_seq - num_more
        if room < 0:
            return CachedPrefix([])
        first = self.first_local(len(keys) * self.page_size)
        if self._has_draft_model and request.max_draft_tokens:
            num_filled = self._num_found(
                keys, lambda key: has_key(key) and self._is_drafted(page_of(key))
            )
            needed = self.first_local(num_filled * self.page_size)
            # Without room, the request gets no drafts.
            first = needed if first - needed <= room else first
        if first_local is not None:
            first = first_local
        local = {
            index: page_of(local_key(keys[index]))
            for index in range(first, len(keys))
            if has_key(local_key(keys[index]))
        }
        return CachedPrefix(pages, first, local)

    def _is_drafted(self, page: int | None) -> bool:
        return page is not None and self.pool.is_drafted(page)

    def _num_found(self, keys: list[bytes], has_key: Callable[[bytes], bool]) -> int:
        """Return the length of the longest prefix whose keys are all in the cache.

        That is the keys of its global pages, and those of the local pages that the
        query after it sees.
        """
        count = sum(1 for _ in itertools.takewhile(has_key, keys))
        while self.has_local and count:
            window = range(self.first_local(count * self.page_size), count)
            missing = [one for one in window if not has_key(local_key(keys[one]))]
            if not missing:
                break
            # The windows of all longer prefixes have this page too.
            count = missing[-1]
        return count

    def keys(self, request: Request, count: int) -> list[bytes]:
        """Return keys of a request's first `count` pages; none if it shares none."""
        self._extend_keys(request, count)
        return request.page_keys[:count]

    def num_full(self, request: Request, num_complete: int) -> int:
        """Return the number of full pages once the leading positions are written."""
        return min(num_complete, request.num_tokens - self._num_ahead) // self.page_size

    def begin(
        self, request: Request, num_found: int, first_local: int | None = None
    ) -> NewPages:
        """Assign a request the first pages that are found in the prefix cache.

        Args:
            first_local: As for `cached_prefix`.
        """
        assert not request.pages and not request.local_pages
        cached = self.cached_prefix(request, num_found, first_local)
        assert len(cached.pages) == num_found, "a planned page was evicted"
        global_pages = [page for page in cached.pages if page is not None]
        local = {
            index: page
            for index, page in cached.local_pages.items()
            if page is not None
        }
        self.pool.share([*global_pages, *local.values()])
        new = iter(self.pool.take(cached.num_new_local if self.has_local else 0))
        request.pages, request.first_local = global_pages, cached.first_local
        if self.has_local:
            request.local_pages = [
                local[index] if index in local else next(new)
                for index in range(cached.first_local, num_found)
            ]
        request.num_registered = num_found
        request.num_prefilled = num_found * self.page_size
        request.num_draft_cached = self.num_draft_cached(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_prefilled
            if request.can_read_prefix_cache and self._root(request) is not None:
                self.stats.num_prefix_queries += len(request.tokens_to_prefill)
                self.stats.num_prefix_hits += request.num_prefilled
        return self._updates(request, 0, cached.first_local)

    def grow(self, request: Request, num_tokens: int) -> NewPages:
        """Allocate the pages of a request's first tokens; return the new ones."""
        have, count = len(request.pages), self.count(num_tokens)
        for first in self.pool.take(self._num_units(have, count)):
            # After a prefix hit, the first unit may begin in its middle.
            start = len(request.pages) % self._unit_pages
            pages = range(first + start, first + self._unit_pages)
            self.pool.hold(pages[1:])
            request.pages += pages
        local_end = request.local_end
        if self.has_local:
            request.local_pages += self.pool.take(max(count - local_end, 0))
        return self._updates(request, have, local_end)

    def _updates(self, request: Request, first: int, first_local: int) -> NewPages:
        """Return the entries of a request's page tables from these indices on."""
        row, num_skipped = request.row, first_local - request.first_local
        pages, local = request.pages[first:], request.local_pages[num_skipped:]
        return NewPages(
            [(row, index, page) for index, page in enumerate(pages, first)],
            [(row, index, page) for index, page in enumerate(local, first_local)],
        )

    def lacks_local(self, request: Request) -> bool:
        """Return whether a new request lacks pages that its draft model would read."""
        needed = self.first_local(request.num_draft_cached)
        return self.has_local and request.first_local > needed

    def free_behind(self, request: Request, first_local: int) -> None:
        """Free a request's local pages before index `first_local`."""
        count = first_local - request.first_local
        assert 0 <= count <= len(request.local_pages), (count, request)
        self.pool.release(request.local_pages[:count])
        del request.local_pages[:count]
        request.first_local = first_local

    def register(
        self, request: Request, num_complete: int, num_draft_cached: int | None = None
    ) -> list[int]:
        """Put full pages into the prefix cache.

        Args:
            num_complete: Leading positions whose keys and values are written, or will
                be by a launch.
            num_draft_cached: The same for the draft model; None without one.

        Returns:
            The pages that were not findable before.
        """
        first, count = request.num_registered, self.num_full(request, num_complete)
        if count <= first or self._root(request) is None:
            return []
        self._extend_keys(request, count)
        request.num_registered = count
        num_drafted = count
        if num_draft_cached is not None:
            num_drafted = num_draft_cached // self.page_size
        new = [
            index
            for index in range(first, count)
            if self.pool.register(
                request.pages[index],
                request.page_keys[index],
                is_drafted=index < num_drafted,
            )
        ]
        self._record(request, new)
        local = [
            page
            for index, page in self._local_pages(request, first, count)
            if self.pool.register(
                page,
                local_key(request.page_keys[index]),
                is_drafted=index < num_drafted,
            )
        ]
        return [request.pages[index] for index in new] + local

    def _local_pages(
        self, request: Request, first: int, end: int
    ) -> list[tuple[int, int]]:
        """Return (index, page) of a request's local pages at indices in a range."""
        skipped = max(first - request.first_local, 0)
        stop = max(end - request.first_local, 0)
        pages = request.local_pages[skipped:stop]
        return list(enumerate(pages, request.first_local + skipped))

    def _record(self, request: Request, indices: Iterable[int]) -> None:
        """Record events for pages that any request with this prefix can find."""
        is_for_all = request.cache_salt is None and self._is_shared
        if self._events is None or not is_for_all:
            return
        keys, size = request.page_keys, self.page_size
        for index in indices:
            parent = keys[index - 1] if index else None
            tokens = request.tokens(index * size, (index + 1) * size)
            self._events.stored(keys[index], parent, tokens)

    def complete(self, request: Request, num_draft_cached: int) -> None:
        """Record the number of leading positions that the draft model has filled."""
        self.pool.complete(self.filled_pages(request, num_draft_cached))

    def filled_pages(self, request: Request, num_tokens: int) -> list[int]:
        """Return the pages of both kinds that the leading positions fill."""
        count = num_tokens // self.page_size
        local = self._local_pages(request, 0, count)
        return request.pages[:count] + [page for _, page in local]

    def num_draft_cached(self, request: Request, completed: Set[int] = NO_PAGES) -> int:
        """Count the leading positions of shared pages that the draft model has filled.

        Args:
            completed: As for `PagePool.is_drafted`.
        """

        def is_drafted(page: int) -> bool:
            return self.pool.is_drafted(page, completed)

        count = sum(1 for _ in itertools.takewhile(is_drafted, request.pages))
        while self.has_local and count:
            first = self.first_local(count * self.page_size)
            if first < request.first_local:
                return 0
            missing = [
                index
                for index, page in self._local_pages(request, first, count)
                if not is_drafted(page)
            ]
            if not missing:
                break
            count = missing[-1]
        return count * self.page_size

    def forget(self, request: Request) -> None:
        """Remove the pages of a request, also former local ones, from the cache."""
        self.pool.forget(request.pages)
        keys = map(local_key, request.page_keys if self.has_local else ())
        found = [self.pool.page_of(key) for key in keys if self.pool.has_key(key)]
        self.pool.forget(found)

    def num_freed(self, request: Request, released: Counter[int]) -> int:
        """Count the units that become free once a request is preempted.

        Args:
            released: As for `PagePool.num_freed`.
        """
        return self.pool.num_freed([*request.pages, *request.local_pages], released)

    def release(self, request: Request) -> None:
        """Release a request's pages; the last ones are reused first."""
        self.pool.release(reversed(request.pages))
        self.pool.release(reversed(request.local_pages))
        request.pages, request.local_pages = [], []
        request.num_registered = request.first_local = 0

    def _root(self, request: Request) -> bytes | None:
        """Return the root key of a request's pages; None if it shares none."""
        if self._is_shared:
            salt = request.cache_salt
            return root_key("all", "") if salt is None else root_key("salt", salt)
        if request.cache_group is not None:
            return root_key("group", str(request.cache_group))
        return None

    def _extend_keys(self, request: Request, count: int) -> None:
        """Compute the keys of a request's first `count` pages, if it shares any."""
        known = request.page_keys
        if len(known) >= count:
            return
        parent = known[-1] if known else self._root(request)
        if parent is None:
            return
        size = self.page_size
        ahead = self._num_ahead
        tokens = request.tokens(len(known) * size, count * size + ahead)
        known += page_keys(parent, tokens, size, ahead)


class PlannedPages:
    """The state of the pool after a plan; does not write to the pool.

    Pages are allocated as in `PagePool.take`: pages without keys, then the least
    recently used findable ones, which lose their keys. Keys of pages that the plan
    fills can be found.
    """

    def __init__(self, tables: PageTables):
        self._tables, self._pool = tables, tables.pool
        # A number of units, and sets of units.
        self._num_taken = 0
        self._revived, self._evicted = set[int](), set[int]()
        self._oldest = iter(self._pool._cached)
        self._new_keys = set[bytes]()

    @property
    def num_free(self) -> int:
        """Number of units without holders."""
        return self._pool.num_free - self._num_taken - len(self._revived)

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the pages that a request lacks for its first tokens."""
        self._take(self._tables.missing(request, num_tokens))

    def _take(self, count: int) -> None:
        self._num_taken += count
        num_evicted = self._num_taken - len(self._pool._blank)
        while len(self._evicted) < num_evicted:
            unit = next(self._oldest)
            if unit not in self._revived:
                self._evicted.add(unit)

    def register(self, request: Request, first: int, num_complete: int) -> None:
        """Make full pages findable, from index `first` on."""
        count = self._tables.num_full(request, num_complete)
        for index, key in enumerate(self._tables.keys(request, count)[first:], first):
            if self._find(key) is None:
                self._new_keys.add(key)
            is_local = self._tables.has_local and index >= request.first_local
            if is_local and self._find(local_key(key)) is None:
                self._new_keys.add(local_key(key))

    def find(self, request: Request) -> CachedPrefix:
        """Return a waiting request's cached pages; None for pages the plan fills."""
        return self._tables.cached_prefix(
            request,
            has_key=lambda key: self._find(key) is not None or key in self._new_keys,
            page_of=self._find,
        )

    def _find(self, key: bytes) -> int | None:
        page = self._pool._page_of.get(key)
        if page is None or self._pool.unit_of(page) in self._evicted:
            return None
        return page

    def num_revived(self, cached: CachedPrefix) -> int:
        """Count the units of cached pages that have no holder yet."""
        return len(self._free_of(cached))

    def _free_of(self, cached: CachedPrefix) -> set[int]:
        is_free, unit_of = self._pool.is_free, self._pool.unit_of
        units = {
            unit_of(page)
            for page in (*cached.pages, *cached.local_pages.values())
            if page is not None and is_free(page)
        }
        return units - self._revived

    def begin(self, request: Request, cached: CachedPrefix, end: int) -> None:
        """Admit a request whose prompt is prefilled up to a position."""
        self._revived |= self._free_of(cached)
        num_found, count = len(cached.pages), self._tables.count(end + 1)
        if self._tables.has_local:
            self._take(cached.num_new_local)
            self._take(max(count - num_found, 0))
        self._take(self._tables._num_units(num_found, count))
        self.register(request, num_found, end)
