"""Pages of KV memory: reference counts, page tables of requests, the prefix cache.

One pool of page ids serves everything: page i is row i of every layer's arrays, in
target and draft model, and of the array of token ids. Other requests may share a page
once the launch that fills it is planned: the device runs launches in order, and a
launch writes keys and values before it attends. A page may lack the draft model's keys
and values. Host code only.
"""

import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set

import numpy as np

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stats import EngineStats

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


class PagePool:
    """Pages with reference counts, and keys of full pages: the prefix cache.

    A page without holders is free. A free page with a key can still be found. It is
    allocated only after all free pages without a key, the least recently used first.

    Invariant: a page is in a free list, once, exactly when it has no holder.
    """

    def __init__(self, num_pages: int, events: PageEvents | None = None):
        """Make a pool of free pages.

        Args:
            events: Records the pages that can no longer be found.
        """
        self.num_pages, self._events = num_pages, events
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        # Free pages with keys, the least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        # Findable pages that only the target has filled.
        self._undrafted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of pages without holders, findable ones included."""
        return len(self._blank) + len(self._cached)

    def is_free(self, page: int) -> bool:
        """Return whether a page has no holders."""
        return not self._holders[page]

    def take(self, count: int) -> list[int]:
        """Allocate free pages; drop their keys."""
        assert count <= self.num_free, f"{count} pages of {self.num_free} free ones"
        num_left = max(len(self._blank) - count, 0)
        taken = self._blank[num_left:][::-1]  # the one freed last is taken first
        del self._blank[num_left:]
        while len(taken) < count:
            page, _ = self._cached.popitem(last=False)
            self._drop_key(page)
            taken.append(page)
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that `find` returned."""
        for page in pages:
            assert page in self._key_of, f"page {page} was not found by a key"
            self._holders[page] += 1
            self._cached.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one holder of each page; the first ones freed are reused first."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was freed twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._put_back(page)

    def _put_back(self, page: int) -> None:
        if page in self._key_of:
            self._cached[page] = None
        else:
            self._blank.append(page)

    def register(self, page: int, key: bytes, *, is_drafted: bool = True) -> bool:
        """Make a full page in use findable; return False if an equal one already is.

        Args:
            is_drafted: It also has the draft model's keys and values. Such a page
                replaces one that lacks them.
        """
        assert self._holders[page], f"page {page} has no holder"
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

    def num_draft_cached(
        self, pages: Iterable[int], completed: Set[int] = NO_PAGES
    ) -> int:
        """Count the leading pages that the draft model has filled.

        Args:
            completed: Pages filled by the launch that is being planned.
        """
        undrafted = self._undrafted
        is_drafted = (
            page in self._key_of and (page not in undrafted or page in completed)
            for page in pages
        )
        return sum(1 for _ in itertools.takewhile(bool, is_drafted))

    def num_freed(self, pages: Iterable[int], released: Counter[int]) -> int:
        """Count the pages that become free once each page in `pages` loses one holder.

        Args:
            released: Holders already released in the same plan, by page; updated.
        """
        released.update(pages := list(pages))
        return sum(self._holders[page] == released[page] for page in pages)

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
            if page in self._cached:
                del self._cached[page]
                self._blank.append(page)

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
        if self.num_free < self.num_pages:
            return False
        if self._events is not None:
            self._events.cleared()
        self.forget(list(self._key_of))
        return True

    def check(self) -> None:
        """Assert the invariant."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a page was freed twice"
        in_use = {page for page, count in enumerate(self._holders) if count}
        assert in_use.isdisjoint(free), "a page in use is free"
        assert len(in_use) + len(free) == self.num_pages, "a page was lost"
        assert set(self._cached) <= self._key_of.keys(), "a cached page has no key"
        assert not self._key_of.keys() & set(self._blank), "a findable page is blank"
        assert {key: page for page, key in self._key_of.items()} == self._page_of
        assert self._undrafted <= self._key_of.keys(), "an undrafted page has no key"


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
        self.pool, self._events = PagePool(config.num_pages, events), events
        self.page_size = config.page_size
        self.stats = stats
        self._is_shared = config.enable_prefix_caching
        # With a head, a page also depends on the token after it: the head's keys and
        # values come from a token's hidden state and the next token.
        head = config.head_config
        self._num_ahead = int(head is not None and head.has_pages)

    def count(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Return the number of pages that a request lacks for its first tokens."""
        return max(-(-num_tokens // self.page_size) - len(request.pages), 0)

    def reusable_keys(self, request: Request) -> list[bytes]:
        """Return keys of the pages that a waiting request may reuse.

        The last token's page is left out: at least one token must be prefilled, because
        its logits are needed.
        """
        if not request.can_read_prefix_cache:
            return []
        return self.keys(request, (request.num_tokens - 1) // self.page_size)

    def keys(self, request: Request, count: int) -> list[bytes]:
        """Return keys of a request's first `count` pages; none if it shares none."""
        self._extend_keys(request, count)
        return request.page_keys[:count]

    def num_full(self, request: Request, num_complete: int) -> int:
        """Return the number of full pages once the leading positions are written."""
        return min(num_complete, request.num_tokens - self._num_ahead) // self.page_size

    def begin(self, request: Request, cached: list[int]) -> None:
        """Assign a request the pages that were found in the prefix cache."""
        assert not request.pages
        self.pool.share(cached)
        request.pages = list(cached)
        request.num_registered = len(cached)
        request.num_prefilled = len(cached) * self.page_size
        request.num_draft_cached = self.pool.num_draft_cached(cached) * self.page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_prefilled
            if request.can_read_prefix_cache and self._root(request) is not None:
                self.stats.num_prefix_queries += len(request.tokens_to_prefill)
                self.stats.num_prefix_hits += request.num_prefilled

    def grow(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]]:
        """Allocate the pages of a request's first tokens.

        Returns:
            (row, index in the page table, page) of each new page.
        """
        have = len(request.pages)
        taken = self.pool.take(self.missing(request, num_tokens))
        request.pages += taken
        return [(request.row, have + i, page) for i, page in enumerate(taken)]

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
        return [request.pages[index] for index in new]

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
        self.pool.complete(request.pages[: num_draft_cached // self.page_size])

    def num_draft_cached(self, request: Request, completed: Set[int] = NO_PAGES) -> int:
        """Count the leading positions of shared pages that the draft model has filled.

        Args:
            completed: As for `PagePool.num_draft_cached`.
        """
        return self.pool.num_draft_cached(request.pages, completed) * self.page_size

    def release(self, request: Request) -> None:
        """Release a request's pages; the last ones are reused first."""
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.num_registered = 0

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
        self._num_taken = 0
        self._revived, self._evicted = set[int](), set[int]()
        self._oldest = iter(self._pool._cached)
        self._new_keys = set[bytes]()

    @property
    def num_free(self) -> int:
        """Number of pages without holders."""
        return self._pool.num_free - self._num_taken - len(self._revived)

    def grow(self, request: Request, num_tokens: int, num_found: int = 0) -> None:
        """Allocate the pages that a request lacks for its first tokens."""
        have = max(len(request.pages), num_found)
        self._num_taken += max(self._tables.count(num_tokens) - have, 0)
        num_evicted = self._num_taken - len(self._pool._blank)
        while len(self._evicted) < num_evicted:
            page = next(self._oldest)
            if page not in self._revived:
                self._evicted.add(page)

    def register(self, request: Request, first: int, num_complete: int) -> None:
        """Make full pages findable, from index `first` on."""
        count = self._tables.num_full(request, num_complete)
        for key in self._tables.keys(request, count)[first:]:
            if self._find(key) is None:
                self._new_keys.add(key)

    def find(self, request: Request) -> list[int | None]:
        """Return a waiting request's cached pages; None for pages the plan fills."""
        pages = list[int | None]()
        for key in self._tables.reusable_keys(request):
            page = self._find(key)
            if page is None and key not in self._new_keys:
                break
            pages.append(page)
        return pages

    def _find(self, key: bytes) -> int | None:
        page = self._pool._page_of.get(key)
        return None if page in self._evicted else page

    def num_revived(self, cached: Iterable[int | None]) -> int:
        """Count the cached pages that have no holder yet."""
        return len(self._free_of(cached))

    def _free_of(self, cached: Iterable[int | None]) -> set[int]:
        is_free = self._pool.is_free
        return {
            page
            for page in cached
            if page is not None and page not in self._revived and is_free(page)
        }

    def begin(self, request: Request, cached: list[int | None], end: int) -> None:
        """Admit a request whose prompt is prefilled up to a position."""
        self._revived |= self._free_of(cached)
        self.grow(request, end + 1, len(cached))
        self.register(request, len(cached), end)
