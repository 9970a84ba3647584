"""Measured times and acceptance equal what a plain list of rounds says."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxspec.engine.scheduling.costs import (
    HALF_LIFE_ROUNDS,
    MAX_SKIPPED,
    NEWEST,
    PRIOR_RATE,
    PRIOR_WEIGHT,
    STALL,
    Costs,
    Kind,
    Round,
)

from jaxspec.program.plan import StepShape
from tests.loops import Loop, make_config, make_requests

ROWS, DRAFTS = 3, 4
SHAPE = StepShape(num_seqs=4, num_draft_tokens=8, chunk=0)
ROUND_OF_3 = Round(SHAPE, 3)

# (drafts, accepted) of every row.
ROUND = st.lists(
    st.integers(0, DRAFTS).flatmap(
        lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts))
    ),
    min_size=ROWS,
    max_size=ROWS,
)


def make_costs() -> Costs:
    return Costs(num_rows=ROWS, max_draft_tokens=DRAFTS)


def record(costs: Costs, sequences: list[tuple[int, int]]) -> None:
    drafts, accepted = np.array(sequences, np.int64).T
    costs.record_acceptance(np.arange(len(sequences)), drafts, accepted)


def weighted(observed: list[list[bool]], prior: float) -> float:
    """Mean of observations, a list of them per round, the newest round last."""
    total, weight = PRIOR_WEIGHT * prior, PRIOR_WEIGHT
    for age, one in enumerate(reversed(observed)):
        share = 0.5 ** (age / HALF_LIFE_ROUNDS)
        total, weight = total + share * sum(one), weight + share * len(one)
    return total / weight


@given(rounds=st.lists(ROUND, max_size=30))
def test_acceptance_is_the_weighted_mean_of_the_rounds(rounds):
    costs, prior = make_costs(), PRIOR_RATE
    for sequences in rounds:
        record(costs, sequences)
        costs.check()
    means, rates = costs.mean_acceptance(), costs.acceptance(np.arange(ROWS))
    drafting = [one for one in rounds if any(drafts for drafts, _ in one)]
    for position in range(DRAFTS):

        def observed(sequences, position=position) -> list[bool]:
            return [
                accepted > position
                for drafts, accepted in sequences
                if drafts > position and accepted >= position
            ]

        prior = weighted([observed(one) for one in drafting], prior)
        assert means[position] == pytest.approx(prior)
        for row in range(ROWS):
            # A round without drafts of its own does not make a request's past older.
            own = [observed([one[row]]) for one in rounds if one[row][0]]
            assert rates[row, position] == pytest.approx(weighted(own, prior))


@given(rounds=st.lists(ROUND, max_size=30))
def test_drafts_are_compared_up_to_the_first_rejection(rounds):
    costs = make_costs()
    for sequences in rounds:
        record(costs, sequences)
    flat = [one for sequences in rounds for one in sequences]
    reached = [min(accepted + 1, drafts) for drafts, accepted in flat]
    assert costs.num_compared == sum(reached)
    assert costs.num_agreed == sum(accepted for _, accepted in flat)
    costs.record_likeness(0, np.array([0.25, 0.5]))
    assert costs.num_compared == sum(reached) + 2
    assert costs.num_agreed == sum(accepted for _, accepted in flat) + 0.75
    costs.check()


def test_what_a_lookup_does_not_find_brings_nothing():
    """Rounds that find no draft say that more of them would be rounds for nothing."""
    costs, row = make_costs(), np.array([0])
    for found, stays in [(0, 0), (2, 2), (0, 0), (2, 1)] * 20:
        costs.record_acceptance(
            row, np.array([found]), np.array([stays]), np.array([DRAFTS])
        )
        costs.check()
    rates = costs.acceptance(row)[0]
    # Found every second time; then the first always stays, the second half the time.
    assert rates[0] == pytest.approx(0.5, abs=0.05)
    assert rates[1] == pytest.approx(0.5, abs=0.1)
    assert (rates[2:] < rates[1]).all()
    # Told is what was verified.
    assert (costs.num_compared, costs.num_agreed) == (80, 60)


def test_a_request_in_a_row_does_not_inherit_the_acceptance_of_the_one_before():
    costs = make_costs()
    for _ in range(20):
        record(costs, [(3, 3), (3, 0)])
    lucky, unlucky = costs.acceptance(np.array([0, 1]))[:, 0]
    assert lucky > 0.85
    assert unlucky < 0.15
    mean = costs.mean_acceptance()
    costs.admit(0)
    costs.check()
    assert costs.acceptance(np.array([0]))[0] == pytest.approx(mean)
    assert (costs.mean_acceptance() == mean).all()


def test_kinds_have_means_of_their_own_and_masked_requests_none():
    costs = make_costs()
    costs.admit(0, Kind.GREEDY)
    costs.admit(1, Kind.SAMPLED)
    costs.admit(2, Kind.SAMPLED, is_typical=False)
    for _ in range(30):
        record(costs, [(3, 3), (3, 0), (3, 3)])
    greedy, seeded, sampled = (costs.mean_acceptance(kind)[0] for kind in Kind)
    assert greedy > 0.9
    assert seeded == pytest.approx(PRIOR_RATE)
    assert sampled < 0.2
    assert costs.acceptance(np.array([2]))[0, 0] > 0.8
    costs.admit(0, Kind.SAMPLED)
    assert costs.acceptance(np.array([0]))[0, 0] == pytest.approx(sampled)
    assert costs.is_drawn(np.array([0])).all()
    costs.admit(1, Kind.SEEDED)
    assert not costs.is_drawn(np.array([1])).any()


@pytest.mark.parametrize("count", [0, 1, 40])
def test_tokens_made_without_drafts_count_as_first_drafts(count):
    costs, plain = make_costs(), make_costs()
    likeness = np.random.default_rng(count).integers(0, 2, count)
    for _ in range(10):
        record(costs, [(4, 2)])
        record(plain, [(4, 2)])
    costs.record_likeness(0, likeness.astype(float))
    costs.check()
    for one in likeness.tolist():
        record(plain, [(1, one)])
    row = np.array([0])
    assert costs.acceptance(row) == pytest.approx(plain.acceptance(row))
    assert costs.mean_acceptance() == pytest.approx(plain.mean_acceptance())


def test_a_change_of_text_shows_within_a_few_half_lives():
    costs = make_costs()
    for accepted in [4] * 500 + [0] * 4 * HALF_LIFE_ROUNDS:
        record(costs, [(4, accepted)])
    assert costs.mean_acceptance()[0] < 0.2


def test_times_are_means_from_the_second_run_on():
    costs = make_costs()
    assert costs.record_time(ROUND_OF_3, 50.0) == 50.0
    assert costs.seconds == {}
    costs.record_time(ROUND_OF_3, 1.0)
    costs.record_time(ROUND_OF_3, 2.0)
    assert costs.seconds == {ROUND_OF_3: pytest.approx(NEWEST * 2 + (1 - NEWEST) * 1)}
    costs.check()


def test_a_round_that_is_no_measure_counts_while_nothing_is_known():
    costs = make_costs()
    for seconds in (50.0, 1.0, 2.0):
        costs.record_time(ROUND_OF_3, seconds, is_measure=False)
    assert costs.seconds == {ROUND_OF_3: 1.0}
    costs.seed_time(ROUND_OF_3, 3.0)
    assert costs.record_time(ROUND_OF_3, 1000.0, is_measure=False) == 3 * STALL
    assert costs.seconds == {ROUND_OF_3: 3.0}


def test_where_there_are_no_measures_what_is_none_counts_now_and_then():
    costs = make_costs()
    costs.seed_time(ROUND_OF_3, 1.0)
    for _ in range(MAX_SKIPPED):
        costs.record_time(ROUND_OF_3, 2.0, is_measure=False)
    assert costs.seconds == {ROUND_OF_3: 1.0}
    costs.record_time(ROUND_OF_3, 2.0, is_measure=False)
    found = costs.seconds[ROUND_OF_3]
    assert found == pytest.approx(NEWEST * 2 + (1 - NEWEST))
    for _ in range(3):
        for _ in range(MAX_SKIPPED):
            costs.record_time(ROUND_OF_3, 9.0, is_measure=False)
        costs.record_time(ROUND_OF_3, found)
    assert costs.seconds[ROUND_OF_3] == pytest.approx(found)


def test_a_standstill_of_the_machine_counts_as_a_slow_round_at_most():
    costs = make_costs()
    for seconds in (1.0, 1.0):
        costs.record_time(ROUND_OF_3, seconds)
    assert costs.record_time(ROUND_OF_3, 1000.0) == STALL
    assert costs.seconds[ROUND_OF_3] == pytest.approx(NEWEST * STALL + (1 - NEWEST))
    # Of a shape that has not run, what it was expected to take decides.
    other = Round(dataclasses.replace(SHAPE, chunk=32), 3)
    assert costs.record_time(other, 1000.0, 2.0) == 2 * STALL


def test_a_number_of_drafts_between_two_measured_ones_is_interpolated():
    costs = make_costs()
    for num_drafts, seconds in ((0, 1.0), (2, 1.5), (8, 4.5)):
        for _ in range(2):
            costs.record_time(Round(SHAPE, num_drafts), seconds)
    # A larger batch costs something else, and says nothing of this one.
    wide = dataclasses.replace(SHAPE, num_seqs=8)
    for _ in range(2):
        costs.record_time(Round(wide, 4), 100.0)

    def seconds_of(num_drafts: int) -> float | None:
        return costs.expected_seconds(Round(SHAPE, num_drafts))

    known = {0: 1.0, 1: 1.25, 2: 1.5, 5: 3.0, 8: 4.5}
    assert {k: seconds_of(k) for k in known} == pytest.approx(known)
    assert seconds_of(9) is None
    assert costs.expected_seconds(Round(wide, 3)) is None
    tiled = dataclasses.replace(SHAPE, chunk=32)
    assert costs.expected_seconds(Round(tiled, 2)) is None


def test_rounds_of_the_engine_are_recorded():
    """What the fake device accepted, and the time that the loop says it took."""
    config = make_config(max_num_seqs=4, num_pages=200)
    loop = Loop(config, seed=0)
    for request in make_requests(config, 4, num_draft_tokens=3):
        loop.scheduler.add(request)
    while loop.step():
        pass
    costs, device = loop.scheduler.costs, loop.device
    assert set(costs.seconds) == {
        launch.round
        for index, launch in enumerate(loop.launches)
        if launch.round in {one.round for one in loop.launches[:index]}
    }
    for one, seconds in costs.seconds.items():
        assert seconds == pytest.approx(loop.fastest_s + one.shape.chunk * loop.fed_s)
    assert device.num_proposed
    # The fake device accepts 0 to 3 of three drafts, each number as often.
    assert costs.mean_acceptance(Kind.SAMPLED)[0] == pytest.approx(3 / 4, abs=0.2)
    (late,) = make_requests(config, 1)
    loop.scheduler.add(late)
    loop.step()
    rates = costs.acceptance(np.arange(4))
    assert [(one == costs.mean_acceptance(Kind.SAMPLED)).all() for one in rates].count(
        True
    ) == 1
    assert (rates[late.row] == costs.mean_acceptance(Kind.SAMPLED)).all()


def test_what_comes_from_beside_the_spine_is_told_by_what_comes_from_it():
    costs = Costs(2, 3)
    assert costs.beside_share == 0
    for _ in range(200):
        costs.record_beside(np.array([2, 4]), np.array([1, 2]))
    assert 0.4 < costs.beside_share < 0.5
    for _ in range(200):
        costs.record_beside(np.array([2, 4]), np.array([0, 0]))
    assert costs.beside_share < 0.01


def test_what_was_foretold_counts_as_rounds_do():
    """Counted in parts of a round, and of rows with ages of their own."""
    whole, parts = make_costs(), make_costs()
    for sequences in ([(3, 2), (2, 0)], [(4, 4), (4, 1)]):
        record(whole, sequences)
    rows, zeros = np.arange(2), np.zeros(2, np.int64)

    def count(reached: Any, accepted: Any, num_rounds: np.ndarray) -> None:
        both = np.array(reached, float), np.array(accepted, float)
        compared = int(both[0].sum())
        parts.record_foretold(rows, *both, num_rounds, num_compared=compared)
        parts.check()

    count([[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]], zeros + 1)
    count([[1, 1, 0, 0], [1, 1, 0, 0]], [[1, 1, 0, 0], [1, 0, 0, 0]], zeros + 1)
    count([[0, 0, 1, 1], [0, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]], zeros)
    assert parts.acceptance(rows) == pytest.approx(whole.acceptance(rows))
    assert parts.mean_acceptance() == pytest.approx(whole.mean_acceptance())
    assert parts.num_agreed == whole.num_agreed
    # A row in which five rounds have ended is older by five, the other by none.
    count(np.zeros((2, 4)), np.zeros((2, 4)), np.array([0, 5]))
    for row, age in enumerate((0, 5)):
        share = 0.5 ** (age / HALF_LIFE_ROUNDS)
        assert parts._reached[row, 0] == pytest.approx(share * whole._reached[row, 0])


def test_after_a_run_a_draft_is_like_one_after_so_many_accepted():
    costs, rows = make_costs(), np.arange(ROWS)
    for _ in range(20):
        record(costs, [(4, 4), (4, 0), (4, 1)])
    before = costs.acceptance(rows)
    costs.note_runs(rows, np.array([0, 2, 9]))
    after = costs.acceptance(rows)
    assert after[0].tolist() == before[0].tolist()
    assert after[1].tolist() == [*before[1, 2:], *[before[1, 3]] * 2]
    assert after[2].tolist() == [before[2, 3]] * DRAFTS
    costs.admit(2)
    assert costs.acceptance(rows)[2].tolist() == costs.mean_acceptance().tolist()


def test_what_is_watched_begins_with_few_drafts():
    costs = Costs(num_rows=1, max_draft_tokens=DRAFTS, prior_rate=0.1)
    assert costs.mean_acceptance().tolist() == pytest.approx([0.1] * DRAFTS)
