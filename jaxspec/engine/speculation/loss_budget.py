"""Bounds the time that drafts and explorations may lose if estimates are wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxspec.engine.speculation.constants import CONSTANTS

# Maximum share of the device's time that trials take from the time won by drafts. In
# simulated texts whose drafts alternate between 600 tokens of acceptance 0.9 and 100 of
# 0, shares of 0, 0.04, 0.1 and 0.2 lead to 0.74, 0.79, 1.00 and 1.09 of the speed of
# the best fixed K; with 300 tokens of 0, to 0.95, 1.10, 1.19 and 0.94.
WON_SHARE = 10 * CONSTANTS.max_loss


@dataclass(slots=True)
class LentTrials:
    """Device seconds that lent trials lose, at batches of all sizes.

    A lent trial begins without savings. The `LossBudget` of its batch size counts what
    it loses as a debt; this limits the sum over all trials.

    Attributes:
        lost_s: Seconds lost so far.
        max_lost_s: Limit of `lost_s` while a trial runs; 0 while none runs.
    """

    lost_s: float = 0.0
    max_lost_s: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a lent trial runs."""
        return self.max_lost_s > 0

    @property
    def is_exhausted(self) -> bool:
        """Whether trials have lost more than the limit, which is 0 while none runs."""
        return self.lost_s > self.max_lost_s

    def begin(self, max_lost_s: float) -> None:
        """Begin a trial: until it ends, `lost_s` may rise to `max_lost_s`."""
        self.max_lost_s = max_lost_s

    def end(self) -> None:
        """End the trial, if one runs."""
        self.max_lost_s = 0.0

    def charge(self, seconds: float) -> None:
        """Add what a trial has lost.

        Args:
            seconds: Negative if it has won.
        """
        self.lost_s = max(self.lost_s + seconds, 0.0)


class LossBudget:
    """Device seconds that may be lost, at batches of about one size.

    Rounds with drafts that lose against plain decoding add to a deficit; rounds that
    win reduce it. A deficit of more than `loss_rounds` plain rounds closes the budget:
    the deficit becomes a debt, and nothing is drafted until it is repaid. What an
    exploration loses beyond its price is a debt as well, and so is all that a lent
    trial loses.

    The budget earns a share of the device's time. It repays the debt first; the rest is
    divided equally among the kinds of explorations. If they all spent from one balance,
    cheap kinds would leave nothing for the others, or would have to wait for them.

    Time that rounds with drafts have won, at most that of `loss_rounds` plain rounds,
    pays for trials of drafts after K became 0, if acceptance cannot be observed without
    drafts. It is spent gradually, because drafts usually lose for a whole passage.

    Attributes:
        is_closed: Drafts have lost too much.
        num_closed: Number of times that the budget was closed.
    """

    def __init__(self):
        self._saved_s: dict[str, float] = {}  # by kind of exploration
        self._kinds: tuple[str, ...] = ()  # those that save now
        self._deficit_s = self._debt_s = self._won_s = 0.0
        self._trial: tuple[str, float] | None = None
        self.is_closed, self.num_closed = False, 0

    def set_kinds(
        self, kinds: Iterable[str], trial: tuple[str, float] | None = None
    ) -> None:
        """Set the kinds of explorations that earnings are divided among.

        Args:
            trial: The kind that may also spend the time won by drafts, and its price;
                None for no kind.
        """
        self._kinds, self._trial = tuple(kinds), trial

    def saved_s(self, kind: str) -> float:
        """Return the seconds that a kind of exploration may spend."""
        return self._saved_s.get(kind, 0.0)

    def earn(self, seconds: float) -> None:
        """Add the budget's share of device seconds, and of the time won by drafts."""
        share_s = CONSTANTS.max_loss * seconds
        repaid_s = min(self._debt_s, share_s)
        self._debt_s -= repaid_s
        self.is_closed &= self._debt_s > 0
        for kind in self._kinds:
            saved_s = (share_s - repaid_s) / len(self._kinds)
            self._saved_s[kind] = self.saved_s(kind) + saved_s
        if self._trial is not None:
            kind, price_s = self._trial
            # The price grows with the tokens that draft prefill lacks.
            lacking_s = max(2 * price_s - self.saved_s(kind), 0.0)
            moved_s = min(self._won_s, WON_SHARE * seconds, lacking_s)
            self._won_s -= moved_s
            self._saved_s[kind] = self.saved_s(kind) + moved_s

    def can_pay(self, kind: str, price_s: float) -> bool:
        """Return whether an exploration of that kind and price may begin."""
        return not self._debt_s and self.saved_s(kind) >= price_s

    def pay(self, kind: str) -> None:
        """Spend all savings: a kind is explored, or runs anyway."""
        self._saved_s[kind] = 0.0

    def charge(self, seconds: float) -> None:
        """Add to the debt what an exploration has lost beyond its price.

        Args:
            seconds: Negative if a lent trial has won.
        """
        self._debt_s = max(self._debt_s + seconds, 0.0)

    def add(self, won_s: float, plain_s: float) -> None:
        """Record seconds won against plain decoding; negative are lost.

        Args:
            plain_s: Seconds of a round without drafts.
        """
        limit_s = CONSTANTS.loss_rounds * plain_s
        if won_s > self._deficit_s:
            self._won_s = min(self._won_s + won_s - self._deficit_s, limit_s)
        self._deficit_s = max(self._deficit_s - won_s, 0.0)
        if self._deficit_s > limit_s:
            self._debt_s += self._deficit_s
            self._deficit_s, self.is_closed = 0.0, True
            self.num_closed += 1
