"""Which pages each request has, and which of earlier ones it can begin with.

Joins requests and the pool. A page may be found by others once the launch that fills it
is planned: the device runs launches in order, and in a launch writes keys and values
before it attends. Target's and draft's must both be complete.
"""

from jaxspec.config import EngineConfig
from jaxspec.engine.pages import PagePool, page_keys, root_key
from jaxspec.engine.request import Request
from jaxspec.engine.stats import EngineStats


class PageTables:
    """Hands pages of one pool to requests."""

    def __init__(self, config: EngineConfig, stats: EngineStats):
        self.pool = PagePool(config.num_pages)
        self.page_size = config.page_size
        self.stats = stats
        self._is_shared = config.enable_prefix_caching

    def count(self, num_tokens: int) -> int:
        """Pages that a number of tokens takes."""
        return -(-num_tokens // self.page_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Pages that a request lacks for its first tokens."""
        return max(self.count(num_tokens) - len(request.pages), 0)

    def find(self, request: Request) -> list[int]:
        """Pages a waiting request can begin with; one token is left to feed."""
        if not request.can_read_prefix_cache:
            return []
        count = (len(request.tokens_to_feed) - 1) // self.page_size
        self._extend_keys(request, count)
        return self.pool.find(request.page_keys[:count])

    def begin(self, request: Request, found: list[int]) -> None:
        """Let a request hold what `find` found for it."""
        assert not request.pages
        self.pool.share(found)
        request.pages = list(found)
        request.num_registered = len(found)
        request.num_fed = len(found) * self.page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_fed
            if request.can_read_prefix_cache and self._root(request) is not None:
                self.stats.num_prefix_queries += len(request.tokens_to_feed)
                self.stats.num_prefix_hits += request.num_fed

    def grow(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]]:
        """Give a request the pages of its first tokens; (row, index, page) of each."""
        have = len(request.pages)
        taken = self.pool.take(self.missing(request, num_tokens))
        request.pages += taken
        return [(request.row, have + i, page) for i, page in enumerate(taken)]

    def register(self, request: Request, num_complete: int) -> list[int]:
        """Make pages findable of which all keys and values are known to be written.

        Args:
            num_complete: First positions for which this holds, of both models.

        Returns:
            The pages that were not findable before.
        """
        first, count = request.num_registered, num_complete // self.page_size
        if count <= first or self._root(request) is None:
            return []
        self._extend_keys(request, count)
        request.num_registered = count
        return [
            request.pages[index]
            for index in range(first, count)
            if self.pool.register(request.pages[index], request.page_keys[index])
        ]

    def give_up(self, request: Request) -> None:
        """Take a request's pages; its last ones are the first to be used again."""
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.num_registered = 0

    def _root(self, request: Request) -> bytes | None:
        """What the keys of a request's pages begin with; None if it shares none."""
        if self._is_shared:
            salt = request.cache_salt
            return root_key("all", "") if salt is None else root_key("salt", salt)
        if request.cache_group is not None:
            return root_key("group", str(request.cache_group))
        return None

    def _extend_keys(self, request: Request, count: int) -> None:
        """Know the keys of a request's first `count` pages, if it shares any."""
        known = request.page_keys
        if len(known) >= count:
            return
        parent = known[-1] if known else self._root(request)
        if parent is None:
            return
        size = self.page_size
        tokens = request.tokens(len(known) * size, count * size)
        known += page_keys(parent, tokens, size)
