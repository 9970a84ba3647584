"""Counts of drafts, against rounds written out one by one."""

import numpy as np

from jaxspec.bench.acceptance import Acceptance
from jaxspec.engine.scheduling.stats import EngineStats


def stats_of(rounds: list[tuple[int, int]]) -> EngineStats:
    """An engine's counts of (drafts, accepted) rounds."""
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
    # Kept at least 1, 2, 3 drafts: three rounds, one, one.
    assert found.per_position_rates == [3 / 4, 1 / 4, 1 / 4]
    assert found.conditional_rates == [3 / 4, 1 / 3, 1 / 1]
    assert found.as_json()["acceptance_rate_per_position"] == [0.75, 0.25, 0.25]


def test_the_mean_length_is_one_plus_the_rates_by_position():
    found = Acceptance.of(stats_of([(5, 5), (5, 2), (5, 0)]))
    assert abs(found.mean_length - 1 - sum(found.per_position_rates)) < 1e-12


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
