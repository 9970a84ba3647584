"""The loss budget pays for explorations, and stops drafts that lose too much time."""

import pytest

from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.loss_budget import WON_SHARE, LentTrials, LossBudget


def test_kinds_of_explorations_share_earnings():
    budget = LossBudget()
    budget.earn(1.0)  # no kind
    budget.set_kinds(["plain", "most"])
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(10.0)
    assert budget.saved_s("plain") == pytest.approx(5 * CONSTANTS.max_loss)
    assert budget.can_pay("most", 4.9 * CONSTANTS.max_loss)
    assert not budget.can_pay("most", 5.1 * CONSTANTS.max_loss)
    budget.pay("plain")
    assert not budget.can_pay("plain", 1e-9)
    assert budget.can_pay("most", 4.9 * CONSTANTS.max_loss)
    budget.set_kinds(["most", "side"])
    budget.earn(2.0)
    assert budget.saved_s("most") == pytest.approx(6 * CONSTANTS.max_loss)
    assert budget.saved_s("side") == pytest.approx(CONSTANTS.max_loss)
    budget.set_kinds(["plain"])
    assert budget.saved_s("most") == pytest.approx(6 * CONSTANTS.max_loss), "it waits"


def test_losses_of_explorations_are_repaid_before_the_next_one():
    budget = LossBudget()
    budget.set_kinds(["plain"])
    budget.earn(1.0)
    budget.charge(5 * CONSTANTS.max_loss)
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(4.9)
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(1.1)
    assert budget.can_pay("plain", CONSTANTS.max_loss)
    assert not budget.can_pay("plain", 2.1 * CONSTANTS.max_loss)


def test_closing_adds_to_the_debt_of_explorations():
    budget, plain_s = LossBudget(), 0.01
    budget.charge(1.0)
    budget.add(-2 * CONSTANTS.loss_rounds * plain_s, plain_s)
    assert budget.is_closed
    budget.earn((0.9 + 2 * CONSTANTS.loss_rounds * plain_s) / CONSTANTS.max_loss)
    assert budget.is_closed
    budget.earn(0.2 / CONSTANTS.max_loss)
    assert not budget.is_closed


def test_budget_closes_on_a_deficit_and_opens_when_it_is_repaid():
    budget, plain_s = LossBudget(), 0.01
    for _ in range(int(CONSTANTS.loss_rounds) - 1):
        budget.add(-plain_s, plain_s)
    assert not budget.is_closed
    for _ in range(2):
        budget.add(-plain_s, plain_s)
    assert (budget.is_closed, budget.num_closed) == (True, 1)
    repaid_s = (CONSTANTS.loss_rounds + 1) * plain_s / CONSTANTS.max_loss
    budget.earn(0.95 * repaid_s)
    assert budget.is_closed is True
    budget.earn(0.06 * repaid_s)
    assert not budget.is_closed


@pytest.mark.parametrize("won", [0.0, 0.5])
def test_budget_is_open_unless_losses_exceed_wins(won):
    budget, plain_s = LossBudget(), 0.01
    for number in range(2000):
        # Good and bad rounds alternate; this is their mean gain.
        budget.add((won + (1 if number % 2 else -1)) * plain_s, plain_s)
        budget.earn(plain_s)
    assert not budget.num_closed


def test_won_time_is_spent_gradually_on_one_kind():
    budget, plain_s = LossBudget(), 0.01
    limit_s = CONSTANTS.loss_rounds * plain_s
    budget.add(-0.5 * limit_s, plain_s)
    for _ in range(2 * int(CONSTANTS.loss_rounds)):
        budget.add(plain_s, plain_s)  # a quarter repays the deficit
    budget.earn(1.0)  # no kind
    budget.set_kinds(["drafts", "probe"], ("drafts", 1.0))
    budget.earn(1.0)
    earned_s = CONSTANTS.max_loss / 2
    assert budget.saved_s("drafts") == pytest.approx(earned_s + WON_SHARE)
    assert budget.saved_s("probe") == pytest.approx(earned_s)
    budget.pay("drafts")
    budget.set_kinds(["probe"])
    budget.earn(1.0)
    assert not budget.saved_s("drafts"), "the rest is kept"
    budget.set_kinds(["drafts"], ("drafts", 0.1))
    budget.earn(10.0)
    # Not more than twice the price, of what the budget's share does not pay.
    assert budget.saved_s("drafts") == pytest.approx(0.2)
    budget.pay("drafts")
    budget.set_kinds([], ("drafts", 1.0))
    budget.earn(10.0)
    rest_s = limit_s - WON_SHARE - (0.2 - 20 * earned_s)
    assert budget.saved_s("drafts") == pytest.approx(rest_s)


def test_deficit_is_repaid_before_won_time_is_saved():
    budget = LossBudget()
    for won_s in (-0.1, 0.04, 0.05):
        budget.add(won_s, 0.01)
    budget.set_kinds([], ("drafts", 1.0))
    budget.earn(100.0)
    assert not budget.saved_s("drafts")
    budget.add(0.03, 0.01)
    budget.earn(100.0)
    assert budget.saved_s("drafts") == pytest.approx(0.02)


def test_lent_trials_share_one_limit():
    lent = LentTrials()
    lent.begin(1.0)
    lent.charge(0.7)
    assert lent.is_running and not lent.is_exhausted
    lent.end()
    assert not lent.is_running and lent.is_exhausted, "no trial may lose now"
    lent.begin(1.0)
    lent.charge(-0.2)
    assert lent.lost_s == pytest.approx(0.5) and not lent.is_exhausted
    lent.charge(0.6)
    assert lent.is_exhausted
    lent.charge(-5.0)
    assert lent.lost_s == 0.0, "time won is not saved for later trials"
