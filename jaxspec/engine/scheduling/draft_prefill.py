"""Draft prefill: launches that give the draft model the keys and values it lacks.

The draft model reads prompts only after the target has read them, so that it does not
delay first tokens. It also reads tokens that were decoded without drafts. This module
decides when such a launch runs and for which rows. It changes state only in
`begin_turn`, `apply_plan`, `commit` and `restart`.
"""

from typing import NamedTuple

import numpy as np

from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.programs import Shapes
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.row_table import RowTable
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.engine.speculation.step_times import RoundKind, StepTimes
from jaxspec.program.plan import NO_TOKEN, TILE, StepPlan, StepShape, Tile
from jaxspec.program.wire import DraftPrefillResult

# Maximum number of consecutive draft prefill launches before the next round.
MAX_IN_A_ROW = 4


class Turn(NamedTuple):
    """Whether draft prefill runs next, and the state that decides it.

    Attributes:
        is_first: Draft prefill is the next launch.
        num_in_a_row: Draft prefill launches since the last round.
        has_yielded: Draft prefill has already let waiting requests go first, which it
            does only once.
        num_admitted_then: Number of requests that had been admitted when more than half
            of the rows last lacked draft prefill.
    """

    is_first: bool = False
    num_in_a_row: int = 0
    has_yielded: bool = False
    num_admitted_then: int = 0


class DraftChunk(NamedTuple):
    """Tokens that the draft model reads of one request.

    Attributes:
        tiles: Tiles to read; pages that another request's tiles fill are left out.
        num_closed: Tokens by which the request's draft lag shrinks.
        end: Number of leading tokens for which the draft model has keys and values
            afterwards.
    """

    request: Request
    tiles: tuple[Tile, ...]
    num_closed: int
    end: int


class DraftPrefillPlan(NamedTuple):
    """The decisions about a draft prefill launch, which `apply_plan` applies.

    Attributes:
        shape: The launch's program; None if none is compiled.
        missing: A better program, to be requested.
        is_probe: Whether the launch only measures acceptance probabilities, while K is
            0.
        num_admitted_then: `Turn.num_admitted_then` after the launch.
    """

    shape: StepShape | None
    missing: StepShape | None
    chunks: tuple[DraftChunk, ...]
    is_probe: bool
    num_admitted_then: int


def can_draft(policy: SpeculationPolicy, rows: RowTable, shapes: Shapes) -> bool:
    """Return whether a program with drafts is compiled for the rows that decode.

    Until then rounds have no drafts, so that the draft model would lack keys and values
    again after each draft prefill.
    """
    decoding, k = rows.decoding, policy.num_draft_tokens
    features = rows.features(decoding)
    side = policy.next_choice.has_side_branches
    found = shapes.find(len(decoding), k, 0, features, has_side_branches=side)
    return found is not None


class DraftPrefill:
    """Decides which launches are draft prefill, and for which rows."""

    def __init__(
        self,
        rows: RowTable,
        tables: PageTables,
        shapes: Shapes,
        policy: SpeculationPolicy,
        step_times: StepTimes,
        acceptance: AcceptanceRates,
    ):
        self._rows, self._tables, self._shapes = rows, tables, shapes
        self._policy, self._step_times = policy, step_times
        self._acceptance = acceptance
        self._turn = Turn()
        self._is_probing = False

    def is_allowed(self, *, may_draft: bool) -> bool:
        """Return whether draft prefill may run now if a row lacks it.

        Args:
            may_draft: Rounds may have drafts now.
        """
        policy = self._policy
        if policy.is_idle or self._shapes.is_draft_prefill_held:
            return False
        if not (may_draft and self._rows.wants_drafts):
            return False
        if policy.is_timing_plain:
            return False  # it would slow down the plain rounds being timed
        return not self._is_probe or (policy.can_probe() and not self._is_probing)

    @property
    def _is_probe(self) -> bool:
        """Whether a launch would only measure acceptance probabilities."""
        return self._policy.is_adaptive and not self._policy.is_drafting

    def next_turn(self, *, may_draft: bool, has_newcomers: bool) -> Turn:
        """Return whether draft prefill is the next launch.

        It alternates with rounds while most sequences have drafts. Otherwise several
        draft prefill launches follow each other: a round without drafts in between
        would make rows lag again that were just prefilled.

        Args:
            may_draft: Rounds may have drafts now.
            has_newcomers: Waiting requests could be admitted: they go first, once.
        """
        rows, turn = self._rows, self._turn
        has_yielded, admitted = turn.has_yielded, turn.num_admitted_then
        if not self.is_allowed(may_draft=may_draft):
            return Turn(False, 0, has_yielded, admitted)
        if not np.count_nonzero(rows.awaits_draft(rows.decoding)):
            return Turn(False, 0, has_yielded, admitted)  # most rounds
        if not self._is_probe and self._shapes.can_draft_prefill:
            # Otherwise a turn requests the program of draft prefill.
            if not can_draft(self._policy, rows, self._shapes):
                return Turn(False, 0, has_yielded, admitted)
        do_most_lag, admitted = self._do_most_lag()
        max_in_a_row = MAX_IN_A_ROW if do_most_lag else 1
        if turn.num_in_a_row >= max_in_a_row or not len(rows.lagging()):
            return Turn(False, 0, has_yielded, admitted)
        has_yielded = has_newcomers and not has_yielded
        return Turn(not has_yielded, turn.num_in_a_row, has_yielded, admitted)

    def begin_turn(self, turn: Turn) -> None:
        """Apply a turn."""
        self._turn = turn

    def plan(
        self, stream_s: float | None, *, may_draft: bool
    ) -> DraftPrefillPlan | None:
        """Plan a launch for the rows that may have drafts; None if none lag.

        With K = 0, the launch is a probe of one row.

        Args:
            stream_s: Longest time it may delay streaming requests; None for no limit.
            may_draft: Rounds may have drafts now.
        """
        if not self.is_allowed(may_draft=may_draft):
            return None
        lagging, is_probe = self._rows.lagging(), self._is_probe
        if is_probe:
            lagging = lagging[~self._acceptance.is_unseeded(lagging)]
            shortest = self._rows.num_draft_uncached[lagging].argsort(kind="stable")
            lagging = lagging[shortest[:1]]
        if not len(lagging):
            return None
        # In the order of admission: later requests do not overtake earlier ones.
        lagging = lagging[self._rows.owner[lagging].argsort()]
        num_tiles, admitted = self._num_tiles(lagging), self._turn.num_admitted_then
        if stream_s is not None:
            do_most_lag, admitted = self._do_most_lag()
            if not do_most_lag:
                num_tiles = min(num_tiles, self._tiles_within(stream_s))
        shape, missing = self._shapes.select_draft_prefill(num_tiles)
        chunks = self._chunks(lagging, shape.num_tiles) if shape is not None else ()
        return DraftPrefillPlan(shape, missing, chunks, is_probe, admitted)

    def _chunks(self, lagging: np.ndarray, num_tiles: int) -> tuple[DraftChunk, ...]:
        """Return the tokens that the draft model reads in one launch.

        Pages that several requests share are filled once, by the first of them.

        Args:
            lagging: Rows whose unread launches all have no drafts, in order.
        """
        rows, tables, completed = self._rows, self._tables, set[int]()
        chunks = list[DraftChunk]()
        for request in rows.owners_of(lagging.tolist()):
            row = request.row
            lag = int(rows.num_draft_uncached[row])
            num_unread = int(rows.num_unread[row])
            # The newest token is left out, because it is the next round's input.
            before = request.num_tokens + num_unread - lag
            end = min(request.num_tokens, request.num_tokens + num_unread - 1)
            start = max(before, min(tables.num_draft_cached(request, completed), end))
            end = min(end, start + num_tiles * TILE)
            tiles = tuple(
                _draft_tile(request, first, min(first + TILE, end))
                for first in range(start, end, TILE)
            )
            num_tiles -= len(tiles)
            draft_end = max(end, start)
            chunks.append(DraftChunk(request, tiles, max(end - before, 0), draft_end))
            completed.update(tables.filled_pages(request, draft_end))
        return tuple(chunks)

    def apply_plan(self, plan: DraftPrefillPlan) -> Launch | None:
        """Apply a plan; return its launch, or None if no program is compiled."""
        self._shapes.request_compile(plan.missing)
        num_in_a_row = self._turn.num_in_a_row + (plan.shape is not None)
        self._turn = self._turn._replace(
            num_in_a_row=num_in_a_row, num_admitted_then=plan.num_admitted_then
        )
        if plan.shape is None:
            return None
        for chunk in plan.chunks:
            self._rows.num_draft_uncached[chunk.request.row] -= chunk.num_closed
            self._tables.complete(chunk.request, chunk.end)
        if plan.is_probe:
            self._is_probing = True
            self._policy.begin_probe()
        return Launch(
            plan=StepPlan(
                tiles=[tile for chunk in plan.chunks for tile in chunk.tiles]
            ),
            shape=plan.shape,
            rows=np.zeros(0, np.int64),
            owners=np.zeros(0, np.int64),
            draft_counts=np.zeros(0, np.int64),
            decoding=[],
            tiled=[chunk.request for chunk in plan.chunks for _ in chunk.tiles],
            registered=[],
            is_probe=plan.is_probe,
        )

    def commit(self, launch: Launch, result: DraftPrefillResult) -> None:
        """Record the acceptance probabilities that a launch returned."""
        for request, probabilities in zip(
            launch.tiled, result.acceptance_probabilities, strict=False
        ):
            if request.row >= 0:
                known = probabilities[probabilities >= 0]
                self._acceptance.record_probabilities(request.row, known)
        self._is_probing &= not launch.is_probe
        self._policy.record_draft_prefill(launch.counted_s, is_probe=launch.is_probe)

    def restart(self) -> None:
        """Reset after a failed launch: launches in flight are lost."""
        self._is_probing = False

    def missing(self, rows: np.ndarray) -> StepShape | None:
        """Return the program to request before all rows can have drafts."""
        rows = rows[self._rows.lags(rows)]
        if not len(rows):
            return None
        return self._shapes.select_draft_prefill(self._num_tiles(rows)).missing

    def seconds_left(self, rows: np.ndarray) -> float:
        """Return the seconds of draft prefill until all rows can have drafts."""
        rows = rows[self._rows.lags(rows)]
        if not len(rows):
            return 0.0
        tiles = self._num_tiles(rows)
        shape = self._shapes.select_draft_prefill(tiles).shape
        if shape is None:
            return 0.0
        fill = min(tiles / shape.num_tiles, 1.0)
        seconds = self._step_times.measured(RoundKind(shape), fill) or 0.0
        return -(-tiles // shape.num_tiles) * seconds

    def _num_tiles(self, rows: np.ndarray) -> int:
        """Return the number of tiles that the draft model lacks for `rows`."""
        return int((-(-(self._rows.num_draft_uncached[rows] - 1) // TILE)).sum())

    def _do_most_lag(self) -> tuple[bool, int]:
        """Return whether draft prefill is still catching up with a backlog.

        A backlog begins when more than half of the decoding rows lack draft prefill. It
        lasts until every request admitted by then has it.

        Returns:
            Whether there is a backlog, and the number of requests that had been
            admitted when more than half of the rows last lagged.
        """
        rows, admitted = self._rows.decoding, self._turn.num_admitted_then
        lagging = rows[self._rows.awaits_draft(rows)]
        if 2 * len(lagging) > len(rows):
            admitted = self._rows.num_admitted
        return bool((self._rows.owner[lagging] < admitted).any()), admitted

    def _tiles_within(self, seconds: float) -> int:
        """Return the tiles of the largest program that takes at most `seconds`."""
        shapes = self._shapes.draft_prefills
        allowed = [
            shape.num_tiles
            for shape in shapes
            if (known := self._step_times.measured(RoundKind(shape))) is not None
            and known <= seconds
        ]
        return max(allowed, default=shapes[0].num_tiles)


def _draft_tile(request: Request, first: int, last: int) -> Tile:
    """Return the tile of a request's known tokens from `first` to before `last`."""
    known = request.tokens(first, min(last + 1, request.num_tokens))
    has_next = len(known) > last - first
    return Tile(
        row=request.row,
        start=first,
        tokens=np.array(known[: last - first], np.int32),
        is_last=False,
        next_token=known[-1] if has_next else NO_TOKEN,
    )
