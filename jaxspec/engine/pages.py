"""Which pages of the pool are held, and which are worth finding again.

One page id is row i of every layer's array, of the target and of the draft alike, and
of the known tokens, so there is a single pool. Knows nothing of requests or devices.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

KEY_BYTES = 16


def root_key(kind: str, salt: str) -> bytes:
    """What the keys of all sequences that may share pages begin with."""
    return hashlib.blake2b(f"{kind}:{salt}".encode(), digest_size=KEY_BYTES).digest()


def page_keys(
    parent: bytes, token_ids: Sequence[int], page_size: int
) -> Iterable[bytes]:
    """Keys of the full pages of tokens that follow the page (or root) of key `parent`.

    A key stands for all tokens from the beginning, not for those of its page alone:
    keys and values depend on what came before.
    """
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        tokens = np.array(token_ids[start : start + page_size], np.int32).tobytes()
        parent = hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()
        yield parent


class PagePool:
    """Pages, how many hold each of them, and the keys of full ones.

    A page that nobody holds is free. If it has a key it can still be found, and it is
    handed out only when there is no other, the least recently used first.

    Invariant: a page is free exactly when it has no holder, and is so once.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, findable ones included."""
        return len(self._blank) + len(self._kept)

    @property
    def num_findable(self) -> int:
        """Pages with a key."""
        return len(self._key_of)

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page."""
        return not self._holders[page]

    def take(self, count: int) -> list[int]:
        """Hand out free pages; their keys are forgotten."""
        assert count <= self.num_free, f"{count} pages of {self.num_free} free ones"
        blank = self._blank
        taken = [blank.pop() for _ in range(min(count, len(blank)))]
        while len(taken) < count:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            taken.append(page)
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that were found."""
        for page in pages:
            assert page in self._key_of, f"page {page} was not found by a key"
            self._holders[page] += 1
            self._kept.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages no more; of those that get free the first are reused first."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was freed twice"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._put_back(page)

    def _put_back(self, page: int) -> None:
        if page in self._key_of:
            self._kept[page] = None
        else:
            self._blank.append(page)

    def register(self, page: int, key: bytes) -> bool:
        """Make a held, full page findable; False if one like it is already."""
        assert self._holders[page], f"nobody holds page {page}"
        if key in self._page_of:
            return False
        assert page not in self._key_of, f"page {page} has a key"
        self._key_of[page], self._page_of[key] = key, page
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is None:
                continue
            del self._page_of[key]
            if page in self._kept:
                del self._kept[page]
                self._blank.append(page)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of known keys from the first."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def reset(self) -> bool:
        """Forget all keys; False, and nothing happens, while any page is held."""
        if self.num_free < self.num_pages:
            return False
        self.forget(list(self._key_of))
        return True

    def check(self) -> None:
        """Assert the invariant."""
        free = [*self._blank, *self._kept]
        assert len(set(free)) == len(free), "a page was freed twice"
        held = {page for page, count in enumerate(self._holders) if count}
        assert held.isdisjoint(free), "a held page is free"
        assert len(held) + len(free) == self.num_pages, "a page was lost"
        assert set(self._kept) <= self._key_of.keys(), "a page is kept without a key"
        assert not self._key_of.keys() & set(self._blank), "a findable page is blank"
        assert {key: page for page, key in self._key_of.items()} == self._page_of
