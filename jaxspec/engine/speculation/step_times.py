"""Measured seconds of launches, by program and number of drafts."""

from collections import Counter
from typing import NamedTuple

from jaxspec.program.plan import StepShape

# Weight of the newest time in the moving average.
NEWEST = 0.25
# A time is cut to this many times the expected one: the machine was suspended.
STALL = 4.0
# In the average a time counts as at most this many times the known one: a slow round in
# a hundred would otherwise change the choice of K.
MAX_RISE = 1.5
# After this many times in a row that are not measurements, one counts as such.
MAX_SKIPPED = 16


class Round(NamedTuple):
    """What decides how long a launch takes: its program, and the drafts made in it."""

    shape: StepShape
    num_drafts: int = 0


class StepTimes:
    """Exponentially weighted means of measured seconds; all are positive.

    Attributes:
        seconds: Of a round; known from its second run on.
    """

    def __init__(self):
        self.seconds: dict[Round, float] = {}
        self._has_run: set[Round] = set()
        self._num_skipped = Counter[Round]()

    def seed(self, round_: Round, seconds: float) -> None:
        """Record a time measured by calibration."""
        self._has_run.add(round_)
        self.seconds[round_] = seconds

    def record(
        self,
        round_: Round,
        seconds: float,
        expected: float | None = None,
        *,
        is_measure: bool = True,
    ) -> float:
        """Record how long a round kept the device; ignore the first of its kind.

        Args:
            expected: Seconds expected of it, used where no time is known.
            is_measure: The time is typical of such rounds; another time counts only
                where no typical one is known.

        Returns:
            The seconds, without a suspension of the machine.
        """
        known = self.seconds.get(round_)
        expected = expected if known is None else known
        if expected is not None:
            seconds = min(seconds, STALL * expected)
        if known is not None:
            self._num_skipped[round_] += 1
            if is_measure or self._num_skipped[round_] > MAX_SKIPPED:
                self._num_skipped[round_] = 0
                newest = min(seconds, MAX_RISE * known)
                self.seconds[round_] = NEWEST * newest + (1 - NEWEST) * known
        elif round_ in self._has_run:
            self.seconds[round_] = seconds
        else:
            self._has_run.add(round_)
        return seconds

    def expected(self, round_: Round) -> float | None:
        """Return a round's time, measured or interpolated between two values of K.

        Returns:
            None where no smaller or no larger K was measured: more drafts than were
            ever tried may cost anything.
        """
        found = self.seconds.get(round_)
        if found is not None:
            return found
        shape, num_drafts = round_
        known = {
            k: seconds
            for k in range(shape.num_draft_tokens + 1)
            if (seconds := self.seconds.get(Round(shape, k))) is not None
        }
        fewer = max((k for k in known if k < num_drafts), default=None)
        more = min((k for k in known if k > num_drafts), default=None)
        if fewer is None or more is None:
            return None
        share = (num_drafts - fewer) / (more - fewer)
        return known[fewer] + share * (known[more] - known[fewer])

    def check(self) -> None:
        """Assert the invariants."""
        assert all(seconds > 0 for seconds in self.seconds.values())
        assert self.seconds.keys() <= self._has_run
