"""Grammar masks that take long: threads compute them while their requests are held."""

from collections.abc import Iterable
from concurrent import futures

import numpy as np

from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.structured_output import NUM_MASK_THREADS


class SlowMasks:
    """Holds requests whose next mask takes long, until a thread has computed it.

    Computing it within a launch would delay all other rows.
    """

    def __init__(self, rows: RowTable):
        self._rows = rows
        self._computing: list[futures.Future[None]] = []
        self._held: set[Request] = set()
        self._threads = futures.ThreadPoolExecutor(NUM_MASK_THREADS, "jaxspec-masks")

    def update(self, waiting: Iterable[Request]) -> None:
        """Update the held requests, and start computing missing masks.

        Args:
            waiting: Requests without a row; those with unread launches are skipped.
        """
        rows = self._rows
        self._computing.clear()
        self._held.clear()
        for request in waiting if rows.free else ():
            if not (request.num_unread or self._poll_mask(request)):
                self._held.add(request)
        if not np.count_nonzero(rows.has_grammar):
            return  # the case in most rounds
        rows.is_slow[:] = rows.is_held[:] = False
        for row in np.flatnonzero(rows.has_grammar & rows.is_decoding).tolist():
            (request,) = rows.owners_of([row])
            grammar = request.grammar
            assert grammar is not None
            if not grammar.is_slow:
                grammar.ready = None  # the request may have drafts
                continue
            rows.is_slow[row] = rows.is_held[row] = True
            if rows.num_unread[row] > 0:
                continue
            rows.is_held[row] = not self._poll_mask(request)

    def _poll_mask(self, request: Request) -> bool:
        """Start computing a missing mask; return whether none is missing or slow.

        The request must have no unread launches.
        """
        grammar = request.grammar
        if grammar is None:
            return True
        if not grammar.is_slow:
            grammar.ready = None  # the request may have drafts
            return True
        is_ready = grammar.poll_mask(request.output_token_ids, self._threads)
        if not is_ready and grammar.computing is not None:
            self._computing.append(grammar.computing)
        return is_ready

    def is_held(self, request: Request) -> bool:
        """Return whether a waiting request has to wait for its next mask."""
        return request in self._held

    def wait(self, timeout_s: float) -> bool:
        """Wait until a mask is ready; return False if none is being computed."""
        if not self._computing:
            return False
        futures.wait(self._computing, timeout_s, futures.FIRST_COMPLETED)
        return True
