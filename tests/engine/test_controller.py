"""K comes from a short ladder, and falls to nothing where drafting is switched off."""

import pytest

from jaxspec.config import SpeculativeConfig
from jaxspec.engine.controller import DRAFT_LADDER, Controller


def make_controller(num_draft_tokens: int, threshold: int | None = None) -> Controller:
    return Controller(
        SpeculativeConfig(
            model="draft",
            num_speculative_tokens=num_draft_tokens,
            disable_by_batch_size=threshold,
        )
    )


@pytest.mark.parametrize("configured", range(1, 9))
def test_every_wish_gets_the_nearest_rung_that_serves_it(configured):
    controller = make_controller(configured)
    assert controller.ladder[0] == 0
    assert controller.ladder[-1] == configured
    assert set(controller.ladder) <= {*DRAFT_LADDER, configured}
    for wanted in range(configured + 1):
        rung = controller.rung(wanted)
        assert rung >= wanted
        assert not any(wanted <= other < rung for other in controller.ladder)


def test_rungs_of_a_configured_seven():
    controller = make_controller(7)
    assert controller.ladder == (0, 1, 2, 3, 5, 7)
    rungs = [controller.rung(wanted) for wanted in range(8)]
    assert rungs == [0, 1, 2, 3, 5, 5, 7, 7]


def test_plain_decoding_never_drafts():
    controller = Controller(None)
    assert controller.ladder == (0,)
    assert controller.limit(1) == 0
    assert controller.rung(0) == 0


def test_drafting_stops_above_the_batch_size_and_not_at_it():
    controller = make_controller(3, threshold=4)
    assert [controller.limit(running) for running in (1, 4, 5, 100)] == [3, 3, 0, 0]


def test_without_a_threshold_any_batch_drafts():
    assert make_controller(3).limit(10_000) == 3
