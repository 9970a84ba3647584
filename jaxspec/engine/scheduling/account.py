"""What drafts have won and lost: it bounds the loss, whatever is believed of them.

Knows neither who decides nor why: seconds go in, and it says until when nothing may be
drafted.
"""

import math
from collections import deque

import numpy as np

# The account is looked at over this many rounds, at least and at most, and closed when
# it has lost this share of their time: what that costs before is the least that a loss
# can be told from luck with.
WINDOW_ROUNDS = (16, 64)
MAX_LOSS = 0.01
# Seconds without drafts after a loss, at least and at most; it doubles each time.
MIN_WAIT_S, MAX_WAIT_S = 0.25, 60.0


class Account:
    """Seconds won and lost by drafts at batches of about one size.

    Bounds what drafts may lose whatever is believed of them: where they have lost for a
    window of rounds it closes, until that is a small share of the time, and each time
    for longer.

    Attributes:
        closed_until: No drafts before.
        trial_ts: When drafts may be tried next, where nobody can be asked.
    """

    def __init__(self):
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW_ROUNDS[1])
        self._wait_s = self._trial_wait_s = MIN_WAIT_S
        self.closed_until = self.trial_ts = -math.inf

    def begin(self) -> None:
        """Drafts begin or end: what was before says nothing of what comes."""
        self._window.clear()

    def add(self, won_s: float, seconds: float) -> None:
        """Note what a launch won, or lost, and took."""
        self._window.append((won_s, seconds))

    def close_if_losing(self, now: float) -> bool:
        """Whether too much has been lost; nothing is drafted for a while then."""
        if len(self._window) < WINDOW_ROUNDS[0]:
            return False
        total, spent = (float(one) for one in np.sum(self._window, axis=0))
        is_full = len(self._window) == WINDOW_ROUNDS[1]
        # Luck may look like a loss for a few rounds.
        luck = 0.0
        if not is_full:
            luck = len(self._window) ** 0.5 * np.std([won for won, _ in self._window])
        if total + luck < -MAX_LOSS * spent:
            self.closed_until = now + max(-total / MAX_LOSS, self._wait_s)
            self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
            self._window.clear()
            return True
        if is_full and total > 0:
            self._wait_s = MIN_WAIT_S
        return False

    def end_trial(self, now: float) -> None:
        """Drafts did not pay: the next trial waits longer, and for its price."""
        loss_s = -sum(won for won, _ in self._window)
        self.trial_ts = now + max(self._trial_wait_s, loss_s / MAX_LOSS)
        self._trial_wait_s = min(2 * self._trial_wait_s, MAX_WAIT_S)

    def pass_trial(self) -> None:
        """Drafts pay."""
        self._trial_wait_s = MIN_WAIT_S
