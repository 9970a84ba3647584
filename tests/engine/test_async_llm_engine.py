"""Streams over a fake device: order of outputs, slow readers, aborts, failures."""

import asyncio
import copy
import inspect
from typing import Any

import pytest

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.errors import EngineDeadError, RequestError, RetryableRequestError
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_engines import PROMPT, letters, said, serve

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def served(**options: Any) -> Any:
    """Make a test of a coroutine function whose first argument is a served engine."""

    def decorate(use: Any) -> Any:
        def test(**arguments: Any) -> None:
            serve(lambda serving: use(serving, **arguments), **options)

        _, *fixtures = inspect.signature(use).parameters.values()
        made: Any = test
        made.__signature__ = inspect.Signature(fixtures)
        return made

    return decorate


async def outputs_of(
    serving: AsyncLLMEngine, request_id: str, **params: Any
) -> list[RequestOutput]:
    params.setdefault("max_tokens", 9)
    stream = serving.generate(PROMPT, SamplingParams(**params), request_id)
    return [output async for output in stream]


@served(delay_s=0.002)
async def test_streams_of_every_output_kind_are_complete(serving):
    whole = letters(said(9))
    grown, deltas, last = await asyncio.gather(
        outputs_of(serving, "a"),
        outputs_of(serving, "b", output_kind=DELTA),
        outputs_of(serving, "c", output_kind=FINAL),
    )
    texts = [output.outputs[0].text for output in grown]
    assert texts[-1] == whole
    assert all(whole.startswith(text) for text in texts)
    assert "".join(output.outputs[0].text for output in deltas) == whole
    assert [output.outputs[0].text for output in last] == [whole]
    for outputs in (grown, deltas, last):
        finished = [output.finished for output in outputs]
        assert finished == [False] * (len(outputs) - 1) + [True]


@served()
async def test_request_starts_when_the_first_output_is_awaited(serving):
    # Two generators get the same id, but the first is never iterated.
    serving.generate(PROMPT, SamplingParams(max_tokens=4), "same")
    assert len(await outputs_of(serving, "same", max_tokens=4)) > 0


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE])
@served()
async def test_slow_reader_gets_all_text_in_fewer_outputs(serving, kind):
    params = SamplingParams(max_tokens=20, output_kind=kind)
    parts, copies = [], []
    async for output in serving.generate(PROMPT, params, "slow"):
        parts.append(output.outputs[0])
        copies.append(copy.deepcopy(parts[-1]))
        if len(parts) == 1:
            # The other requests continue meanwhile.
            assert (await outputs_of(serving, "other"))[-1].finished
            while await serving.get_num_unfinished_requests():
                await asyncio.sleep(0.005)
    assert len(parts) == 2
    assert parts == copies, "the caller owns the outputs that it has read"
    whole = parts if kind is DELTA else parts[1:]
    assert "".join(part.text for part in whole) == letters(said(20))
    assert [token for part in whole for token in part.token_ids] == said(20)


@served(delay_s=0.005)
async def test_closing_a_stream_early_aborts_its_request(serving):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    stream = serving.generate(PROMPT, params, "left")
    async for _ in stream:
        break
    await stream.aclose()
    assert await serving.get_num_unfinished_requests() == 0


@served(delay_s=0.01)
async def test_closing_an_ended_stream_does_not_abort_a_new_request_of_its_id(serving):
    params = SamplingParams(max_tokens=6)
    left = serving.generate(PROMPT, params, "same")
    await anext(left)
    while await serving.get_num_unfinished_requests():
        await asyncio.sleep(0.005)
    # The request has ended, so its id is free, although not all its outputs were
    # read.
    following = serving.generate(PROMPT, SamplingParams(max_tokens=30), "same")
    outputs = [await anext(following)]
    await left.aclose()
    outputs += [output async for output in following]
    assert outputs[-1].outputs[0].text == letters(said(30))


@served(delay_s=0.005)
async def test_a_cancelled_task_aborts(serving):
    for wait_s in (0.0, 0.001, 0.02):
        task = asyncio.ensure_future(
            outputs_of(serving, "gone", max_tokens=None, ignore_eos=True)
        )
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("num_texts", [1, 3])
@served(delay_s=0.004)
async def test_abort_ends_the_stream(serving, num_texts):
    task = asyncio.ensure_future(
        outputs_of(serving, "a", max_tokens=None, ignore_eos=True, n=num_texts)
    )
    other = asyncio.ensure_future(outputs_of(serving, "b"))
    while not serving.engine.is_unfinished("a"):
        await asyncio.sleep(0.001)
    await serving.abort("a")
    await serving.abort(["a", "unknown"])
    last = (await task)[-1]
    assert last.finished
    assert {one.finish_reason for one in last.outputs} == {"abort"}
    assert (await other)[-1].outputs[0].text == letters(said(9))


@served(delay_s=0.02)
async def test_bad_requests_are_rejected_without_side_effects(serving):
    running = asyncio.ensure_future(outputs_of(serving, "a", max_tokens=30))
    while not await serving.get_num_unfinished_requests():
        await asyncio.sleep(0.001)
    with pytest.raises(RequestError, match="'a' is already running"):
        await outputs_of(serving, "a")
    bad: Any = 7
    for given in ((PROMPT, SamplingParams(), bad), ([], SamplingParams(), "b")):
        with pytest.raises(RequestError):
            await anext(serving.generate(*given))
    with pytest.raises(NotImplementedError, match="lora_request"):
        await anext(serving.generate(PROMPT, SamplingParams(), "c", "lora"))
    assert (await running)[-1].outputs[0].text == letters(said(30))


def test_shutdown_reports_to_waiting_callers():
    async def use(serving: AsyncLLMEngine) -> None:
        task = asyncio.ensure_future(
            outputs_of(serving, "a", max_tokens=None, ignore_eos=True)
        )
        while not await serving.get_num_unfinished_requests():
            await asyncio.sleep(0.001)
        await asyncio.to_thread(serving.shutdown, 10)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    with pytest.raises(EngineDeadError):
        serve(use, delay_s=0.005)


@pytest.mark.parametrize("mode", ["abort", "wait"])
@served(delay_s=0.004)
async def test_pause_ends_or_waits_for_requests_and_rejects_new_ones(serving, mode):
    task = asyncio.ensure_future(outputs_of(serving, "a", max_tokens=30))
    while not await serving.get_num_unfinished_requests():
        await asyncio.sleep(0.001)
    await serving.pause_generation(mode=mode)
    assert await serving.get_num_unfinished_requests() == 0
    (text,) = (await task)[-1].outputs
    expected = ("abort", False) if mode == "abort" else ("length", True)
    assert (text.finish_reason, len(text.token_ids) == 30) == expected
    with pytest.raises(RetryableRequestError, match="paused"):
        await outputs_of(serving, "b")
    with pytest.raises(RequestError, match="mode must be.*'keep', got 'x'"):
        await serving.pause_generation(mode="x")
    await serving.resume_generation()
    assert not await serving.is_paused()
    assert (await outputs_of(serving, "b"))[-1].finished


@served(delay_s=0.004)
async def test_added_requests_have_a_queue_of_outputs(serving):
    queue = await serving.add_request("a", PROMPT, SamplingParams(max_tokens=9))
    assert queue.get_nowait() is None
    while not (output := await queue.get()).finished:
        continue
    assert output.outputs[0].text == letters(said(9))
    with pytest.raises(RequestError):
        await serving.add_request("b", [], SamplingParams())
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    queue = await serving.add_request("c", PROMPT, long)
    queue.close()
    assert await serving.get_num_unfinished_requests() == 0
    assert [driver.num_texts for driver in serving._drivers] == [0]


@served()
async def test_several_event_loops_share_an_engine(serving):
    def elsewhere() -> list[RequestOutput]:
        return asyncio.run(outputs_of(serving, "b"))

    ours, theirs = await asyncio.gather(
        outputs_of(serving, "a"), asyncio.to_thread(elsewhere)
    )
    assert ours[-1].outputs[0].text == theirs[-1].outputs[0].text


@served(delay_s=0.005)
async def test_rejected_sleep_leaves_requests_and_wake_up_restores_parts(serving):
    asked = asyncio.ensure_future(outputs_of(serving, "a", max_tokens=40))
    while not await serving.get_num_unfinished_requests():
        await asyncio.sleep(0.001)
    for wrong, name in (((3, "abort"), "level"), ((1, "keep"), "mode")):
        with pytest.raises(RequestError, match=f"{name} must be"):
            await serving.sleep(*wrong)
    assert await serving.get_num_unfinished_requests() == 1
    await serving.sleep()
    assert (await asked)[-1].outputs[0].finish_reason == "abort"
    waiting = [
        asyncio.ensure_future(outputs_of(serving, name, max_tokens=4))
        for name in ("b", "c")
    ]
    while await serving.get_num_unfinished_requests() < 2:
        await asyncio.sleep(0.001)
    await serving.abort("c")
    assert (await waiting[1])[-1].outputs[0].finish_reason == "abort"
    await serving.sleep(mode="wait")  # it sleeps already
    assert not await serving.wake_up(["weights"])
    assert await serving.is_sleeping()
    assert not waiting[0].done()
    assert await serving.wake_up()
    assert not await serving.is_sleeping()
    assert (await waiting[0])[-1].outputs[0].finish_reason == "length"


@served()
async def test_other_methods_reach_the_engine(serving):
    assert await serving.get_tokenizer() is serving.engine.tokenizer
    assert await serving.reset_prefix_cache()
    assert not await serving.is_sleeping()
    assert not await serving.is_tracing_enabled()
    assert serving.is_running
    assert not serving.is_stopped
    assert not serving.errored
    await serving.do_log_stats()
    with pytest.raises(NotImplementedError, match="pooling"):
        await serving.encode("x")
