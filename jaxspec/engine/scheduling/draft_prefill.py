"""Draft prefill: launches that give the draft model the keys and values it lacks.

The draft model reads prompts after the target has, so that first tokens do not wait for
it, and tokens decoded without drafts. Decides when such a launch runs.
"""

import math

import numpy as np

from jaxspec.engine.scheduling.batch import Launch, plan_draft_prefill
from jaxspec.engine.scheduling.kv_cache import PageTables
from jaxspec.engine.scheduling.rows import RowTable
from jaxspec.engine.scheduling.shapes import Shapes
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.engine.speculation.step_times import Round, StepTimes
from jaxspec.program.plan import TILE

# Launches of draft prefill in a row, at most, before the next round.
MAX_IN_A_ROW = 4


class DraftPrefill:
    """Decides which launches are draft prefill, and of which rows."""

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
        # It takes turns with other launches.
        self._num_in_a_row, self._has_yielded = 0, False
        # Requests admitted when most of them lagged last.
        self._num_admitted_then = 0
        self._is_probing = False

    def is_allowed(self, limit: int) -> bool:
        """Return whether the draft model reads anything now, where a row lags.

        Args:
            limit: Most drafts that a sequence may have.
        """
        policy = self._policy
        if policy.is_idle or not (limit and self._rows.wants_drafts):
            return False
        if policy.is_timing_plain:
            return False  # between plain rounds it would make them slower
        return not self._is_probe or (policy.can_probe() and not self._is_probing)

    @property
    def _is_probe(self) -> bool:
        """Whether it would run only to learn what drafts would bring."""
        return self._policy.is_adaptive and not self._policy.num_drafts

    def take_turn(self, limit: int, *, has_newcomers: bool) -> bool:
        """Return whether it runs before anything else, and count the turn.

        It takes turns with rounds while most sequences have drafts. Otherwise it runs
        several times in a row: after rounds without drafts, rows that have caught up
        would lag again before the last ones have.

        Args:
            has_newcomers: Waiting requests could be admitted: they go first, once.
        """
        rows = self._rows
        is_due = self.is_allowed(limit) and rows.awaits_draft(rows.decoding).any()
        if not is_due:
            self._num_in_a_row = 0  # most rounds
            return False
        most = MAX_IN_A_ROW if self._do_most_lag() else 1
        if self._num_in_a_row >= most or not len(rows.lagging()):
            self._num_in_a_row = 0
            return False
        self._has_yielded = has_newcomers and not self._has_yielded
        return not self._has_yielded

    def plan(self, limit: int, stream_s: float | None) -> Launch | None:
        """Plan a launch for the rows that may have drafts; None where none lag.

        While nothing is drafted, one row is enough to learn what drafts would bring.

        Args:
            stream_s: Seconds that streaming requests may wait for it; None: any.
        """
        if not self.is_allowed(limit):
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
        tiles = self._num_tiles(lagging)
        if stream_s is not None and not self._do_most_lag():
            tiles = min(tiles, self._tiles_within(stream_s))
        shape = self._shapes.catch_up(tiles)
        if shape is None:
            return None
        self._num_in_a_row += 1
        if is_probe:
            self._is_probing = True
            self._policy.begin_probe()
        return plan_draft_prefill(
            self._rows, self._tables, lagging, shape, is_probe=is_probe
        )

    def commit(self, launch: Launch) -> None:
        """Record a launch that has been read."""
        self._is_probing &= not launch.is_probe
        self._policy.record_draft_prefill(launch.seconds, is_probe=launch.is_probe)

    def restart(self) -> None:
        """Forget launches in flight: they are lost."""
        self._is_probing = False

    def seconds_per_round(self, rows: np.ndarray) -> float:
        """Return what it takes before all rows can have drafts, per round left."""
        rows = rows[self._rows.lags(rows)]
        if not len(rows):
            return 0.0
        tiles = self._num_tiles(rows)
        shape = self._shapes.catch_up(tiles)
        if shape is None:
            return 0.0
        seconds = self._step_times.seconds.get(Round(shape), 0.0)
        launches = -(-tiles // shape.num_tiles)
        left = self._rows.max_total[rows] - self._rows.num_tokens[rows]
        return launches * seconds / max(float(left.mean()), 1.0)

    def _num_tiles(self, rows: np.ndarray) -> int:
        """Return the tiles that the draft model lacks of some rows."""
        return int((-(-(self._rows.num_draft_uncached[rows] - 1) // TILE)).sum())

    def _do_most_lag(self) -> bool:
        """Return whether rows lag that were there when more than half of all did."""
        rows = self._rows.decoding
        late = rows[self._rows.awaits_draft(rows)]
        if 2 * len(late) > len(rows):
            self._num_admitted_then = self._rows.num_admitted
        return bool((self._rows.owner[late] < self._num_admitted_then).any())

    def _tiles_within(self, seconds: float) -> int:
        """Return the tiles of the largest program that takes no longer."""
        shapes = self._shapes.catch_ups
        known = [self._step_times.seconds.get(Round(one), math.inf) for one in shapes]
        allowed = [
            shape.num_tiles
            for shape, one in zip(shapes, known, strict=True)
            if one <= seconds
        ]
        return max(allowed, default=shapes[0].num_tiles)
