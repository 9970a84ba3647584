"""Acceptance counts of given rounds, and the ceilings of speed-ups."""

import numpy as np
import pytest

from jaxspec.bench import acceptance
from jaxspec.engine.scheduling.stats import EngineStats


def acceptance_of(*rounds: tuple[int, int]) -> acceptance.Acceptance:
    """Return the acceptance of (drafts, accepted) rounds of an engine."""
    stats = EngineStats()
    drafts, accepted = (np.array(column) for column in zip(*rounds, strict=True))
    stats.record_round(drafts, accepted, accepted + 1)
    return acceptance.Acceptance.of(stats)


def test_rates_are_those_of_the_rounds():
    found = acceptance_of((3, 3), (3, 1), (3, 0), (3, 1))
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted) == (4, 12, 5)
    assert found.rate == 5 / 12
    assert found.mean_length == 1 + 5 / 4 == 1 + sum(found.per_position_rates)
    # Of the rounds, three accepted at least 1 draft, one at least 2 and one at least 3.
    assert found.per_position_rates == [3 / 4, 1 / 4, 1 / 4]
    assert found.conditional_rates == [3 / 4, 1 / 3, 1 / 1]
    assert found.as_json()["acceptance_rate_per_position"] == [0.75, 0.25, 0.25]
    none = acceptance.Acceptance()
    assert (none.rate, none.mean_length) == (0, 1)
    assert none.conditional_rates == none.per_position_rates == []


def test_differences_and_sums_undo_each_other():
    first, second = acceptance_of((2, 1)), acceptance_of((3, 3), (3, 0), (1, 1))
    both = first + second
    assert both.num_drafts == 4
    assert both.per_position == (3, 1, 1)
    assert (both - first).per_position == second.per_position
    assert (both - first).as_json() == second.as_json()
    one = acceptance.Acceptance(
        num_drafts=4, num_accepted=6, num_side_tokens=2, tree_ends={(3, 1): 4}
    )
    both = one + acceptance.Acceptance(num_drafts=1, tree_ends={(3, 1): 1, (3, 0): 2})
    assert both.tokens_per_round == 1 + (6 + 2) / 5
    assert both.tree_ends == {(3, 1): 5, (3, 0): 2}
    assert (both - first).tree_ends == both.tree_ends
    assert one.mean_length == 2.5


@pytest.mark.parametrize(
    ("rates", "length"),
    [
        ([], 1),
        ([0.5, 0.0, 1.0], 1.5),
        ([0.9, 0.5, 0.7], 1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.7),
        ([0.95] * 5, (1 - 0.95**6) / (1 - 0.95)),
    ],
)
def test_length_and_ceiling_follow_from_rates(rates, length):
    assert acceptance.expected_length(rates) == pytest.approx(length)
    ceiling = length / (1 + 0.1 * len(rates))
    assert acceptance.speed_up_ceiling(rates, 0.1) == pytest.approx(ceiling)


@pytest.mark.parametrize(
    ("rates", "cost", "best", "ceiling"),
    [
        # Speed-ups of 27B with a 2B draft, and of 9B with it, at acceptance 0.8.
        ([0.8] * 10, 0.097, 6, 2.5),
        ([0.8] * 10, 0.285, 3, 1.59),
        # A draft model as expensive as the target always makes decoding slower.
        ([0.99] * 3, 1.0, 0, 1.0),
        ([], 0.1, 0, 1.0),
    ],
)
def test_best_number_of_drafts(rates, cost, best, ceiling):
    found = acceptance.best_num_draft_tokens(rates, cost)
    assert (found[0], round(found[1], 2)) == (best, ceiling)
