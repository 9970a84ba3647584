"""What rounds cost and what drafts bring, as measured while the engine runs.

Owns seconds by program shape, and acceptance by position: of each running request and
of all. Whoever chooses what the next round does reads it here; this decides nothing.
"""

import enum
from collections import Counter
from typing import NamedTuple

import numpy as np

from jaxspec.program.plan import StepShape

# The weight of the newest time.
NEWEST = 0.25
# What a round takes beyond this many times what it should says nothing of its
# shape: the machine stood still.
STALL = 4.0
# After so many times that are no measures another one counts.
MAX_SKIPPED = 16
# Rounds after which an observed acceptance counts half.
HALF_LIFE_ROUNDS = 16
DECAY = 0.5 ** (1 / HALF_LIFE_ROUNDS)
# Observations that a request's own acceptance needs to count as much as the mean of
# all requests, and a position's as much as that of the position before it.
PRIOR_WEIGHT = 4.0
# Acceptance of the first position before any draft was verified: of what only that
# tells about, and of what is watched where nothing is drafted.
PRIOR_RATE = 0.7
WATCHED_PRIOR_RATE = 0.1
ROUNDING = 1e-9


class Kind(enum.IntEnum):
    """How a request samples; a new one begins with the acceptance of its kind."""

    GREEDY = 0
    SEEDED = 1
    SAMPLED = 2


class Round(NamedTuple):
    """What decides how long a launch takes: its program, and the drafts made in it."""

    shape: StepShape
    num_drafts: int = 0


class Costs:
    """Exponentially weighted means of what was measured.

    Invariants: times are positive; at every position `0 <= accepted <= reached`, and
    where rounds are counted whole, none is reached more often than the one before it is
    accepted.

    Attributes:
        seconds: Of a launch; there from its second run on.
        num_compared: Draft tokens that were compared with what the target wants, over
            all requests: verified, up to the first rejection of a round, or asked for
            while nothing was drafted.
        num_agreed: How many of them stayed, or probably would have.
        prior_rate: Acceptance of the first position before anything is known.
    """

    def __init__(
        self, num_rows: int, max_draft_tokens: int, prior_rate: float = PRIOR_RATE
    ):
        self.prior_rate = prior_rate
        self.seconds: dict[Round, float] = {}
        self._has_run: set[Round] = set()
        # Times in a row that were no measures.
        self._num_skipped = Counter[Round]()
        self.num_compared, self.num_agreed = 0, 0.0
        # [row, draft]: rounds that wanted a draft of a position once those before it
        # were accepted, and that accepted it; in the last rows the sums over all
        # requests of a kind.
        self._reached = np.zeros((num_rows + len(Kind), max_draft_tokens))
        self._accepted = np.zeros_like(self._reached)
        self._kind = np.zeros(num_rows, np.int64)
        self._is_typical = np.ones(num_rows, bool)
        # Of each row its newest tokens that were foretold, one after the other.
        self._run = np.zeros(num_rows, np.int64)
        self._first_kind = num_rows
        self._are_whole = True
        # Of the newest rounds of all requests, tokens from the spine and beside it.
        self._kept = np.zeros(2)

    def seed_time(self, round_: Round, seconds: float) -> None:
        """Note what a round takes, measured with nobody waiting for it."""
        self._has_run.add(round_)
        self.seconds[round_] = seconds

    def record_time(
        self,
        round_: Round,
        seconds: float,
        expected: float | None = None,
        *,
        is_measure: bool = True,
    ) -> float:
        """Note how long a round kept the device; the first of its kind is no measure.

        Args:
            expected: What it should have taken, where nothing is known of it.
            is_measure: It says what such rounds take; any other counts while nothing
                is known, and where there are no such measures.

        Returns:
            The seconds without a standstill of the machine.
        """
        known = self.seconds.get(round_)
        expected = expected if known is None else known
        if expected is not None:
            seconds = min(seconds, STALL * expected)
        if known is not None:
            self._num_skipped[round_] += 1
            if is_measure or self._num_skipped[round_] > MAX_SKIPPED:
                self._num_skipped[round_] = 0
                self.seconds[round_] = NEWEST * seconds + (1 - NEWEST) * known
        elif round_ in self._has_run:
            self.seconds[round_] = seconds
        else:
            self._has_run.add(round_)
        return seconds

    def expected_seconds(self, round_: Round) -> float | None:
        """The time of a round, measured or between two measured numbers of drafts.

        Returns:
            None where nothing was measured on one of the two sides: a number of drafts
            beyond all that were tried may cost anything.
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

    def admit(
        self, row: int, kind: Kind = Kind.GREEDY, *, is_typical: bool = True
    ) -> None:
        """Forget what drafts brought to the request that had a row before.

        Args:
            is_typical: What drafts bring to it says something of others.
        """
        self._reached[row] = self._accepted[row] = self._run[row] = 0
        self._kind[row], self._is_typical[row] = kind, is_typical

    def record_acceptance(
        self,
        rows: np.ndarray,
        drafts: np.ndarray,
        accepted: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> None:
        """Count one round; an entry per request.

        Args:
            drafts: Draft tokens that were verified.
            accepted: The first of them, those that stayed.
            wanted: Draft tokens that were to be made, where a lookup may have found
                fewer: what it does not find brings as little as what is rejected.
                Requests for which none were wanted do not count.
        """
        wanted = drafts if wanted is None else wanted
        is_wanted = wanted > 0
        if not is_wanted.any():
            return
        rows, accepted = rows[is_wanted], accepted[is_wanted, None]
        position = np.arange(self._reached.shape[1])
        is_accepted = position < accepted
        # The first draft, and each that follows an accepted one.
        is_reached = position <= accepted
        is_compared = is_reached & (position < drafts[is_wanted, None])
        self.num_compared += int(is_compared.sum())
        self.num_agreed += int(is_accepted.sum())
        is_reached &= position < wanted[is_wanted, None]
        self._add(rows, is_reached, is_accepted)

    def record_foretold(
        self,
        rows: np.ndarray,
        reached: np.ndarray,
        accepted: np.ndarray,
        num_rounds: np.ndarray,
        num_compared: int,
    ) -> None:
        """Count rounds of which it is known what drafts would have brought.

        A round that is under way may be counted in parts.

        Args:
            reached, accepted: [row, position].
            num_rounds: By row.
            num_compared: Drafts, over all rows.
        """
        self._are_whole = False
        self.num_compared += num_compared
        self.num_agreed += float(accepted.sum())
        self._add(rows, reached, accepted, num_rounds)

    def note_runs(self, rows: np.ndarray, runs: np.ndarray) -> None:
        """Say of some rows how many of their newest tokens in a row were foretold."""
        self._run[rows] = runs

    def record_beside(self, accepted: np.ndarray, beside: np.ndarray) -> None:
        """Count what one round has kept of a tree's spine, and beside it."""
        self._kept = DECAY * self._kept + (accepted.sum(), beside.sum())

    @property
    def beside_share(self) -> float:
        """Tokens from beside the spine for each that came from it."""
        accepted, beside = self._kept.tolist()
        return beside / (accepted + PRIOR_WEIGHT)

    def record_likeness(self, row: int, likeness: np.ndarray) -> None:
        """Count tokens that the target made without drafts, each as a first draft.

        Args:
            likeness: How likely a draft in the place of each would have stayed.
        """
        count = len(likeness)
        if not count:
            return
        self.num_compared += count
        self.num_agreed += float(likeness.sum())
        weights = DECAY ** np.arange(count - 1, -1, -1)
        reached, accepted = np.zeros((2, 1, self._reached.shape[1]))
        reached[0, 0], accepted[0, 0] = weights.sum(), weights @ likeness
        # What is known of the others, who were not asked, grows old meanwhile.
        others = self._kind == self._kind[row]
        others[row] = False
        for sums in (self._reached, self._accepted):
            sums[: self._first_kind][others] *= DECAY**count
        self._add(np.array([row]), reached, accepted, num_rounds=count)

    def _add(
        self,
        rows: np.ndarray,
        reached: np.ndarray,
        accepted: np.ndarray,
        num_rounds: int | np.ndarray = 1,
    ) -> None:
        """Add to sums, which grow older by some rounds: one number, or of each row."""
        each = np.zeros(len(rows), np.int64) + num_rounds
        kinds, is_typical = self._kind[rows], self._is_typical[rows]
        for sums, new in ((self._reached, reached), (self._accepted, accepted)):
            sums[rows] = DECAY ** each[:, None] * sums[rows] + new
            for kind in set(kinds[is_typical].tolist()):
                is_one = is_typical & (kinds == kind)
                total = new[is_one].sum(axis=0)
                sums[self._first_kind + kind] *= DECAY ** int(each[is_one].max())
                sums[self._first_kind + kind] += total

    def mean_acceptance(self, kind: Kind = Kind.GREEDY) -> np.ndarray:
        """How likely each draft is accepted once those before it are, of a kind.

        A position that was hardly reached is taken to be like the one before it.

        Returns:
            One rate per draft position.
        """
        rates, rate = np.empty(self._reached.shape[1]), self.prior_rate
        row = self._first_kind + kind
        for position in range(len(rates)):
            reached = self._reached[row, position] + PRIOR_WEIGHT
            rate = (self._accepted[row, position] + PRIOR_WEIGHT * rate) / reached
            rates[position] = rate
        return rates

    def acceptance(self, rows: np.ndarray) -> np.ndarray:
        """The same of the requests in some rows; a new one is like its kind's mean.

        Where the newest tokens were foretold, the next draft is like one that follows
        so many accepted ones: who copies goes on copying.

        Returns:
            [row, position].
        """
        means = np.stack([self.mean_acceptance(kind) for kind in Kind])
        prior = PRIOR_WEIGHT * means[self._kind[rows]]
        rates = (self._accepted[rows] + prior) / (self._reached[rows] + PRIOR_WEIGHT)
        last = rates.shape[1] - 1
        place = np.minimum(self._run[rows, None] + np.arange(last + 1), last)
        return np.take_along_axis(rates, place, axis=1)

    def is_drawn(self, rows: np.ndarray) -> np.ndarray:
        """Which requests in some rows sample without a seed."""
        return self._kind[rows] == Kind.SAMPLED

    def check(self) -> None:
        """Assert the invariants."""
        assert all(seconds > 0 for seconds in self.seconds.values())
        assert self.seconds.keys() <= self._has_run
        assert 0 <= self.num_agreed <= self.num_compared + ROUNDING
        assert (self._accepted >= 0).all()
        assert (self._accepted <= self._reached + ROUNDING).all()
        if self._are_whole:
            assert (self._reached[:, 1:] <= self._accepted[:, :-1] + ROUNDING).all()
