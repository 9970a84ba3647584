"""The ceiling: the closed form where all rates are equal, and a count of tokens."""

import random

import pytest

from jaxspec.bench.ceiling import (
    best_num_draft_tokens,
    expected_length,
    speed_up_ceiling,
)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_equal_rates_give_the_geometric_sum(rate, count):
    closed = (1 - rate ** (count + 1)) / (1 - rate)
    assert expected_length([rate] * count) == pytest.approx(closed)
    assert speed_up_ceiling([rate] * count, 0.1) == pytest.approx(
        closed / (1 + 0.1 * count)
    )


def test_the_expected_length_is_what_rounds_give():
    rates, draw = [0.9, 0.5, 0.7], random.Random(0)
    total, rounds = 0, 200_000
    for _ in range(rounds):
        total += 1
        for rate in rates:
            if draw.random() >= rate:
                break
            total += 1
    # One round's length has a deviation of about 1.2.
    assert expected_length(rates) == pytest.approx(total / rounds, abs=0.015)


def test_the_best_number_of_drafts():
    # 27B with a 2B draft, and 9B with it, at a = 0.8 (DESIGN.md, section 9).
    best, ceiling = best_num_draft_tokens([0.8] * 10, 0.097)
    assert (best, round(ceiling, 2)) == (6, 2.5)
    best, ceiling = best_num_draft_tokens([0.8] * 10, 0.285)
    assert (best, round(ceiling, 2)) == (3, 1.59)
    # A draft as dear as its target only loses.
    assert best_num_draft_tokens([0.99] * 3, 1.0) == (0, 1.0)
    assert best_num_draft_tokens([], 0.1) == (0, 1.0)


def test_rates_after_a_position_that_keeps_nothing_do_not_count():
    assert expected_length([0.5, 0.0, 1.0]) == 1.5
