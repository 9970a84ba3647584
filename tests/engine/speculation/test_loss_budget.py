"""The loss budget pays for explorations, and stops drafts that lose too much time."""

import pytest

from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.loss_budget import LossBudget


def test_budget_earns_a_share_of_the_time_and_is_emptied_by_payments():
    budget = LossBudget()
    assert not budget.can_pay(1e-9)
    budget.earn(10.0)
    assert budget.can_pay(10 * CONSTANTS.max_loss)
    assert not budget.can_pay(11 * CONSTANTS.max_loss)
    budget.earn(1000.0)
    budget.pay(1.0)
    assert not budget.can_pay(1e-9)
    # A deficit is repaid first.
    budget = LossBudget()
    budget.add(-0.03, plain_s=0.01)
    budget.earn(3.0)
    assert not budget.can_pay(0.001)
    budget.earn(1.0)
    assert budget.can_pay(0.0099)


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


@pytest.mark.parametrize("won", [-CONSTANTS.max_loss, 0.5])
def test_budget_stays_open_within_the_allowed_loss(won):
    budget, plain_s = LossBudget(), 0.01
    for number in range(2000):
        # Good and bad rounds alternate; this is their mean loss.
        budget.add((won + (1 if number % 2 else -1)) * plain_s, plain_s)
        budget.earn(plain_s)
    assert not budget.num_closed
