"""The loss budget pays for explorations, and stops drafts that lose too much time."""

import pytest

from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.loss_budget import LossBudget


def test_each_kind_of_exploration_spends_what_was_earned_since_it_ran():
    budget = LossBudget()
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(10.0)
    assert budget.can_pay("plain", 10 * CONSTANTS.max_loss)
    assert not budget.can_pay("plain", 11 * CONSTANTS.max_loss)
    budget.run("plain")
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(1.0)
    assert budget.earned_since("plain") == pytest.approx(CONSTANTS.max_loss)
    assert budget.can_pay("most", 10.9 * CONSTANTS.max_loss)


def test_losses_of_explorations_are_repaid_before_the_next_one():
    budget = LossBudget()
    budget.earn(1.0)
    budget.charge(5 * CONSTANTS.max_loss)
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(4.9)
    assert not budget.can_pay("plain", 1e-9)
    budget.earn(1.1)
    assert budget.can_pay("plain", CONSTANTS.max_loss)
    assert not budget.can_pay("plain", 2.1 * CONSTANTS.max_loss)


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


def test_budget_stays_open_while_wins_and_losses_are_equal():
    budget, plain_s = LossBudget(), 0.01
    for number in range(2000):
        budget.add((1 if number % 2 else -1) * plain_s, plain_s)
        budget.earn(plain_s)
    assert not budget.num_closed
