"""Rounds without drafts are timed again soon, and then seldom."""

from jaxspec.engine.scheduling.refresh import FIRST_WAIT_S, MAX_WAIT_S, Refresh


def due_times(refresh: Refresh, start: float, seconds: float) -> list[float]:
    """When they are due, of all hundredths of a second."""
    times = [start + hundredth / 100 for hundredth in range(int(100 * seconds))]
    return [now for now in times if refresh.begin_if_due(now)]


def test_waits_double_up_to_the_longest():
    times = [5.0, *due_times(Refresh(5.0), 5.0, 60)]
    waits = [later - one for one, later in zip(times, times[1:], strict=False)]
    expected = [min(FIRST_WAIT_S * 2**i, MAX_WAIT_S) for i in range(len(waits))]
    assert len(waits) > 8 and expected[-1] == MAX_WAIT_S
    assert all(0 < one - e < 0.02 for one, e in zip(waits, expected, strict=True))


def test_after_a_time_without_drafts_the_first_wait_is_short_again():
    refresh = Refresh(0.0)
    due_times(refresh, 0.0, 60)
    refresh.rest(100.0)
    assert not refresh.begin_if_due(100.0 + FIRST_WAIT_S)
    assert refresh.begin_if_due(100.01 + FIRST_WAIT_S)
