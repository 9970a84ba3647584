"""Admits waiting requests: each needs a row, a program, and room for its prompt."""

import functools
import operator
from collections.abc import Sequence

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.scheduling.kv_cache import PageTables, PlannedPages
from jaxspec.engine.scheduling.programs import FIRST_CHUNK, Shapes
from jaxspec.engine.scheduling.request import Request, Status
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.slow_masks import SlowMasks
from jaxspec.engine.scheduling.stages import (
    Admissions,
    Admitted,
    Chunk,
    PageClaims,
    PrefillBudget,
)
from jaxspec.engine.scheduling.waiting_queue import WaitingQueue
from jaxspec.program.plan import MAX_CONTROLLED, TILE, Features, StepShape

NO_ADMISSIONS = Admissions()


def features_with(request: Request, running: Sequence[Request]) -> Features:
    """Return the features of launches once a request runs alongside others."""
    # Runs at each admission: hundreds of requests have few distinct features.
    distinct = {other.features for other in running}
    return functools.reduce(operator.or_, distinct, request.features)


def padded(num_tokens: int) -> int:
    """Round the tokens of a prompt up to whole tiles."""
    return -(-num_tokens // TILE) * TILE


class Admitter:
    """Decides which waiting requests begin to run; writes nothing."""

    def __init__(
        self,
        config: EngineConfig,
        shapes: Shapes,
        tables: PageTables,
        rows: RowTable,
        waiting: WaitingQueue,
        masks: SlowMasks,
    ):
        self._config, self._shapes, self._tables = config, shapes, tables
        self._rows, self._waiting, self._masks = rows, waiting, masks

    def has_program(self, request: Request, running: Sequence[Request]) -> bool:
        """Return whether a compiled program serves a request alongside others."""
        num_seqs = min(len(running) + 1, self._config.max_num_seqs)
        features = features_with(request, running)
        return bool(self._shapes.with_prompts(num_seqs, 0, features))

    def missing_with_drafts(
        self, request: Request, running: Sequence[Request], num_draft_tokens: int
    ) -> list[StepShape | None]:
        """Return the missing programs that an admitted request needs next.

        The first to be compiled is the last one, for rounds without drafts, which run
        until the draft model has read the prompt.
        """
        select, count = self._shapes.select, len(running)
        features = features_with(request, running)
        num_tiles = padded(len(request.tokens_to_prefill)) // TILE
        return [
            select(count, num_draft_tokens, 0, features).missing,
            self._shapes.select_draft_prefill(num_tiles).missing,
            select(count, 0, 0, features, may_request_on_demand=False).missing,
        ]

    def admit(
        self, running: Sequence[Request], budget: PrefillBudget, claims: PageClaims
    ) -> Admissions:
        """Admit from the front of the queue while there are rows, pages and room.

        Requests whose program is not compiled, or whose next mask is not computed, are
        skipped.
        """
        room = budget.num_tiles - sum(chunk.num_tiles for chunk in claims.chunks)
        # Without any program for prompts, the first request names the missing one.
        is_open = not claims.is_tight and (room > 0 or not budget.shapes)
        if not (is_open and self._waiting and self._rows.free):
            return NO_ADMISSIONS
        running, admitted = list(running), list[Admitted]()
        missing, num_controlled = list[StepShape | None](), 0
        num_tiles, lacks_pages = budget.num_tiles - room, False
        pages = promised = None
        while len(admitted) < len(self._rows.free) and (room > 0 or not budget.shapes):
            request = self._next(running, admitted, missing)
            if request is None or request.num_unread:
                break
            num_controlled += request.controls is not None
            if num_controlled > MAX_CONTROLLED:
                break
            # The program for this request's features may have less room for prompts
            # than the one for the requests before it.
            features = features_with(request, running)
            shapes = self._shapes.with_prompts(len(running) + 1, 0, features)
            room = min(room, shapes[-1].num_tiles - num_tiles)
            if room <= 0:
                break
            if pages is None or promised is None:
                pages = PlannedPages(self._tables)
                promised = self._promise(running, claims, pages)
            cached = pages.find(request)
            # `PlanLayout` has room for the pages of one whole sequence.
            own_found = len(cached.pages)
            num_found = sum(entry.num_found for entry in admitted) + own_found
            if num_found > self._config.pages_per_seq:
                break
            # Pages that running requests need next are reserved: without them, the new
            # request would be the next to be preempted.
            all_pages = self._tables.count(request.num_tokens + 1)
            start = own_found * self._config.page_size
            end = min(start + room * TILE, request.num_tokens)
            first_pages = self._tables.count(end + 1)
            needed = self._tables.num_needed(cached, first_pages, all_pages)
            needed += pages.num_revived(cached)
            if needed + promised > pages.num_free:
                lacks_pages = True
                break
            chunk = Chunk(request, start, end)
            pages.begin(request, cached, end)
            is_whole = end == request.num_tokens
            promised += (
                self._tables.num_per_page
                if is_whole
                else self._tables.num_left(cached.first_local, first_pages, all_pages)
            )
            room, num_tiles = room - chunk.num_tiles, num_tiles + chunk.num_tiles
            admitted.append(Admitted(own_found, chunk, cached.first_local))
            running.append(request)
        return Admissions(tuple(admitted), tuple(missing), lacks_pages)

    def _next(
        self,
        running: Sequence[Request],
        admitted: Sequence[Admitted],
        missing: list[StepShape | None],
    ) -> Request | None:
        """Return the first request with a program; add missing programs of others."""
        taken = {id(entry.chunk.request) for entry in admitted}
        for request in self._waiting:
            if id(request) in taken:
                continue
            if self.has_program(request, running):
                if self._masks.is_held(request):
                    continue
                return request
            missing.append(self._missing_program(request, running, taken))
        return None

    def _missing_program(
        self, request: Request, running: Sequence[Request], taken: set[int]
    ) -> StepShape | None:
        """Return the program that a request lacks, with room for all waiting ones."""
        features, max_seqs = features_with(request, running), self._config.max_num_seqs
        waiting = [
            other
            for other in self._waiting
            if id(other) not in taken and features.covers(other.features)
        ]
        num_seqs = min(len(running) + len(waiting), max_seqs)
        tokens = sum(padded(other.num_tokens) for other in waiting[:max_seqs])
        # Until other programs are compiled, this one serves all launches, also those
        # with few tokens.
        tokens = min(tokens, FIRST_CHUNK)
        return self._shapes.select(
            num_seqs, 0, tokens, features, may_request_on_demand=False
        ).missing

    def _promise(
        self, running: Sequence[Request], claims: PageClaims, pages: PlannedPages
    ) -> int:
        """Plan the pages of running requests; return the number they need next.

        That is the rest of every prompt, and one more page per decoding request.
        """
        granted = {grant.request.row: grant.num_tokens for grant in claims.grants}
        ends = {chunk.request.row: chunk.end for chunk in claims.chunks}
        for grant in claims.grants:
            pages.grow(grant.request, grant.num_tokens)
        for chunk in claims.chunks:
            pages.register(chunk.request, chunk.request.num_registered, chunk.end)
        promised = 0
        for request in running:
            length = len(request.tokens_to_prefill)
            is_prefilling = request.status is Status.PREFILL
            if is_prefilling and ends.get(request.row) != length:
                have = self._tables.count(granted.get(request.row, 0))
                promised += self._tables.num_left(
                    request.first_local,
                    max(have, self._tables.num_held(request)),
                    self._tables.count(length + 1),
                )
            else:
                promised += self._tables.num_per_page
        return promised
