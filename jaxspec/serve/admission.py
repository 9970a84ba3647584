"""Owns the set of running requests, and the limits on waiting ones.

The engine's own queue is in another thread. So this class keeps its own count of
admitted, unfinished requests, and checks the limits against it.
"""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jaxspec.serve.errors import OverloadedError
from jaxspec.serve.settings import ServerSettings

MAX_RETRY_S = 60
# Weight of the newest request's duration in the moving average.
_NEWEST_WEIGHT = 0.2


class Admission:
    """Counts the sequences that the engine generates; refuses requests over a limit.

    Attributes:
        num_refused: Number of refused requests and connections, by the exceeded limit
            ("queued_reqs", "queued_tokens" or "connections").
        num_timeouts: Number of requests that did not arrive in time, by the part that
            was late ("headers" or "body").
        num_descriptor_shortages: How often no file descriptor was free.
    """

    def __init__(self, settings: ServerSettings, max_num_seqs: int):
        self._settings, self._max_num_seqs = settings, max_num_seqs
        # Number of prompt tokens of each unfinished sequence, in order of arrival.
        self._texts: dict[int, int] = {}
        self._ids = itertools.count()
        self._running: set[str] = set()
        self._average_s = 1.0
        self.num_refused = {"queued_reqs": 0, "queued_tokens": 0, "connections": 0}
        self.num_timeouts = {"headers": 0, "body": 0}
        self.num_descriptor_shortages = 0

    @property
    def num_requests(self) -> int:
        """Number of running prompts; a beam search counts once per beam."""
        return len(self._running)

    @property
    def request_ids(self) -> list[str]:
        """The engine's ids of the running prompts."""
        return list(self._running)

    @contextmanager
    def admit(
        self, request_ids: list[str], lengths: list[int], num_texts: int
    ) -> Iterator[None]:
        """Count a request as running until the context exits.

        Args:
            request_ids: One per prompt; for a beam search, one per beam.
            lengths: Number of tokens of each prompt.
            num_texts: Sequences to generate for each prompt (`n`).

        Raises:
            OverloadedError: Too many sequences or prompt tokens would wait.
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
            self._average_s += _NEWEST_WEIGHT * (took_s - self._average_s)

    def _check(self, texts: list[int]) -> None:
        settings = self._settings
        max_texts, max_tokens = (
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
        )
        num_waiting = len(self._texts) + len(texts) - self._max_num_seqs
        if num_waiting <= 0:
            return
        if max_texts is not None and num_waiting > max_texts:
            raise self._overloaded("queued_reqs", num_waiting, max_texts)
        if max_tokens is not None:
            all_lengths = (*self._texts.values(), *texts)
            num_tokens = sum(all_lengths[self._max_num_seqs :])
            if num_tokens > max_tokens:
                raise self._overloaded("queued_tokens", num_tokens, max_tokens)

    def _overloaded(self, kind: str, found: int, allowed: int) -> OverloadedError:
        self.num_refused[kind] += 1
        rounds = math.ceil(len(self._texts) / self._max_num_seqs)
        retry_after_s = math.ceil(rounds * self._average_s)
        unit = {"queued_reqs": "texts", "queued_tokens": "prompt tokens"}[kind]
        flag = f"--max-num-{kind.replace('_', '-')}"
        return OverloadedError(
            f"The server is busy: with this request {found} {unit} would wait, but "
            f"at most {allowed} are allowed ({flag}). Try again later.",
            min(max(retry_after_s, 1), MAX_RETRY_S),
        )
