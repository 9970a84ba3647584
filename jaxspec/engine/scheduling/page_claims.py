"""Divides free pages among running requests, and preempts the last in rank.

Counts only: pages are taken from the pool when the plan is applied.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.prefill_budget import Pacer
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.scheduling.stages import (
    Chunk,
    Decode,
    Grant,
    PageClaims,
    PrefillBudget,
)
from jaxspec.engine.scheduling.waiting_queue import WaitingQueue
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.program.plan import TILE


class PageClaimer:
    """Decides which running requests get pages, and the rounds of the launch."""

    def __init__(
        self,
        rows: RowTable,
        tables: PageTables,
        shapes: Shapes,
        pacer: Pacer,
        waiting: WaitingQueue,
    ):
        self._rows, self._tables, self._shapes = rows, tables, shapes
        self._pacer, self._waiting = pacer, waiting

    def claim(
        self,
        decode: Decode,
        budget: PrefillBudget,
        running: Sequence[Request],
        prefilling: Sequence[Request],
        *,
        has_draft_model: bool,
    ) -> PageClaims:
        """Claim pages for all tokens that the launch may write of running requests."""
        rows, draft_counts = decode.rows, decode.draft_counts
        chunks = chunks_of(prefilling, budget.num_tiles)
        num_rounds = self._num_rounds(decode, running, has_draft_model=has_draft_model)
        claims = self._growing(decode, num_rounds)
        claims += [Grant(chunk.request, chunk.end + 1) for chunk in chunks]
        if has_pages(self._tables, claims):
            return PageClaims(tuple(claims), rows, draft_counts, chunks, num_rounds)
        grants = grant_by_rank(self._tables, claims, running, self._waiting.rank)
        unserved = [grant.request.row for grant in grants if not grant.is_granted]
        unserved += [request.row for grant in grants for request in grant.preempted]
        is_served = ~np.isin(rows, unserved)
        return PageClaims(
            grants,
            rows[is_served],
            draft_counts[is_served],
            tuple(chunk for chunk in chunks if chunk.request.row not in unserved),
            num_rounds,
            is_tight=True,
        )

    def _num_rounds(
        self, decode: Decode, running: Sequence[Request], *, has_draft_model: bool
    ) -> int:
        """Return the number of rounds that the launch may run.

        It is more than one only if the next launches would be equal, and nothing waits
        for the result of the first round: no request for a row, no prompt for its
        prefill, no stream for a token, no row for draft prefill. No request is
        preempted to get pages for more rounds.
        """
        table, rows, shape = self._rows, decode.rows, decode.shape
        if shape is None or shape.max_rounds == 1 or self._waiting:
            return 1
        # Otherwise, some running requests are in prefill, wait for draft prefill, or
        # may have ended.
        is_alone = len(rows) == len(running) and not decode.lacks_drafts
        if (
            not is_alone
            or not table.only_final_output[rows].all()
            or table.is_slow[rows].any()
        ):
            return 1
        if has_draft_model and shape.num_levels and table.lags(rows).any():
            return 1
        round_kind = RoundKind(shape, decode.num_draft_tokens)
        fill = len(rows) / shape.num_seqs
        count = self._pacer.num_rounds(round_kind, shape.max_rounds, fill)
        count = min(count, table.rounds_left(rows, decode.draft_counts))
        while count > 1 and not has_pages(self._tables, self._growing(decode, count)):
            count -= 1
        return count

    def _growing(self, decode: Decode, num_rounds: int) -> list[Grant]:
        """Return the claims of decoding requests that need more pages."""
        table, rows = self._rows, decode.rows
        # The draft model writes this many positions even if the request has fewer
        # drafts. One more is for the target's token, which has a slot but no keys and
        # values yet.
        tree = self._shapes.tree(decode.num_draft_tokens)
        lengths = table.most_tokens(rows) + tree.num_rows
        if num_rounds > 1:
            lengths += (num_rounds - 1) * (decode.draft_counts + 1)
        lengths = np.minimum(lengths, table.longest[rows])
        requests, size = table.owners_of(rows.tolist()), self._tables.page_size
        return [
            Grant(request, length)
            for request, length in zip(requests, lengths.tolist(), strict=True)
            if length > self._tables.num_held(request) * size
        ]


def chunks_of(prefilling: Iterable[Request], num_tiles: int) -> tuple[Chunk, ...]:
    """Return the next parts of prompts in prefill, at most `num_tiles` tiles."""
    chunks = []
    for request in prefilling:
        if num_tiles > 0:
            start = request.num_prefilled
            end = min(start + num_tiles * TILE, len(request.tokens_to_prefill))
            chunks.append(Chunk(request, start, end))
            num_tiles -= chunks[-1].num_tiles
    return tuple(chunks)


def has_pages(tables: PageTables, claims: Iterable[Grant]) -> bool:
    """Return whether the pool has enough pages for all claims."""
    needed = sum(tables.missing(claim.request, claim.num_tokens) for claim in claims)
    return needed <= tables.pool.num_free


def grant_by_rank(
    tables: PageTables,
    claims: Iterable[Grant],
    running: Sequence[Request],
    rank: Callable[[Request], tuple[int, int]],
) -> tuple[Grant, ...]:
    """Divide too few pages: requests are served in order of rank.

    The last in rank are preempted. A request with no other behind it keeps its pages
    and is left out of the launch.
    """
    left, preempted = sorted(running, key=rank), set[int]()
    num_free, released = tables.pool.num_free, Counter[int]()
    grants = list[Grant]()
    for claim in sorted(claims, key=lambda claim: rank(claim.request)):
        request, victims = claim.request, list[Request]()
        if request.row in preempted:
            continue
        missing = tables.missing(request, claim.num_tokens)
        while missing > num_free and rank(left[-1]) > rank(request):
            victims.append(left.pop())
            preempted.add(victims[-1].row)
            num_free += tables.num_freed(victims[-1], released)
        is_granted = missing <= num_free
        num_free -= missing if is_granted else 0
        grants.append(Grant(request, claim.num_tokens, tuple(victims), is_granted))
    return tuple(grants)
