"""Pages that came into the prefix cache and left it, in their order.

Left out are pages that only some requests can find: those of a `cache_salt`, and, where
prefix caching is off, those of a `cache_group`, the texts of one request (n above 1).
Knows nothing of who wants to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PagesStored:
    """Full pages, one after the other, that can be found.

    Attributes:
        keys: Of each page.
        parent: Key of the page before the first; None: they begin a text.
        token_ids: Of all of them together.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class PagesRemoved:
    """Pages that cannot be found any more."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class PagesCleared:
    """No page can be found any more."""


PageEvent = PagesStored | PagesRemoved | PagesCleared


class PageEvents:
    """What happened since the last look.

    It begins with `PagesCleared`: whoever knew an engine of this name before is told
    that its pages are gone.
    """

    def __init__(self):
        self._known: set[bytes] = set()
        self._events: list[PageEvent] = [PagesCleared()]

    def stored(
        self, key: bytes, parent: bytes | None, token_ids: Sequence[int]
    ) -> None:
        """Note a page; one that follows the page before it is told with that one."""
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
        """Note that a page is gone, if anybody was told of it."""
        if key not in self._known:
            return
        self._known.discard(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, PagesRemoved):
            self._events[-1] = PagesRemoved((*last.keys, key))
        else:
            self._events.append(PagesRemoved((key,)))

    def cleared(self) -> None:
        """Note that all pages are gone."""
        self._known.clear()
        if not self._events or not isinstance(self._events[-1], PagesCleared):
            self._events.append(PagesCleared())

    def take(self) -> list[PageEvent]:
        """Return what happened, and forget it."""
        taken, self._events = self._events, []
        return taken
