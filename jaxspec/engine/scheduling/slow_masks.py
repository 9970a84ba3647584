"""Grammar masks that take long: computed by threads while their rows are held."""

from concurrent import futures

import numpy as np

from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.structured_output import NUM_MASK_THREADS


class SlowMasks:
    """Holds rows whose next mask takes long, until a thread has computed it.

    Inside a launch, all other rows would wait for it.
    """

    def __init__(self, rows: RowTable):
        self._rows = rows
        self._computing: list[futures.Future[None]] = []
        self._threads = futures.ThreadPoolExecutor(NUM_MASK_THREADS, "jaxspec-masks")

    def update(self) -> None:
        """Hold and free rows, and start to compute missing masks."""
        rows = self._rows
        if not np.count_nonzero(rows.has_grammar):
            return  # most rounds
        rows.is_slow[:] = rows.is_held[:] = False
        self._computing.clear()
        for row in np.flatnonzero(rows.has_grammar & rows.is_decoding).tolist():
            (request,) = rows.owners_of([row])
            grammar = request.grammar
            assert grammar is not None
            if not grammar.is_slow:
                continue
            rows.is_slow[row] = rows.is_held[row] = True
            if rows.num_unread[row] > 0:
                continue
            rows.is_held[row] = not grammar.is_ready(
                request.output_token_ids, self._threads
            )
            if rows.is_held[row] and grammar.computing is not None:
                self._computing.append(grammar.computing)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a mask of a held row is there; False if none is computed."""
        if not self._computing:
            return False
        futures.wait(self._computing, timeout_s, futures.FIRST_COMPLETED)
        return True
