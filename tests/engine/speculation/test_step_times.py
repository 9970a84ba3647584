"""Estimated round times follow the machine's speed; stalls hardly change them."""

import dataclasses

import numpy as np
import pytest

from jaxspec.engine.speculation.acceptance import Kind
from jaxspec.engine.speculation.constants import CONSTANTS
from jaxspec.engine.speculation.step_times import (
    MAX_CHANGE,
    MAX_RISE,
    MAX_SKIPPED,
    NUM_UNTYPICAL,
    STALL,
    RoundKind,
    StepTimes,
    fill_of,
    num_rows_of,
)
from jaxspec.program.plan import StepShape
from tests.support.loops import Loop, make_config, make_requests

SHAPE = StepShape(num_seqs=4, num_levels=8, max_prompt_tokens=0)
ROUND_OF_3 = RoundKind(SHAPE, 3)
PLAIN = RoundKind(dataclasses.replace(SHAPE, num_levels=0))
MIXED = RoundKind(dataclasses.replace(PLAIN.shape, max_prompt_tokens=32))


def run(times: StepTimes, round_kind: RoundKind, seconds: float, count: int) -> None:
    for _ in range(count):
        times.record(round_kind, seconds)


def test_time_is_known_from_the_second_run_on():
    times = StepTimes()
    assert times.record(ROUND_OF_3, 50.0) == 50.0
    assert times.seconds == {}
    times.record(ROUND_OF_3, 1.0)
    assert times.seconds == {ROUND_OF_3: 1.0}
    times.check()


def test_newest_time_counts_a_quarter_once_the_kind_is_known_well():
    times = StepTimes()
    run(times, ROUND_OF_3, 1.0, 1000)
    times.record(ROUND_OF_3, 1.2)
    assert times.seconds[ROUND_OF_3] == pytest.approx(1.2**0.25, abs=1e-3)


def test_slow_machine_slows_down_all_rounds_of_a_batch_size():
    times, wide = StepTimes(), dataclasses.replace(SHAPE, num_seqs=8)
    known = {ROUND_OF_3: 2.0, PLAIN: 1.0, RoundKind(wide): 1.0, MIXED: 3.0}
    for kind, seconds in known.items():
        times.seed(kind, seconds)
    run(times, ROUND_OF_3, 2.0, 100)
    assert times.seconds == known
    run(times, ROUND_OF_3, 3.0, 100)
    assert times.seconds == pytest.approx(
        known | {ROUND_OF_3: 3.0, PLAIN: 1.5}, rel=0.02
    )


def test_kind_that_does_not_run_changes_by_a_limited_factor():
    times = StepTimes()
    times.seed(ROUND_OF_3, 2.0)
    times.seed(PLAIN, 1.0)
    run(times, ROUND_OF_3, 2.0, 1000)
    run(times, ROUND_OF_3, 20.0, 100)
    assert times.seconds == pytest.approx({ROUND_OF_3: 20.0, PLAIN: MAX_CHANGE})
    run(times, ROUND_OF_3, 0.1, 100)
    assert times.seconds == pytest.approx({ROUND_OF_3: 0.1, PLAIN: 1 / MAX_CHANGE})
    # Afterwards the times are what they were.
    run(times, ROUND_OF_3, 2.0, 100)
    assert times.seconds == pytest.approx({ROUND_OF_3: 2.0, PLAIN: 1.0}, rel=0.05)


@pytest.mark.parametrize(("num_others", "plain"), [(8, 1.17), (64, 1.33)])
def test_longer_absence_attributes_more_to_the_kind_itself(num_others, plain):
    times = StepTimes()
    times.seed(ROUND_OF_3, 2.0)
    times.seed(PLAIN, 1.0)
    for _ in range(4):  # now both are known well
        run(times, PLAIN, 1.0, 100)
        run(times, ROUND_OF_3, 2.0, 100)
    run(times, PLAIN, 1.0, 100)
    run(times, ROUND_OF_3, 2.0, num_others + NUM_UNTYPICAL)
    run(times, PLAIN, 1.4, CONSTANTS.explore_rounds)
    ratio = times.seconds[ROUND_OF_3] / times.seconds[PLAIN]
    assert 2.0 / ratio == pytest.approx(plain, abs=0.03)


def test_noise_of_two_rounds_in_turn_does_not_change_a_third():
    """Else the speed would drift until it is infinite, and drafts would look cheap."""
    times, random = StepTimes(), np.random.default_rng(0)
    for round_kind in (RoundKind(SHAPE, 2), ROUND_OF_3, PLAIN):
        times.seed(round_kind, 1.0)
    for _ in range(5000):
        for num_draft_tokens in (2, 3):
            seconds = float(np.exp(0.2 * random.standard_normal()))
            times.record(RoundKind(SHAPE, num_draft_tokens), seconds)
    assert times.seconds[PLAIN] == pytest.approx(1.0, rel=0.4)


def test_time_measured_by_calibration_replaces_earlier_ones():
    times = StepTimes()
    times.seed(ROUND_OF_3, 2.0)
    times.seed(PLAIN, 1.0)
    run(times, ROUND_OF_3, 4.0, 100)
    times.seed(PLAIN, 1.0)
    assert times.seconds == pytest.approx({ROUND_OF_3: 4.0, PLAIN: 1.0})
    run(times, PLAIN, 1.4, NUM_UNTYPICAL + 1)
    assert times.seconds[PLAIN] > 1.25, "the first time counts much"


def test_time_of_zero_by_a_coarse_clock_is_ignored():
    times = StepTimes()
    run(times, PLAIN, 0.0, 2)
    assert times.seconds == {}
    run(times, PLAIN, 1.0, 2)
    assert times.seconds == {PLAIN: 1.0}


def test_kind_that_has_not_run_for_long_gets_its_own_time():
    """Otherwise an exploration would show that all kinds have changed, or none."""
    times = StepTimes()
    times.seed(ROUND_OF_3, 2.0)
    times.seed(PLAIN, 1.0)
    run(times, ROUND_OF_3, 2.0, 100)
    run(times, PLAIN, 1.4, CONSTANTS.explore_rounds)
    plain, drafted = times.seconds[PLAIN], times.seconds[ROUND_OF_3]
    assert plain == pytest.approx(1.4, rel=0.01)
    assert drafted / plain == pytest.approx(2.0 / 1.4, rel=0.1)
    run(times, ROUND_OF_3, 2.0, NUM_UNTYPICAL + 8)
    assert times.seconds[PLAIN] == pytest.approx(1.4, rel=0.1)


def test_first_time_counts_even_if_it_is_untypical():
    times = StepTimes()
    for seconds in (50.0, 1.0, 2.0):
        times.record(ROUND_OF_3, seconds)
    assert times.seconds == {ROUND_OF_3: 1.0}
    times.seed(ROUND_OF_3, 3.0)
    assert times.record(ROUND_OF_3, 1000.0) == 3 * STALL
    assert times.seconds == {ROUND_OF_3: 3.0}


def test_time_of_a_round_with_padding_depends_on_its_rows():
    times = StepTimes(fixed_rows=16)
    times.seed(ROUND_OF_3, 4.0)
    assert times.expected(ROUND_OF_3) == 4.0
    # The fixed part takes as long as the 16 rows of a full round.
    assert times.expected(ROUND_OF_3, fill=0.5) == 3.0
    # A time as expected changes nothing; a longer one is limited to STALL times it.
    assert times.record(ROUND_OF_3, 3.0, fill=0.5) == 3.0
    assert times.seconds[ROUND_OF_3] == 4.0
    assert times.record(ROUND_OF_3, 1000.0, fill=0.5) == 3.0 * STALL
    # A round without drafts has fewer rows, so its fixed part is more of its time.
    times.seed(RoundKind(SHAPE, 0), 1.0)
    assert times.expected(RoundKind(SHAPE, 0), fill=0.5) == 0.9
    # Without padding that is left out, the number of rows makes no difference.
    others = StepTimes()
    others.seed(ROUND_OF_3, 4.0)
    assert others.expected(ROUND_OF_3, fill=0.5) == 4.0


def test_fill_is_the_share_of_rows_with_tokens():
    assert fill_of(RoundKind(SHAPE), 4) == 1
    assert fill_of(RoundKind(SHAPE), 1) == 0.25
    mixed = RoundKind(dataclasses.replace(SHAPE, max_prompt_tokens=64))
    assert fill_of(mixed, 2, 14) == (2 + 14) / (4 + 64)
    assert fill_of(RoundKind(StepShape.draft_prefill(64)), 0, 16) == 0.25
    # One of two sequences has all 8 drafts, the other has none.
    assert num_rows_of(SHAPE, np.array([8, 0])) == 10
    assert fill_of(RoundKind(SHAPE, 8), 10) == 10 / 36
    plain = dataclasses.replace(SHAPE, num_levels=0)
    assert num_rows_of(plain, np.array([8, 0])) == 2


def test_times_count_only_some_rounds_after_drafts_begin_or_end():
    times = StepTimes()
    times.seed(ROUND_OF_3, 2.0)
    times.seed(PLAIN, 1.0)
    before = dict(times.seconds)
    for _ in range(2):
        run(times, ROUND_OF_3, 2.2, NUM_UNTYPICAL)
        run(times, PLAIN, 1.2, NUM_UNTYPICAL)
        # A probe of the draft model has the same effect.
        times.record(RoundKind(StepShape.draft_prefill(64)), 1.0)
        run(times, PLAIN, 1.2, NUM_UNTYPICAL)
        assert times.seconds.items() >= before.items()
        times.check()
    run(times, PLAIN, 1.2, 1)
    assert times.seconds[PLAIN] == pytest.approx(1.15, abs=0.01)


@pytest.mark.parametrize("num_levels", [0, 8])
def test_first_time_of_a_program_after_another_does_not_count(num_levels):
    """Whether or not the launch with prompts was in a program with drafts."""
    times = StepTimes()
    times.seed(PLAIN, 1.0)
    run(times, PLAIN, 1.0, 100)
    shape = dataclasses.replace(MIXED.shape, num_levels=num_levels)
    times.record(RoundKind(shape), 1.0)
    times.record(PLAIN, 1.4)
    assert times.seconds[PLAIN] == 1.0
    times.record(PLAIN, 1.4)
    assert times.seconds[PLAIN] > 1.05


def test_untypical_time_counts_after_many_of_them():
    times = StepTimes()
    times.seed(PLAIN, 1.0)
    for _ in range(MAX_SKIPPED):
        times.record(MIXED, 1.0)
        times.record(PLAIN, 1.4)
    assert times.seconds[PLAIN] == 1.0
    times.record(MIXED, 1.0)
    times.record(PLAIN, 1.4)
    assert times.seconds[PLAIN] > 1.05


def test_suspension_of_the_machine_counts_as_a_slow_round():
    times = StepTimes()
    run(times, ROUND_OF_3, 1.0, 1000)
    assert times.record(ROUND_OF_3, 1000.0) == pytest.approx(STALL)
    known = MAX_RISE**0.25
    assert times.seconds[ROUND_OF_3] == pytest.approx(known, abs=1e-3)
    # For a shape without a measured time, the limit is its expected time.
    assert times.record(MIXED, 1000.0, 2.0) == 2 * STALL


def test_time_between_two_measured_k_is_interpolated():
    times = StepTimes()
    for num_draft_tokens, seconds in ((0, 1.0), (2, 1.5), (8, 4.5)):
        for _ in range(2):
            times.record(RoundKind(SHAPE, num_draft_tokens), seconds)
    # A larger batch was measured, but its time is not that of this batch.
    wide = dataclasses.replace(SHAPE, num_seqs=8)
    for _ in range(2):
        times.record(RoundKind(wide, 4), 100.0)

    def seconds_of(num_draft_tokens: int) -> float | None:
        return times.expected(RoundKind(SHAPE, num_draft_tokens))

    known = {0: 1.0, 1: 1.25, 2: 1.5, 5: 3.0, 8: 4.5}
    assert {k: seconds_of(k) for k in known} == pytest.approx(known)
    assert seconds_of(9) is None
    assert times.expected(RoundKind(wide, 3)) is None
    tiled = dataclasses.replace(SHAPE, max_prompt_tokens=32)
    assert times.expected(RoundKind(tiled, 2)) is None


def test_rounds_of_the_engine_are_recorded():
    """Recorded acceptance and times equal those of the fake device."""
    config = make_config(max_num_seqs=4, num_pages=200)
    loop = Loop(config, seed=0)
    loop.run(make_requests(config, 4, max_draft_tokens=3))
    times, device = loop.scheduler.step_times, loop.device
    acceptance = loop.scheduler.acceptance
    assert set(times.seconds) == {
        launch.round_kind
        for index, launch in enumerate(loop.launches)
        if launch.round_kind in {one.round_kind for one in loop.launches[:index]}
    }
    for one, seconds in times.seconds.items():
        assert seconds == pytest.approx(
            loop.fastest_s + one.shape.max_prompt_tokens * loop.prompt_token_s
        )
    for launch in loop.launches:
        num_rows = len(launch.rows) + int(launch.draft_counts.sum())
        num_prompt_tokens = sum(len(tile.tokens) for tile in launch.plan.tiles)
        expected = fill_of(launch.round_kind, num_rows, num_prompt_tokens)
        assert launch.fill == expected
    assert device.num_proposed
    # The fake device accepts 0 to 3 of three drafts with equal probability.
    assert acceptance.mean(Kind.SAMPLED)[0] == pytest.approx(3 / 4, abs=0.2)
    (late,) = make_requests(config, 1)
    loop.scheduler.add(late)
    loop.step()
    rates = acceptance.of_rows(np.arange(4))
    assert [(one == acceptance.mean(Kind.SAMPLED)).all() for one in rates].count(
        True
    ) == 1
    assert (rates[late.row] == acceptance.mean(Kind.SAMPLED)).all()
