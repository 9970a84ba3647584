"""What rounds cost and what drafts bring, as measured while the engine runs.

Owns seconds by program shape, and acceptance by position: of each running request and
of all. Whoever chooses what the next round does reads it here; this decides nothing.
"""

import dataclasses

import numpy as np

from jaxspec.program.plan import StepShape

# The weight of the newest time.
NEWEST = 0.25
# What a round takes beyond this many times what it should says nothing of its
# shape: the machine stood still.
STALL = 4.0
# Rounds after which an observed acceptance counts half.
HALF_LIFE_ROUNDS = 64
# Observations that a request's own acceptance needs to count as much as the mean of
# all requests, and a position's as much as that of the position before it.
PRIOR_WEIGHT = 4.0
# Acceptance of the first position before any draft was verified.
PRIOR_RATE = 0.5


class Costs:
    """Exponentially weighted means of what was measured.

    Invariants: times are positive; at every position `0 <= accepted <= reached`, and
    no position is reached more often than the one before it is accepted.

    Attributes:
        seconds: Of a launch, by its shape; there from a shape's second run on.
    """

    def __init__(self, num_rows: int, max_draft_tokens: int):
        self.seconds: dict[StepShape, float] = {}
        self._has_run: set[StepShape] = set()
        # [row + 1, draft]: rounds that reached a position, and that accepted its draft;
        # in the last row the sums over all requests.
        self._reached = np.zeros((num_rows + 1, max_draft_tokens))
        self._accepted = np.zeros_like(self._reached)

    def record_time(
        self, shape: StepShape, seconds: float, expected: float | None = None
    ) -> float:
        """Note how long a round kept the device; a shape's first run is no measure.

        Args:
            expected: What it should have taken, where nothing is known of its shape.

        Returns:
            The seconds without a standstill of the machine.
        """
        known = self.seconds.get(shape)
        expected = expected if known is None else known
        if expected is not None:
            seconds = min(seconds, STALL * expected)
        if shape not in self._has_run:
            self._has_run.add(shape)
        elif known is None:
            self.seconds[shape] = seconds
        else:
            self.seconds[shape] = NEWEST * seconds + (1 - NEWEST) * known
        return seconds

    def expected_seconds(self, shape: StepShape) -> float | None:
        """The time of a round, measured or between two measured numbers of drafts.

        Returns:
            None where nothing was measured on one of the two sides: a number of drafts
            beyond all that were tried may cost anything.
        """
        if shape in self.seconds:
            return self.seconds[shape]
        num_drafts = shape.num_draft_tokens
        known = {
            other.num_draft_tokens: seconds
            for other, seconds in self.seconds.items()
            if dataclasses.replace(other, num_draft_tokens=num_drafts) == shape
        }
        fewer = max((k for k in known if k < num_drafts), default=None)
        more = min((k for k in known if k > num_drafts), default=None)
        if fewer is None or more is None:
            return None
        share = (num_drafts - fewer) / (more - fewer)
        return known[fewer] + share * (known[more] - known[fewer])

    def admit(self, row: int) -> None:
        """Forget what drafts brought to the request that had a row before."""
        self._reached[row] = self._accepted[row] = 0

    def record_acceptance(
        self, rows: np.ndarray, drafts: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Count one round; an entry per request.

        Args:
            drafts: Draft tokens that were verified; requests without any do not count.
            accepted: The first of them, those that stayed.
        """
        has_drafts = drafts > 0
        if not has_drafts.any():
            return
        rows = rows[has_drafts]
        position = np.arange(self._reached.shape[1])
        is_accepted = position < accepted[has_drafts, None]
        # The first draft, and each that follows an accepted one.
        is_reached = position <= accepted[has_drafts, None]
        is_reached &= position < drafts[has_drafts, None]
        decay = 0.5 ** (1 / HALF_LIFE_ROUNDS)
        for sums, new in ((self._reached, is_reached), (self._accepted, is_accepted)):
            sums[rows] = decay * sums[rows] + new
            sums[-1] = decay * sums[-1] + new.sum(axis=0)

    def mean_acceptance(self) -> np.ndarray:
        """How likely each draft is accepted once those before it are, of all requests.

        A position that was hardly reached is taken to be like the one before it.

        Returns:
            One rate per draft position.
        """
        rates, rate = np.empty(self._reached.shape[1]), PRIOR_RATE
        for position in range(len(rates)):
            reached = self._reached[-1, position] + PRIOR_WEIGHT
            rate = (self._accepted[-1, position] + PRIOR_WEIGHT * rate) / reached
            rates[position] = rate
        return rates

    def acceptance(self, rows: np.ndarray) -> np.ndarray:
        """The same of the requests in some rows; a new one is like the mean.

        Returns:
            [row, position].
        """
        prior = PRIOR_WEIGHT * self.mean_acceptance()
        return (self._accepted[rows] + prior) / (self._reached[rows] + PRIOR_WEIGHT)

    def check(self) -> None:
        """Assert the invariants."""
        assert all(seconds > 0 for seconds in self.seconds.values())
        assert self.seconds.keys() <= self._has_run
        assert (self._accepted >= 0).all()
        assert (self._accepted <= self._reached).all()
        assert (self._reached[:, 1:] <= self._accepted[:, :-1]).all()
