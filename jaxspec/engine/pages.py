"""Which pages of the pool belong to whom.

One page id is row i of every layer's array, of the target and of the draft alike, so
there is a single pool. Knows nothing of requests or devices.
"""


class PagePool:
    """Free pages, and a promise of pages to those who were admitted.

    A sequence reserves the pages of its longest form when it is admitted and takes
    them one by one as it grows, so that growing never fails.

    Invariant: `0 <= num_reserved <= num_free <= num_pages`, and no page is free twice.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_reserved = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, reserved ones included."""
        return len(self._free)

    def can_reserve(self, count: int) -> bool:
        """Whether `count` more pages can be promised."""
        return self.num_reserved + count <= len(self._free)

    def reserve(self, count: int) -> None:
        """Promise `count` pages."""
        assert self.can_reserve(count), f"{count} pages over the pool's size"
        self.num_reserved += count

    def take(self, count: int) -> list[int]:
        """Hand out pages that were reserved before."""
        assert count <= self.num_reserved, f"{count} pages were not reserved"
        self.num_reserved -= count
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int], reserved: int) -> None:
        """Take pages back, and give up `reserved` promised ones."""
        self._free.extend(reversed(pages))
        self.num_reserved -= reserved
        self.check()

    def check(self) -> None:
        """Assert the invariant."""
        assert 0 <= self.num_reserved <= len(self._free) <= self.num_pages
        assert len(set(self._free)) == len(self._free), "a page was freed twice"
