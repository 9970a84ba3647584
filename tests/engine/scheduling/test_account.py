"""Losses end drafts for a time that makes them a small share; luck does not."""

import numpy as np
import pytest
from jaxspec.engine.scheduling.account import (
    MAX_LOSS,
    MAX_WAIT_S,
    MIN_WAIT_S,
    WINDOW_ROUNDS,
    Account,
)

ROUND_S = 0.01


def fill(account: Account, won: float, num_rounds: int, now: float = 0.0) -> int:
    """Add rounds that win the same, until it closes; how many there were."""
    for number in range(1, num_rounds + 1):
        account.add(won, ROUND_S)
        if account.close_if_losing(now):
            return number
    return num_rounds


def test_a_steady_loss_is_seen_in_the_shortest_window_and_not_before():
    account = Account()
    assert fill(account, -ROUND_S / 2, WINDOW_ROUNDS[1]) == WINDOW_ROUNDS[0]
    # So long without drafts that what was lost is the share that may be lost.
    lost = WINDOW_ROUNDS[0] * ROUND_S / 2
    assert account.closed_until == pytest.approx(lost / MAX_LOSS)


def test_rounds_that_win_and_lose_by_turns_are_luck_until_the_window_is_full():
    account, wins = Account(), np.tile([ROUND_S, -1.2 * ROUND_S], WINDOW_ROUNDS[1] // 2)
    closed = []
    for won in wins:
        account.add(won, ROUND_S)
        closed.append(account.close_if_losing(0.0))
    assert not any(closed[:-1])
    assert closed[-1]  # 0.1 of the time is lost, and there were enough rounds


def test_a_loss_within_the_share_closes_nothing():
    account = Account()
    rounds = 2 * WINDOW_ROUNDS[1]
    assert fill(account, -0.9 * MAX_LOSS * ROUND_S, rounds) == rounds
    assert account.closed_until == -np.inf


def test_each_loss_in_a_row_waits_twice_as_long_and_a_gain_ends_that():
    account, small, waits = Account(), -1.2e-4, []
    for _ in range(10):
        fill(account, small, WINDOW_ROUNDS[0])
        waits.append(account.closed_until)
    doubled = np.minimum(MIN_WAIT_S * 2.0 ** np.arange(10), MAX_WAIT_S)
    assert waits == pytest.approx(list(doubled))
    fill(account, ROUND_S, WINDOW_ROUNDS[1])
    account.begin()
    fill(account, small, WINDOW_ROUNDS[0])
    assert account.closed_until == pytest.approx(MIN_WAIT_S)


def test_a_trial_that_failed_waits_for_its_price_and_each_time_longer():
    account = Account()
    account.add(-1.0, 1.0)
    account.end_trial(5.0)
    assert account.trial_ts == pytest.approx(5.0 + 1.0 / MAX_LOSS)
    account.begin()
    account.end_trial(5.0)
    assert account.trial_ts == pytest.approx(5.0 + 2 * MIN_WAIT_S)
    account.pass_trial()
    account.end_trial(5.0)
    assert account.trial_ts == pytest.approx(5.0 + MIN_WAIT_S)
