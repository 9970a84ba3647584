"""Estimated round times are moving averages, and stalls hardly change them."""

import dataclasses

import numpy as np
import pytest

from jaxspec.engine.speculation.acceptance import Kind
from jaxspec.engine.speculation.step_times import (
    MAX_RISE,
    MAX_SKIPPED,
    NEWEST,
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


def test_time_is_a_mean_from_the_second_run_on():
    times = StepTimes()
    assert times.record(ROUND_OF_3, 50.0) == 50.0
    assert times.seconds == {}
    times.record(ROUND_OF_3, 1.0)
    times.record(ROUND_OF_3, 1.2)
    known = NEWEST * 1.2 + (1 - NEWEST) * 1
    assert times.seconds == {ROUND_OF_3: pytest.approx(known)}
    times.check()


def test_first_time_counts_even_if_it_is_untypical():
    times = StepTimes()
    for seconds in (50.0, 1.0, 2.0):
        times.record(ROUND_OF_3, seconds, is_measure=False)
    assert times.seconds == {ROUND_OF_3: 1.0}
    times.seed(ROUND_OF_3, 3.0)
    assert times.record(ROUND_OF_3, 1000.0, is_measure=False) == 3 * STALL
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


def test_untypical_time_counts_after_many_of_them():
    times = StepTimes()
    times.seed(ROUND_OF_3, 1.0)
    for _ in range(MAX_SKIPPED):
        times.record(ROUND_OF_3, 2.0, is_measure=False)
    assert times.seconds == {ROUND_OF_3: 1.0}
    times.record(ROUND_OF_3, 2.0, is_measure=False)
    found = times.seconds[ROUND_OF_3]
    assert found == pytest.approx(NEWEST * MAX_RISE + (1 - NEWEST))
    for _ in range(3):
        for _ in range(MAX_SKIPPED):
            times.record(ROUND_OF_3, 9.0, is_measure=False)
        times.record(ROUND_OF_3, found)
    assert times.seconds[ROUND_OF_3] == pytest.approx(found)


def test_suspension_of_the_machine_counts_as_a_slow_round():
    times = StepTimes()
    for seconds in (1.0, 1.0):
        times.record(ROUND_OF_3, seconds)
    assert times.record(ROUND_OF_3, 1000.0) == STALL
    assert times.seconds[ROUND_OF_3] == pytest.approx(NEWEST * MAX_RISE + (1 - NEWEST))
    # For a shape without a measured time, the limit is its expected time.
    other = RoundKind(dataclasses.replace(SHAPE, max_prompt_tokens=32), 3)
    assert times.record(other, 1000.0, 2.0) == 2 * STALL


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
