"""Drafting falls to nothing where it is switched off; all K share two rungs."""

import pytest

from jaxspec.config import SpeculativeConfig
from jaxspec.engine.controller import Controller


def make_controller(num_draft_tokens: int, threshold: int | None = None) -> Controller:
    return Controller(
        SpeculativeConfig(
            model="draft",
            num_speculative_tokens=num_draft_tokens,
            disable_by_batch_size=threshold,
        )
    )


@pytest.mark.parametrize("configured", range(1, 9))
def test_every_wish_gets_a_rung_that_serves_it(configured):
    controller = make_controller(configured)
    assert controller.ladder == (0, configured)
    assert controller.rung(0) == 0
    for wanted in range(1, configured + 1):
        assert controller.rung(wanted) == configured


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
