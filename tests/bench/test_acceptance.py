"""Acceptance counts of given rounds, and the ceilings of speed-ups."""

import random

import numpy as np
import pytest

from jaxspec.bench.acceptance import (
    Acceptance,
    best_num_draft_tokens,
    expected_length,
    speed_up_ceiling,
)
from jaxspec.engine.scheduling.stats import EngineStats


def stats_of(rounds: list[tuple[int, int]]) -> EngineStats:
    """Return an engine's counts of (drafts, accepted) rounds."""
    stats = EngineStats()
    drafts, accepted = (np.array(column) for column in zip(*rounds, strict=True))
    stats.record_round(drafts, accepted, accepted + 1)
    return stats


def test_rates_are_those_of_the_rounds():
    rounds = [(3, 3), (3, 1), (3, 0), (3, 1)]
    found = Acceptance.of(stats_of(rounds))
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted) == (4, 12, 5)
    assert found.rate == 5 / 12
    assert found.mean_length == 1 + 5 / 4
    # Of the rounds, three accepted at least 1 draft, one at least 2 and one at least 3.
    assert found.per_position_rates == [3 / 4, 1 / 4, 1 / 4]
    assert found.conditional_rates == [3 / 4, 1 / 3, 1 / 1]
    assert found.as_json()["acceptance_rate_per_position"] == [0.75, 0.25, 0.25]
    assert found.mean_length == pytest.approx(1 + sum(found.per_position_rates))


def test_differences_and_sums_undo_each_other():
    early, late = stats_of([(2, 1)]), stats_of([(3, 3), (3, 0), (1, 1)])
    first, second = Acceptance.of(early), Acceptance.of(late)
    both = first + second
    assert both.num_drafts == 4
    assert both.per_position == (3, 1, 1)
    difference = both - first
    assert difference.per_position == second.per_position
    assert difference.as_json() == second.as_json()


def test_without_drafts_nothing_is_divided_by_zero():
    none = Acceptance()
    assert (none.rate, none.mean_length) == (0, 1)
    assert none.conditional_rates == none.per_position_rates == []


def test_side_branches_are_counted_separately():
    one = Acceptance(
        num_drafts=4, num_accepted=6, num_side_tokens=2, tree_ends={(3, 1): 4}
    )
    other = Acceptance(num_drafts=1, tree_ends={(3, 1): 1, (3, 0): 2})
    both = one + other
    assert both.tokens_per_round == 1 + (6 + 2) / 5
    assert both.tree_ends == {(3, 1): 5, (3, 0): 2}
    assert (both - other).tree_ends == one.tree_ends
    assert one.mean_length == 2.5


@pytest.mark.parametrize("rate", [0.3, 0.95])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_ceiling_of_equal_rates_is_the_closed_form(rate, count):
    closed = (1 - rate ** (count + 1)) / (1 - rate)
    assert expected_length([rate] * count) == pytest.approx(closed)
    assert speed_up_ceiling([rate] * count, 0.1) == pytest.approx(
        closed / (1 + 0.1 * count)
    )


def test_expected_length_is_that_of_simulated_rounds():
    rates, draw = [0.9, 0.5, 0.7], random.Random(0)
    total, rounds = 0, 200_000
    for _ in range(rounds):
        total += 1
        for rate in rates:
            if draw.random() >= rate:
                break
            total += 1
    # The length of a round has a standard deviation of about 1.2 tokens.
    assert expected_length(rates) == pytest.approx(total / rounds, abs=0.015)
    assert expected_length([0.5, 0.0, 1.0]) == 1.5


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
    found = best_num_draft_tokens(rates, cost)
    assert (found[0], round(found[1], 2)) == (best, ceiling)
