"""A failure or an interrupt ends only the affected requests, or only drafting."""

import dataclasses
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest

from jaxspec.engine.compiler import Compiler
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.multihost.channel import Followers
from jaxspec.errors import EngineDeadError
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.program.plan import StepShape
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support import pair
from tests.support.engines import generate, tokens_of
from tests.support.fake_engines import assert_idle, make_fake_engine, run_all, said

POISON = 15
PROMPTS = [[2, 3, 4], [2, 3, 5], [2, 6, 4]]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


slow = partial(pytest.param, marks=pytest.mark.slow)


def add(engine: LLMEngine, **changes: Any) -> None:
    for index, prompt in enumerate(PROMPTS):
        params = dataclasses.replace(LONG, **changes)
        engine.add_request(str(index), prompt, params)


def ends_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, CompletionOutput]:
    return {name: parts[-1].outputs[0] for name, parts in outputs.items()}


def last_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    """Return the tokens of every finished request."""
    ends = ends_of(outputs)
    assert {one.finish_reason for one in ends.values()} == {"length"}
    return {name: list(one.token_ids) for name, one in ends.items()}


ALL = {str(index): said(40) for index in range(3)}


def fail(runner: Any, name: str, *, after: int, times: int = 1) -> None:
    """Make a runner's method raise in `times` calls, after the first `after` calls."""
    method, calls = getattr(runner, name), 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if after < calls <= after + times:
            raise RuntimeError("the device is gone")
        return method(*arguments)

    setattr(runner, name, called)


@pytest.mark.parametrize("where", ["launch", "fetch"])
@pytest.mark.parametrize("after", [0, *map(slow, (1, 2)), 5])
@pytest.mark.parametrize("num_seqs", [2, slow(4)])
def test_failure_with_drafts_stops_drafting(where, after, num_seqs):
    engine, runner = make_fake_engine(num_draft_tokens=3, max_num_seqs=num_seqs)
    add(engine)
    fail(runner, where, after=after)
    outputs = run_all(engine)
    assert last_of(outputs) == ALL
    assert engine.policy.is_stopped
    for end in ends_of(outputs).values():
        counts = end.spec_decode_metrics
        assert counts is not None and counts.stop_reason == "a launch failed"
    assert_idle(engine)
    _, shape = runner.plans[-1]
    assert shape.num_levels == 0
    assert not runner.device.has_draft


@pytest.mark.parametrize("is_warming", [False, True])
def test_failure_with_drafts_drops_programs_of_the_draft_model(is_warming):
    """They cannot be compiled, and their errors would end later requests."""
    engine, runner = make_fake_engine(num_draft_tokens=3)

    def compile_program(shape: StepShape) -> None:
        assert runner.device.has_draft or not shape.is_draft_prefill

    def leave_out_drafts() -> None:
        runner.device.has_draft = False
        runner.compiler.clear()

    runner.compiler, runner.compiles_in_background = Compiler(compile_program), True
    runner.leave_out_drafts = leave_out_drafts
    engine.scheduler = engine._make_scheduler()
    if is_warming:
        engine.start_warm_up()
    add(engine)
    fail(runner, "launch", after=1)
    assert last_of(run_all(engine)) == ALL
    engine.wait_for_programs()
    assert not any(shape.is_draft_prefill for shape in runner.compiler.made)


def test_failed_program_of_the_draft_model_ends_no_request():
    engine, runner = make_fake_engine(num_draft_tokens=3)

    def compile_program(shape: StepShape) -> None:
        assert not shape.is_draft_prefill

    runner.compiler, runner.compiles_in_background = Compiler(compile_program), True
    engine.scheduler = engine._make_scheduler()
    add(engine)
    assert last_of(run_all(engine)) == ALL
    while engine.num_warming:
        runner.compiler.wait(1.0)
    assert all(shape.is_draft_prefill for shape in runner.compiler.failures)
    assert len(runner.compiler.failures) == 2
    add(engine, logprobs=1)  # in programs that are not compiled yet
    assert last_of(run_all(engine)) == ALL
    reason = "the draft model's program could not be compiled"
    assert engine.policy.stop_reason == reason


@pytest.mark.parametrize("where", ["launch", "fetch"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_failure_without_drafts_ends_running_requests(where, after):
    engine, runner = make_fake_engine(num_draft_tokens=0, max_num_seqs=2)
    add(engine)
    fail(runner, where, after=after)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_all(engine)
    assert [engine.is_unfinished(str(index)) for index in range(3)] == [0, 0, 1]
    assert last_of(run_all(engine)) == {"2": said(40)}
    assert_idle(engine)


def test_texts_of_one_request_end_together():
    engine, runner = make_fake_engine(num_draft_tokens=0, max_num_seqs=2)
    add(engine, n=3)
    fail(runner, "launch", after=3)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_all(engine)
    assert not engine.is_unfinished("0")
    assert set(run_all(engine)) == {"1", "2"}
    assert_idle(engine)


def test_nan_draft_model_stops_drafting():
    engine, runner = make_fake_engine(num_draft_tokens=3)
    runner.device.is_draft_broken = True
    add(engine)
    assert last_of(run_all(engine)) == ALL
    assert engine.policy.is_stopped
    plans = [plan for plan, _ in runner.plans]
    drafting = [plan for plan in plans if any(drafts for _, drafts in plan.decode)]
    # When the NaN was read, one more launch was in flight.
    assert len(drafting) <= 2
    assert_idle(engine)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_request_with_nan_ends_alone(num_draft_tokens, kind):
    engine, runner = make_fake_engine(num_draft_tokens=num_draft_tokens, page_size=4)
    runner.device.poison = POISON
    poisoned = [2, 9, 9, 9, 9, 9, 9, 9, POISON, 3]
    for name in ("bad", "again"):
        params = dataclasses.replace(LONG, output_kind=kind)
        engine.add_request(name, poisoned, params)
        engine.add_request("good", PROMPTS[0], LONG)
        outputs = run_all(engine)
        (end,) = outputs.pop(name)
        assert end.finished
        assert end.outputs[0].finish_reason == "error"
        assert end.outputs[0].token_ids == []
        # Pages of a request with NaN are never prefix hits.
        assert end.num_cached_tokens == 0
        assert last_of(outputs) == {"good": said(40)}
        assert_idle(engine)


def test_nan_after_some_text_ends_the_request():
    text = [*range(2, 14), POISON]
    engine, runner = make_fake_engine(text, num_draft_tokens=3)
    runner.device.poison = POISON
    engine.add_request("bad", PROMPTS[0], LONG)
    (completion,) = ends_of(run_all(engine)).values()
    assert completion.finish_reason == "error"
    assert completion.token_ids == said(len(completion.token_ids), text)
    assert POISON not in completion.token_ids
    assert_idle(engine)


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_failure_stops_an_engine_over_several_hosts(where: str):
    """Drafting alone cannot be stopped: other hosts may have run the launch."""
    engine, fake = make_fake_engine(num_draft_tokens=3)
    followers = fake.followers = MagicMock(spec=Followers)
    add(engine)
    fail(fake, where, after=2)
    with pytest.raises(EngineDeadError, match="cannot recover .* Restart all of them"):
        run_all(engine)
    reason = "A launch failed: RuntimeError('the device is gone')"
    followers.break_off.assert_called_once_with(reason, may_be_loss=True)
    assert fake.device.has_draft


def test_failed_programs_with_drafts_are_reported(caplog):
    engine, runner = make_fake_engine(num_draft_tokens=3)
    add(engine)
    shape = StepShape(num_seqs=1, num_levels=3, max_prompt_tokens=0)
    runner.compiler.failures = {shape: RuntimeError("out of memory")}
    counts = ends_of(run_all(engine))["0"].spec_decode_metrics
    reason = "no program with drafts could be compiled"
    assert counts is not None and counts.stop_reason == reason
    assert reason in caplog.text
    assert engine.load().is_stopped


@pytest.fixture(scope="module")
def engine():
    """Return an engine with its own arrays, as an interrupted step loses its arrays."""
    return pair.own_engine()


def texts(engine: LLMEngine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    return tokens_of(generate(engine, PROMPTS[1:], params))


@pytest.mark.parametrize("after_rounds", [0, 1, 3])
def test_interrupt_after_donation_ends_only_the_requests(
    engine, monkeypatch, after_rounds
):
    """The worst moment: the old state is donated, the new one not yet stored."""
    expected, get, rounds = texts(engine), engine.runner.compiler.get, []

    def interrupted(shape: Any) -> Any:
        step, layout = get(shape)

        def run(*arguments: Any) -> Any:
            result = step(*arguments)
            rounds.append(shape)
            if len(rounds) > after_rounds:
                raise KeyboardInterrupt
            return result

        return run, layout

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.compiler, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            texts(engine)
    assert not engine.has_unfinished_requests()
    assert_idle(engine)
    assert texts(engine) == expected
