"""Bounds the time that drafts and explorations may lose if estimates are wrong."""

from collections.abc import Iterable

from jaxspec.engine.speculation.constants import CONSTANTS

# Share of the time for which explorations may spend what drafts have won: trials of
# 12 rounds then follow each other after 150 to 200 rounds.
WON_SHARE = 10 * CONSTANTS.max_loss


class LossBudget:
    """Device seconds that may be lost, at batches of about one size.

    Rounds with drafts that lose against plain decoding add to a deficit; rounds that
    win reduce it. A deficit of more than `loss_rounds` plain rounds closes the budget:
    the deficit becomes a debt, and nothing is drafted until it is repaid. What an
    exploration loses beyond its price is a debt as well.

    The budget earns a share of the device's time. It repays the debt first; the rest is
    divided equally among the kinds of explorations. If they all spent from one balance,
    cheap kinds would leave nothing for the others, or would have to wait for them.

    What rounds with drafts have won, up to the time of `loss_rounds` plain rounds, is
    spent on trials after drafts were given up, if nothing else can show that they would
    win again. It is spent over time: drafts usually lose for a whole passage.

    Attributes:
        is_closed: Drafts have lost too much.
        num_closed: Number of times that the budget was closed.
    """

    def __init__(self):
        self._saved_s: dict[str, float] = {}  # by kind of exploration
        self._kinds: tuple[str, ...] = ()  # those that save now
        self._deficit_s = self._debt_s = self._won_s = 0.0
        self._spends_won: str | None = None
        self.is_closed, self.num_closed = False, 0

    def set_kinds(self, kinds: Iterable[str], spends_won: str | None = None) -> None:
        """Set the kinds of explorations that earnings are divided among.

        Args:
            spends_won: The kind that also gets what drafts have won.
        """
        self._kinds, self._spends_won = tuple(kinds), spends_won

    def saved_s(self, kind: str) -> float:
        """Return the seconds that a kind of exploration may spend."""
        return self._saved_s.get(kind, 0.0)

    def earn(self, seconds: float) -> None:
        """Add the budget's share of device seconds."""
        share_s = CONSTANTS.max_loss * seconds
        repaid_s = min(self._debt_s, share_s)
        self._debt_s -= repaid_s
        self.is_closed &= self._debt_s > 0
        for kind in self._kinds:
            saved_s = (share_s - repaid_s) / len(self._kinds)
            self._saved_s[kind] = self.saved_s(kind) + saved_s
        if self._spends_won is not None:
            spent_s = min(self._won_s, WON_SHARE * seconds)
            self._won_s -= spent_s
            self._saved_s[self._spends_won] = self.saved_s(self._spends_won) + spent_s

    def can_pay(self, kind: str, price_s: float) -> bool:
        """Return whether an exploration of that kind and price may begin."""
        return not self._debt_s and self.saved_s(kind) >= price_s

    def pay(self, kind: str) -> None:
        """Spend all savings: a kind is explored, or runs anyway."""
        self._saved_s[kind] = 0.0

    def charge(self, seconds: float) -> None:
        """Add to the debt what an exploration has lost beyond its price."""
        self._debt_s += seconds

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
