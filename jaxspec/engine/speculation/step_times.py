"""Measured seconds of launches, by program and number of drafts."""

from collections import Counter
from typing import NamedTuple

from jaxspec.program.plan import StepShape

# Weight of the newest time in the moving average.
NEWEST = 0.25
# Times are limited to this multiple of the expected one: longer ones are suspensions of
# the machine.
STALL = 4.0
# In the average, a time is limited to this multiple of the known one: otherwise one
# slow round in a hundred would change the choice of K.
MAX_RISE = 1.5
# After this many times in a row that are not typical, the next one is counted although
# it is not typical.
MAX_SKIPPED = 16


class RoundKind(NamedTuple):
    """The program and K of a launch, which determine the time of a round."""

    shape: StepShape
    num_draft_tokens: int = 0


class StepTimes:
    """Exponential moving averages of measured round times, in seconds.

    Attributes:
        seconds: Mean time of each kind of round; known from its second run on.
    """

    def __init__(self):
        self.seconds: dict[RoundKind, float] = {}
        self._has_run: set[RoundKind] = set()
        self._num_skipped = Counter[RoundKind]()

    def seed(self, round_kind: RoundKind, seconds: float) -> None:
        """Record a time measured by calibration."""
        self._has_run.add(round_kind)
        self.seconds[round_kind] = seconds

    def record(
        self,
        round_kind: RoundKind,
        seconds: float,
        expected: float | None = None,
        *,
        is_measure: bool = True,
    ) -> float:
        """Record the device time of a round; the first of its kind is ignored.

        Args:
            expected: Expected seconds, used if no time is known.
            is_measure: The time is typical of such rounds. Other times count only if
                no typical one is known, or after `MAX_SKIPPED` of them in a row.

        Returns:
            The seconds, limited to `STALL` times the expected time.
        """
        known = self.seconds.get(round_kind)
        expected = expected if known is None else known
        if expected is not None:
            seconds = min(seconds, STALL * expected)
        if known is not None:
            self._num_skipped[round_kind] += 1
            if is_measure or self._num_skipped[round_kind] > MAX_SKIPPED:
                self._num_skipped[round_kind] = 0
                newest = min(seconds, MAX_RISE * known)
                self.seconds[round_kind] = NEWEST * newest + (1 - NEWEST) * known
        elif round_kind in self._has_run:
            self.seconds[round_kind] = seconds
        else:
            self._has_run.add(round_kind)
        return seconds

    def expected(self, round_kind: RoundKind) -> float | None:
        """Return a round's time, measured or interpolated between two values of K.

        Returns:
            None if no smaller or no larger K was measured: the cost of more drafts
            than were ever tried is unknown.
        """
        measured = self.seconds.get(round_kind)
        if measured is not None:
            return measured
        shape, num_draft_tokens = round_kind
        known = {
            k: seconds
            for k in range(shape.num_levels + 1)
            if (seconds := self.seconds.get(RoundKind(shape, k))) is not None
        }
        fewer = max((k for k in known if k < num_draft_tokens), default=None)
        more = min((k for k in known if k > num_draft_tokens), default=None)
        if fewer is None or more is None:
            return None
        share = (num_draft_tokens - fewer) / (more - fewer)
        return known[fewer] + share * (known[more] - known[fewer])

    def check(self) -> None:
        """Assert the invariants."""
        assert all(seconds > 0 for seconds in self.seconds.values())
        assert self.seconds.keys() <= self._has_run
