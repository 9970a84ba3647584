"""KV events: pages added to and removed from the prefix cache, in order.

Pages that only some requests can find have no events: those of a `cache_salt`, and,
with prefix caching off, those of a `cache_group` (the texts of one request with n > 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PagesStored:
    """Consecutive full pages were added.

    Attributes:
        keys: Key of each page.
        parent: Key of the page before the first; None at the start of a text.
        token_ids: Tokens of all pages, concatenated.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PagesRemoved:
    """Pages were removed."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class PagesCleared:
    """All pages were removed."""


PageEvent = PagesStored | PagesRemoved | PagesCleared


class PageEvents:
    """Events since the last `take`.

    The first event is `PagesCleared`: subscribers drop the pages of an earlier engine
    of the same name.
    """

    def __init__(self):
        self._known: set[bytes] = set()
        self._events: list[PageEvent] = [PagesCleared()]

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int]
    ) -> None:
        """Record a page; merge it with the event of the page before it."""
        self._known.add(key)
        tokens = tuple(token_ids)
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesStored) and last.keys[-1] == parent:
            self._events[-1] = replace(
                last, keys=(*last.keys, key), token_ids=last.token_ids + tokens
            )
        else:
            self._events.append(PagesStored((key,), parent, tokens))

    def removed(self, key: bytes) -> None:
        """Record a removal, if the page was announced."""
        if key not in self._known:
            return
        self._known.discard(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesRemoved):
            self._events[-1] = PagesRemoved((*last.keys, key))
        else:
            self._events.append(PagesRemoved((key,)))

    def cleared(self) -> None:
        """Record that all pages were removed."""
        self._known.clear()
        if not self._events or not isinstance(self._events[-1], PagesCleared):
            self._events.append(PagesCleared())

    def take(self) -> list[PageEvent]:
        """Return the events, and clear them."""
        taken, self._events = self._events, []
        return taken
