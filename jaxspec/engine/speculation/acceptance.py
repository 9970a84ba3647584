"""Acceptance rates of drafts by position: of each running request and of all."""

import enum

import numpy as np

from jaxspec.engine.speculation.constants import CONSTANTS

DECAY = 0.5 ** (1 / CONSTANTS.half_life_rounds)
ROUNDING = 1e-9


class Kind(enum.IntEnum):
    """How a request samples; a new request starts with the rates of its kind."""

    GREEDY = 0
    SEEDED = 1
    SAMPLED = 2


class AcceptanceRates:
    """Exponentially weighted counts of drafts that were reached and accepted.

    A draft is reached in rounds that accepted all drafts before it. Invariants: at
    every position `0 <= accepted <= reached`; if rounds are counted whole, a position
    is reached at most as often as the position before it is accepted.

    Attributes:
        num_compared: Draft tokens compared with the target's, over all requests:
            verified, up to the first rejection of a round, or estimated while nothing
            is drafted.
        num_agreed: Number of them that were accepted, or would have been.
        prior: Assumed acceptance rate of the first position before any measurement.
    """

    def __init__(
        self,
        num_rows: int,
        max_draft_tokens: int,
        prior: float = CONSTANTS.prior_acceptance,
    ):
        self.prior = prior
        self.num_compared, self.num_agreed = 0, 0.0
        # [row, position]; the last rows are sums over all requests of a kind.
        self._reached = np.zeros((num_rows + len(Kind), max_draft_tokens))
        self._accepted = np.zeros_like(self._reached)
        self._kind = np.zeros(num_rows, np.int64)
        self._is_typical = np.ones(num_rows, bool)
        # Number of each row's newest tokens that a lookup predicted without a miss.
        self._run = np.zeros(num_rows, np.int64)
        self._first_kind = num_rows
        self._are_whole = True
        # Tokens of recent rounds from the main chain and from side branches.
        self._num_accepted = np.zeros(2)

    def admit(
        self, row: int, kind: Kind = Kind.GREEDY, *, is_typical: bool = True
    ) -> None:
        """Start a request in a row: forget the rates of the request before it.

        Args:
            is_typical: Whether the request's rates are representative of other
                requests.
        """
        self._reached[row] = self._accepted[row] = self._run[row] = 0
        self._kind[row], self._is_typical[row] = kind, is_typical

    def record(
        self,
        rows: np.ndarray,
        draft_counts: np.ndarray,
        accepted: np.ndarray,
        requested: np.ndarray | None = None,
    ) -> None:
        """Count one round; an entry per request.

        Args:
            draft_counts: Draft tokens that were verified.
            accepted: Number of them that were accepted.
            requested: Draft tokens that were requested; a lookup may have found fewer.
                A draft that is not found counts as a rejected one. Requests with none
                requested do not count.
        """
        requested = draft_counts if requested is None else requested
        is_requested = requested > 0
        if not is_requested.any():
            return
        rows, accepted = rows[is_requested], accepted[is_requested, None]
        position = np.arange(self._reached.shape[1])
        is_accepted = position < accepted
        # The first draft, and each that follows an accepted one.
        is_reached = position <= accepted
        is_compared = is_reached & (position < draft_counts[is_requested, None])
        self.num_compared += int(is_compared.sum())
        self.num_agreed += int(is_accepted.sum())
        is_reached &= position < requested[is_requested, None]
        self._add(rows, is_reached, is_accepted)

    def record_predicted(
        self,
        rows: np.ndarray,
        reached: np.ndarray,
        accepted: np.ndarray,
        num_rounds: np.ndarray,
        num_compared: int,
    ) -> None:
        """Count plain rounds for which a lookup's drafts are known.

        A round may be counted in parts.

        Args:
            reached, accepted: [row, position].
            num_rounds: By row.
            num_compared: Drafts, over all rows.
        """
        self._are_whole = False
        self.num_compared += num_compared
        self.num_agreed += float(accepted.sum())
        self._add(rows, reached, accepted, num_rounds)

    def set_match_runs(self, rows: np.ndarray, runs: np.ndarray) -> None:
        """Set the number of newest tokens that a lookup predicted in a row."""
        self._run[rows] = runs

    def record_side_branches(self, accepted: np.ndarray, side: np.ndarray) -> None:
        """Count one round's tokens from the main chain and from side branches."""
        self._num_accepted = DECAY * self._num_accepted + (accepted.sum(), side.sum())

    @property
    def side_tokens(self) -> float:
        """Tokens from side branches for each token of the main chain."""
        accepted, side = self._num_accepted.tolist()
        return side / (accepted + CONSTANTS.prior_weight)

    def record_probabilities(self, row: int, probabilities: np.ndarray) -> None:
        """Count tokens that were generated without drafts, each as a first draft.

        Args:
            probabilities: Probability that a draft in place of each token would have
                been accepted.
        """
        count = len(probabilities)
        if not count:
            return
        self.num_compared += count
        self.num_agreed += float(probabilities.sum())
        weights = DECAY ** np.arange(count - 1, -1, -1)
        reached, accepted = np.zeros((2, 1, self._reached.shape[1]))
        reached[0, 0], accepted[0, 0] = weights.sum(), weights @ probabilities
        # The counts of other rows of the kind, which were not probed, age meanwhile.
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
        """Age the sums of some rows and of their kinds, and add new counts.

        The sums age by `num_rounds` rounds: one number, or one for each row.
        """
        each = np.zeros(len(rows), np.int64) + num_rounds
        kinds, is_typical = self._kind[rows], self._is_typical[rows]
        for sums, new in ((self._reached, reached), (self._accepted, accepted)):
            sums[rows] = DECAY ** each[:, None] * sums[rows] + new
            for kind in set(kinds[is_typical].tolist()):
                is_one = is_typical & (kinds == kind)
                total = new[is_one].sum(axis=0)
                sums[self._first_kind + kind] *= DECAY ** int(each[is_one].max())
                sums[self._first_kind + kind] += total

    def mean(self, kind: Kind = Kind.GREEDY) -> np.ndarray:
        """Return the rate of each position once those before it are accepted.

        Shrinkage: a position that was hardly reached gets the rate of the one before.

        Returns:
            One rate per draft position, over all requests of a kind.
        """
        row, weight = self._first_kind + kind, CONSTANTS.prior_weight
        counts = self._reached[row].tolist(), self._accepted[row].tolist()
        rates, rate = list[float](), self.prior
        for reached, accepted in zip(*counts, strict=True):
            rate = (accepted + weight * rate) / (reached + weight)
            rates.append(rate)
        return np.array(rates)

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rates of requests in some rows, shrunk towards their kind's mean.

        If a lookup predicted the n newest tokens, the next draft gets the rate of
        position n: a copy tends to continue.

        Returns:
            [row, position].
        """
        weight = CONSTANTS.prior_weight
        means = np.stack([self.mean(kind) for kind in Kind])
        prior = weight * means[self._kind[rows]]
        rates = (self._accepted[rows] + prior) / (self._reached[rows] + weight)
        last = rates.shape[1] - 1
        place = np.minimum(self._run[rows, None] + np.arange(last + 1), last)
        return np.take_along_axis(rates, place, axis=1)

    def is_unseeded(self, rows: np.ndarray) -> np.ndarray:
        """Return which requests in some rows sample without a seed."""
        return self._kind[rows] == Kind.SAMPLED

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.num_agreed <= self.num_compared + ROUNDING
        assert (self._accepted >= 0).all()
        assert (self._accepted <= self._reached + ROUNDING).all()
        if self._are_whole:
            assert (self._reached[:, 1:] <= self._accepted[:, :-1] + ROUNDING).all()
