"""Estimated acceptance rates equal weighted means over a list of rounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.speculation.acceptance import AcceptanceRates, Kind
from jaxspec.engine.speculation.constants import CONSTANTS

ROWS, DRAFTS = 3, 4

# One round: (requested drafts, found by a lookup, accepted) of every row.
ROUND = st.lists(
    st.integers(0, DRAFTS).flatmap(
        lambda requested: st.integers(0, requested).flatmap(
            lambda found: st.tuples(
                st.just(requested), st.just(found), st.integers(0, found)
            )
        )
    ),
    min_size=ROWS,
    max_size=ROWS,
)


def make_rates() -> AcceptanceRates:
    return AcceptanceRates(num_rows=ROWS, max_draft_tokens=DRAFTS)


def record(acceptance: AcceptanceRates, sequences: list[tuple[int, int]]) -> None:
    drafts, accepted = np.array(sequences, np.int64).T
    acceptance.record(np.arange(len(sequences)), drafts, accepted)


def weighted(observed: list[list[bool]], prior: float) -> float:
    """Return the weighted mean of observations: a list per round, the newest last."""
    total, weight = CONSTANTS.prior_weight * prior, CONSTANTS.prior_weight
    for age, one in enumerate(reversed(observed)):
        share = 0.5 ** (age / CONSTANTS.half_life_rounds)
        total, weight = total + share * sum(one), weight + share * len(one)
    return total / weight


@given(rounds=st.lists(ROUND, max_size=30))
def test_rate_is_the_weighted_mean_of_rounds(rounds):
    """A missing draft of a lookup counts as rejected, but not as compared."""
    acceptance, prior = make_rates(), CONSTANTS.prior_acceptance
    for sequences in rounds:
        requested, found, accepted = np.array(sequences, np.int64).T
        acceptance.record(np.arange(ROWS), found, accepted, requested)
        acceptance.check()
    means, rates = acceptance.mean(), acceptance.of_rows(np.arange(ROWS))
    drafting = [one for one in rounds if any(requested for requested, *_ in one)]
    for position in range(DRAFTS):

        def observed(sequences, position=position) -> list[bool]:
            return [
                accepted > position
                for requested, _, accepted in sequences
                if requested > position and accepted >= position
            ]

        prior = weighted([observed(one) for one in drafting], prior)
        assert means[position] == pytest.approx(prior)
        for row in range(ROWS):
            # Rounds without drafts for a request do not reduce the weight of its
            # counts.
            own = [observed([one[row]]) for one in rounds if one[row][0]]
            assert rates[row, position] == pytest.approx(weighted(own, prior))
    # Drafts are compared up to the first rejection.
    flat = [one for sequences in rounds for one in sequences]
    num_compared = sum(min(accepted + 1, found) for _, found, accepted in flat)
    num_agreed = sum(accepted for *_, accepted in flat)
    assert acceptance.num_compared == num_compared
    assert acceptance.num_agreed == num_agreed
    acceptance.record_probabilities(0, np.array([0.25, 0.5]))
    assert acceptance.num_compared == num_compared + 2
    assert acceptance.num_agreed == num_agreed + 0.75
    acceptance.check()


def test_mean_of_each_kind_excludes_masked_requests():
    acceptance = make_rates()
    acceptance.admit(0, Kind.GREEDY)
    acceptance.admit(1, Kind.SAMPLED)
    acceptance.admit(2, Kind.SAMPLED, is_typical=False)
    for _ in range(30):
        record(acceptance, [(3, 3), (3, 0), (3, 3)])
    greedy, seeded, sampled = (acceptance.mean(kind)[0] for kind in Kind)
    assert greedy > 0.9
    assert seeded == pytest.approx(CONSTANTS.prior_acceptance)
    assert sampled < 0.2
    assert acceptance.of_rows(np.array([2]))[0, 0] > 0.8
    before = acceptance.mean()
    acceptance.admit(0, Kind.SAMPLED)
    acceptance.check()
    rates = acceptance.of_rows(np.array([0]))[0]
    assert rates == pytest.approx(acceptance.mean(Kind.SAMPLED))
    assert (acceptance.mean() == before).all()
    assert acceptance.is_unseeded(np.array([0])).all()
    acceptance.admit(1, Kind.SEEDED)
    assert not acceptance.is_unseeded(np.array([1])).any()


@pytest.mark.parametrize("count", [0, 1, 40])
def test_probed_tokens_count_as_first_drafts(count):
    acceptance, plain = make_rates(), make_rates()
    acceptance_probabilities = np.random.default_rng(count).integers(0, 2, count)
    for _ in range(10):
        record(acceptance, [(4, 2)])
        record(plain, [(4, 2)])
    acceptance.record_probabilities(0, acceptance_probabilities.astype(float))
    acceptance.check()
    for one in acceptance_probabilities.tolist():
        record(plain, [(1, one)])
    row = np.array([0])
    assert acceptance.of_rows(row) == pytest.approx(plain.of_rows(row))
    assert acceptance.mean() == pytest.approx(plain.mean())


def test_side_tokens_are_a_share_of_the_main_chain():
    acceptance = AcceptanceRates(2, 3, prior=0.1)
    assert acceptance.mean().tolist() == pytest.approx([0.1] * 3)
    assert acceptance.side_tokens == 0
    for _ in range(200):
        acceptance.record_side_branches(np.array([2, 4]), np.array([1, 2]))
    assert 0.4 < acceptance.side_tokens < 0.5
    for _ in range(200):
        acceptance.record_side_branches(np.array([2, 4]), np.array([0, 0]))
    assert acceptance.side_tokens < 0.01


def test_predicted_rounds_count_as_rounds():
    """Predictions count as parts of a round, for rows with different weights."""
    whole, parts = make_rates(), make_rates()
    for sequences in ([(3, 2), (2, 0)], [(4, 4), (4, 1)]):
        record(whole, sequences)
    rows, zeros = np.arange(2), np.zeros(2, np.int64)

    def count(reached: Any, accepted: Any, num_rounds: np.ndarray) -> None:
        both = np.array(reached, float), np.array(accepted, float)
        compared = int(both[0].sum())
        parts.record_predicted(rows, *both, num_rounds, num_compared=compared)
        parts.check()

    count([[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]], zeros + 1)
    count([[1, 1, 0, 0], [1, 1, 0, 0]], [[1, 1, 0, 0], [1, 0, 0, 0]], zeros + 1)
    count([[0, 0, 1, 1], [0, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]], zeros)
    assert parts.of_rows(rows) == pytest.approx(whole.of_rows(rows))
    assert parts.mean() == pytest.approx(whole.mean())
    assert parts.num_agreed == whole.num_agreed
    # Five rounds have ended in one row and none in the other; only the first row's
    # weights have decayed.
    count(np.zeros((2, 4)), np.zeros((2, 4)), np.array([0, 5]))
    for row, age in enumerate((0, 5)):
        share = 0.5 ** (age / CONSTANTS.half_life_rounds)
        assert parts._reached[row, 0] == pytest.approx(share * whole._reached[row, 0])


def test_match_run_shifts_positions_of_lookup_drafts():
    acceptance, rows = make_rates(), np.arange(ROWS)
    for _ in range(20):
        record(acceptance, [(4, 4), (4, 0), (4, 1)])
    before = acceptance.of_rows(rows)
    acceptance.set_match_runs(rows, np.array([0, 2, 9]))
    after = acceptance.of_rows(rows)
    assert after[0].tolist() == before[0].tolist()
    assert after[1].tolist() == [*before[1, 2:], *[before[1, 3]] * 2]
    assert after[2].tolist() == [before[2, 3]] * DRAFTS
    acceptance.admit(2)
    assert acceptance.of_rows(rows)[2].tolist() == acceptance.mean().tolist()
