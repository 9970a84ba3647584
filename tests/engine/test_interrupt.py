"""The engine still works after an interrupt or a failure inside a step."""

from typing import Any

import pytest

from jaxspec.sampling_params import SamplingParams
from tests.support import pair
from tests.support.engines import generate, make_engine

PROMPTS = [[2, 5, 7], [2, 9, 4, 11]]


@pytest.fixture(scope="module")
def engine():
    """Return an engine with its own arrays, as an interrupted step loses its arrays."""
    return make_engine(
        pair.target(),
        pair.draft("noisy"),
        num_draft_tokens=pair.NUM_DRAFT,
        has_one_shape=True,
        **pair.SETTINGS,
    )


def texts(engine: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = generate(engine, PROMPTS, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


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

    def fail(result: Any, shape: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "fetch", fail)
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
