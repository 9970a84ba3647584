"""When rounds without drafts are timed again, while there are drafts.

What is believed of them is from when they were left, and may have been why: on a busy
machine their newest rounds can take twice what they take as a rule. So they are timed
again soon, and if drafts are still worth it, after twice as long each time.
"""

FIRST_WAIT_S, MAX_WAIT_S = 0.25, 10.0
# Rounds in a row. The first follows one with drafts, and is no measure.
REFRESH_ROUNDS = 4


class Refresh:
    """When plain rounds are due, for numbers of sequences that share programs."""

    def __init__(self, now: float):
        self.rest(now)

    def rest(self, now: float) -> None:
        """Nothing was drafted until now: every round has been a measure."""
        self._last_ts, self._wait_s = now, FIRST_WAIT_S

    def begin_if_due(self, now: float) -> bool:
        """Whether some rounds are to be without drafts now; the next wait is longer."""
        if now - self._last_ts <= self._wait_s:
            return False
        self._last_ts, self._wait_s = now, min(2 * self._wait_s, MAX_WAIT_S)
        return True
