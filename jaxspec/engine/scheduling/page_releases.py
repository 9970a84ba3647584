"""Releases pages of running requests: local pages behind the window, all at the end.

Full pages are put into the prefix cache first.

A local page (see `kv_cache`) is freed once no later query can see it and a request
needs pages. Only the device knows the number of accepted drafts, so the scheduler takes
lower bounds (`RowTable.oldest_query`): of the tokens that a sequence has after all
launches so far, and of those that the draft model has read, because its draft prefill
reads the rest. A rejected draft changes no lower bound. Launches in flight may still
read a freed page: the launch that writes to it next is planned later, and runs after
them. Worst case, with a window of 4 and pages of 4 tokens: 9 tokens are known and a
launch with 3 drafts is in flight, so the next launch begins with 10 to 13 tokens. Its
oldest query is the token at 8 (the draft model reads the two newest tokens), which sees
5 to 8. Page 0 is freed and page 1 is kept, although with three accepted drafts the
launch reads only page 2 and later.

A request whose draft model lags keeps the local pages that it has not read, while there
are enough pages. When pages are short, the requests with most such pages give up their
drafts, before any request is preempted: a request then takes at most
`EngineConfig.max_local_pages`.
"""

from collections.abc import Sequence

from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.row_table import RowTable


class PageReleaser:
    """Decides which pages running requests no longer need, and releases them.

    Methods take `has_draft_model`: whether a draft model reads the pages too.
    """

    def __init__(self, rows: RowTable, tables: PageTables):
        self._rows, self._tables = rows, tables

    def free_local(
        self, prefilling: Sequence[Request], *, has_draft_model: bool
    ) -> None:
        """Free the local pages that no later launch reads."""
        rows, tables = self._rows, self._tables
        decoding = rows.decoding
        oldest = rows.oldest_query(decoding, has_draft_model=has_draft_model)
        first = tables.first_local_of(oldest)
        is_behind = rows.first_local[decoding] < first
        behind = decoding[is_behind].tolist(), first[is_behind].tolist()
        ends = dict(zip(*behind, strict=True))
        for request in prefilling:
            position = request.num_prefilled
            if has_draft_model and rows.max_draft_tokens[request.row]:
                position = min(position, request.num_draft_cached)
            ends[request.row] = tables.first_local(position)
        for row, end in ends.items():
            (request,) = rows.owners_of([row])
            end = max(end, request.first_local)
            # A later prompt may continue the text. Newer pages are registered later,
            # when the draft model has read them too.
            num_tokens = end * tables.page_size
            self._register(request, num_tokens, has_draft_model=has_draft_model)
            tables.free_behind(request, end)
            rows.first_local[row] = request.first_local

    def give_up_drafts(
        self, prefilling: Sequence[Request], *, has_draft_model: bool
    ) -> bool:
        """Free the local pages that one request keeps for the draft model.

        The request with most of them gets no more drafts.

        Returns:
            False if no request keeps any.
        """
        rows, tables = self._rows, self._tables
        if not (tables.has_local and has_draft_model):
            return False
        first, decoding = rows.first_local.copy(), rows.decoding
        oldest = rows.oldest_query(decoding, has_draft_model=False)
        first[decoding] = tables.first_local_of(oldest)
        for request in prefilling:
            first[request.row] = tables.first_local(request.num_prefilled)
        num_kept = first - rows.first_local
        row = int(num_kept.argmax())
        if num_kept[row] <= 0:
            return False
        rows.max_draft_tokens[row] = 0
        tables.stats.num_given_up += 1
        self.free_local(prefilling, has_draft_model=has_draft_model)
        return True

    def release(self, request: Request, *, has_draft_model: bool) -> None:
        """Release all pages of a request that still has its row.

        A launch in flight may still write to them; the device runs launches in order,
        so the next request that gets them writes later.
        """
        num_tokens = request.num_tokens
        self._register(request, num_tokens, has_draft_model=has_draft_model)
        self._tables.release(request)

    def _register(
        self, request: Request, num_tokens: int, *, has_draft_model: bool
    ) -> None:
        """Put full pages of a decoding request's first tokens into the prefix cache."""
        if request.status is not Status.DECODE:
            return
        # The last token has no keys and values yet, in either model.
        lag = int(self._rows.num_draft_uncached[request.row])
        num_cached = request.num_tokens - lag if has_draft_model else None
        num_complete = min(num_tokens, request.num_tokens - 1)
        self._tables.register(request, num_complete, num_cached)
