"""The engine still works after an interrupt or a failure inside a step."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of

PROMPTS = [[2, 5, 7], [2, 9, 4, 11]]


@pytest.fixture(scope="module")
def engine():
    """Return an engine with its own arrays, as an interrupted step loses its arrays."""
    return pair.own_engine()


def texts(engine: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    return tokens_of(generate(engine, PROMPTS, params))


def expect_idle(engine: Any) -> None:
    assert not engine.has_unfinished_requests()
    engine.scheduler.check_idle()


@pytest.mark.parametrize("after_rounds", [0, 1, 3])
def test_interrupt_after_donation_ends_only_the_requests(
    engine, monkeypatch, after_rounds
):
    """The worst moment: the old state is donated, the new one not yet stored."""
    expected = texts(engine)
    get, rounds = engine.runner.compiler.get, []

    def interrupted(shape: Any) -> Any:
        step, layout = get(shape)

        def run(*arguments: Any) -> Any:
            result = step(*arguments)
            rounds.append(shape)
            if len(rounds) > after_rounds:
                raise KeyboardInterrupt
            return result

        return run, layout

    monkeypatch.setattr(engine.runner.compiler, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        texts(engine)
    monkeypatch.undo()
    expect_idle(engine)
    assert texts(engine) == expected


def test_a_failing_read_ends_all_requests(engine, monkeypatch):
    expected = texts(engine)

    gone = MagicMock(side_effect=RuntimeError("the device is gone"))
    monkeypatch.setattr(engine.runner, "fetch", gone)
    with pytest.raises(RuntimeError, match="the device is gone"):
        texts(engine)
    if engine.has_unfinished_requests():
        # A request that had not run yet ends with its own error.
        with pytest.raises(RuntimeError, match="the device is gone"):
            for _ in range(3):
                engine.step()
    monkeypatch.undo()
    expect_idle(engine)
    assert texts(engine) == expected
