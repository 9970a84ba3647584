"""Owns which requests are running, and how many more may wait.

The engine's own queue is in another thread; what was let in and has not ended is known
here without asking it.
"""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxspec.serve.errors import OverloadedError
from jaxspec.serve.settings import ServerSettings

MAX_RETRY_S = 60
# Share of the newest request's time in the average.
_NEWEST = 0.2


class Admission:
    """Counts the texts that the engine has been asked for.

    Attributes:
        num_refused: Requests that found the queue full, by what it was full of, and
            connections over the limit.
        num_timeouts: Requests that did not arrive in time, by the part that was late.
        num_descriptor_shortages: How often no file descriptor was free.
    """

    def __init__(self, settings: ServerSettings, max_num_seqs: int):
        self._settings, self._max_num_seqs = settings, max_num_seqs
        # Tokens of each text's prompt, first come first.
        self._texts: dict[int, int] = {}
        self._ids = itertools.count()
        self._running: set[str] = set()
        self._average_s = 1.0
        self.num_refused = {"queued_reqs": 0, "queued_tokens": 0, "connections": 0}
        self.num_timeouts = {"headers": 0, "body": 0}
        self.num_descriptor_shortages = 0

    @property
    def num_requests(self) -> int:
        """Prompts that the engine works on; of a beam search, its texts."""
        return len(self._running)

    @property
    def request_ids(self) -> list[str]:
        """What the engine calls them."""
        return list(self._running)

    @contextmanager
    def admit(
        self, request_ids: list[str], lengths: list[int], num_texts: int
    ) -> Iterator[None]:
        """Hold places for a request while it runs.

        Args:
            request_ids: One per prompt; of a beam search, one per text.
            lengths: Tokens of each prompt.
            num_texts: To be made of each.

        Raises:
            OverloadedError: Too many wait already.
        """
        texts = [length for length in lengths for _ in range(num_texts)]
        self._check(texts)
        start = time.monotonic()
        places = [next(self._ids) for _ in texts]
        self._texts.update(zip(places, texts, strict=True))
        self._running.update(request_ids)
        try:
            yield
        finally:
            for place in places:
                del self._texts[place]
            self._running.difference_update(request_ids)
            took_s = time.monotonic() - start
            self._average_s += _NEWEST * (took_s - self._average_s)

    def _check(self, texts: list[int]) -> None:
        settings = self._settings
        most_texts, most_tokens = (
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
        )
        num_waiting = len(self._texts) + len(texts) - self._max_num_seqs
        if num_waiting <= 0:
            return
        if most_texts is not None and num_waiting > most_texts:
            raise self._overloaded("queued_reqs", num_waiting, most_texts)
        if most_tokens is not None:
            everyone = (*self._texts.values(), *texts)
            num_tokens = sum(everyone[self._max_num_seqs :])
            if num_tokens > most_tokens:
                raise self._overloaded("queued_tokens", num_tokens, most_tokens)

    def _overloaded(self, kind: str, found: int, allowed: int) -> OverloadedError:
        self.num_refused[kind] += 1
        rounds = math.ceil(len(self._texts) / self._max_num_seqs)
        retry_after_s = math.ceil(rounds * self._average_s)
        what = {"queued_reqs": "texts", "queued_tokens": "prompt tokens"}[kind]
        return OverloadedError(
            f"The server is busy: with this request {found} {what} would wait, and "
            f"{allowed} may (--max-num-{kind.replace('_', '-')}). Try again later.",
            min(max(retry_after_s, 1), MAX_RETRY_S),
        )
