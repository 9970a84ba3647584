"""Bounds the time that drafts and explorations may lose if estimates are wrong."""

from jaxspec.engine.speculation.constants import CONSTANTS


class LossBudget:
    """Device seconds that may be lost, at batches of about one size.

    The budget earns a share of the device's time. Rounds with drafts that lose against
    plain decoding add to a deficit; rounds that win reduce it. Earnings repay the
    deficit first. The rest pays for explorations: what each is expected to lose is paid
    before it begins, and what it loses beyond that is charged later. A
    deficit of more than `loss_rounds` plain rounds closes the budget: the deficit is
    subtracted from the balance, and nothing is drafted until the balance is no longer
    negative.

    Attributes:
        is_closed: Drafts have lost too much.
        num_closed: Number of times that the budget was closed.
    """

    def __init__(self):
        self._balance_s = self._deficit_s = 0.0
        self.is_closed, self.num_closed = False, 0

    def earn(self, seconds: float) -> None:
        """Add the budget's share of device seconds."""
        share_s = CONSTANTS.max_loss * seconds
        repaid_s = min(self._deficit_s, share_s)
        self._deficit_s -= repaid_s
        self._balance_s += share_s - repaid_s
        self.is_closed &= self._balance_s < 0

    def can_pay(self, price_s: float) -> bool:
        """Return whether an exploration of that price may begin."""
        return self._balance_s >= price_s

    def pay(self, price_s: float) -> None:
        """Pay for an exploration; the rest of the balance is dropped."""
        self._balance_s = min(self._balance_s - price_s, 0.0)

    def charge(self, seconds: float) -> None:
        """Subtract what an exploration has lost beyond its price."""
        self._balance_s -= seconds

    def add(self, won_s: float, plain_s: float) -> None:
        """Record seconds won against plain decoding; negative are lost.

        Args:
            plain_s: Seconds of a round without drafts.
        """
        self._deficit_s = max(self._deficit_s - won_s, 0.0)
        if self._deficit_s > CONSTANTS.loss_rounds * plain_s:
            self._balance_s = min(self._balance_s, 0.0) - self._deficit_s
            self._deficit_s, self.is_closed = 0.0, True
            self.num_closed += 1
