"""Streams over a fake device: order of outputs, slow readers, aborts, failures."""

import asyncio
from typing import Any

import pytest

from jaxspec.engine.async_llm_engine import AsyncLLMEngine
from jaxspec.engine.engine_thread import MAX_FAILURES
from jaxspec.errors import EngineDeadError, EngineGenerateError, RequestError
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_engines import PROMPT, letters, said, serve

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


async def outputs_of(
    serving: AsyncLLMEngine, request_id: str, **params: Any
) -> list[RequestOutput]:
    params.setdefault("max_tokens", 9)
    stream = serving.generate(PROMPT, SamplingParams(**params), request_id)
    return [output async for output in stream]


def test_streams_of_every_output_kind_are_complete():
    async def use(serving: AsyncLLMEngine) -> None:
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

    serve(use, delay_s=0.002)


def test_request_starts_when_the_first_output_is_awaited():
    async def use(serving: AsyncLLMEngine) -> None:
        # Two generators get the same id, but the first is never iterated.
        serving.generate(PROMPT, SamplingParams(max_tokens=4), "same")
        assert len(await outputs_of(serving, "same", max_tokens=4)) > 0

    serve(use)


@pytest.mark.parametrize("kind", [DELTA, RequestOutputKind.CUMULATIVE])
def test_slow_reader_gets_all_text_in_fewer_outputs(kind):
    async def use(serving: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=20, output_kind=kind)
        outputs = []
        async for output in serving.generate(PROMPT, params, "slow"):
            outputs.append(output)
            if len(outputs) == 1:
                # The other requests continue meanwhile.
                assert (await outputs_of(serving, "other"))[-1].finished
                while await serving.get_num_unfinished_requests():
                    await asyncio.sleep(0.005)
        assert len(outputs) == 2
        texts = [output.outputs[0].text for output in outputs]
        whole = letters(said(20))
        assert ("".join(texts) if kind is DELTA else texts[-1]) == whole

    serve(use)


def test_closing_a_stream_early_aborts_its_request():
    async def use(serving: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        stream = serving.generate(PROMPT, params, "left")
        async for _ in stream:
            break
        await stream.aclose()
        assert await serving.get_num_unfinished_requests() == 0

    serve(use, delay_s=0.005)


def test_closing_an_ended_stream_does_not_abort_a_new_request_of_its_id():
    async def use(serving: AsyncLLMEngine) -> None:
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

    serve(use, delay_s=0.01)


def test_a_cancelled_task_aborts():
    async def use(serving: AsyncLLMEngine) -> None:
        for wait_s in (0.0, 0.001, 0.02):
            task = asyncio.ensure_future(
                outputs_of(serving, "gone", max_tokens=None, ignore_eos=True)
            )
            await asyncio.sleep(wait_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    serve(use, delay_s=0.005)


@pytest.mark.parametrize("num_texts", [1, 3])
def test_abort_ends_the_stream(num_texts):
    async def use(serving: AsyncLLMEngine) -> None:
        task = asyncio.ensure_future(
            outputs_of(serving, "a", max_tokens=None, ignore_eos=True, n=num_texts)
        )
        other = asyncio.ensure_future(outputs_of(serving, "b"))
        await asyncio.sleep(0.02)
        await serving.abort("a")
        await serving.abort(["a", "unknown"])
        last = (await task)[-1]
        assert last.finished
        assert {one.finish_reason for one in last.outputs} == {"abort"}
        assert (await other)[-1].outputs[0].text == letters(said(9))

    serve(use, delay_s=0.004)


def test_bad_requests_are_rejected_without_side_effects():
    async def use(serving: AsyncLLMEngine) -> None:
        running = asyncio.ensure_future(outputs_of(serving, "a", max_tokens=30))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="'a' is already running"):
            await outputs_of(serving, "a")
        bad: Any = 7
        for given in ((PROMPT, SamplingParams(), bad), ([], SamplingParams(), "b")):
            with pytest.raises(RequestError):
                await anext(serving.generate(*given))
        with pytest.raises(NotImplementedError, match="lora_request"):
            await anext(serving.generate(PROMPT, SamplingParams(), "c", "lora"))
        assert (await running)[-1].outputs[0].text == letters(said(30))

    serve(use, delay_s=0.02)


def test_failed_step_is_reported_to_callers_and_the_next_is_served():
    async def use(serving: AsyncLLMEngine) -> None:
        runner: Any = serving.engine.runner
        launch, runner.launch = runner.launch, _broken
        with pytest.raises(EngineGenerateError, match="boom"):
            await outputs_of(serving, "a")
        runner.launch = launch
        await serving.check_health()
        assert (await outputs_of(serving, "a"))[-1].finished

    serve(use)


def test_dead_engine_reports_to_all_callers():
    async def use(serving: AsyncLLMEngine) -> None:
        runner: Any = serving.engine.runner
        launch, runner.launch = runner.launch, _broken
        errors = []
        for number in range(MAX_FAILURES):
            with pytest.raises((EngineGenerateError, EngineDeadError)) as raised:
                await outputs_of(serving, str(number))
            errors.append(type(raised.value))
        assert errors[-1] is EngineDeadError
        runner.launch = launch
        assert serving.errored
        assert not serving.is_running
        with pytest.raises(EngineDeadError):
            await serving.check_health()
        with pytest.raises(EngineDeadError):
            await outputs_of(serving, "late")

    with pytest.raises(EngineDeadError):
        serve(use)


def _broken(*_: object) -> None:
    raise RuntimeError("boom")


def test_shutdown_reports_to_waiting_callers():
    async def use(serving: AsyncLLMEngine) -> None:
        task = asyncio.ensure_future(
            outputs_of(serving, "a", max_tokens=None, ignore_eos=True)
        )
        await asyncio.sleep(0.02)
        await asyncio.to_thread(serving.shutdown, 10)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    with pytest.raises(EngineDeadError):
        serve(use, delay_s=0.005)


def test_generation_can_be_paused():
    async def use(serving: AsyncLLMEngine) -> None:
        await serving.pause_generation()
        task = asyncio.ensure_future(outputs_of(serving, "a"))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert await serving.get_num_unfinished_requests() == 1
        await serving.resume_generation()
        assert (await task)[-1].finished

    serve(use)


def test_several_event_loops_share_an_engine():
    async def use(serving: AsyncLLMEngine) -> None:
        def elsewhere() -> list[RequestOutput]:
            return asyncio.run(outputs_of(serving, "b"))

        ours, theirs = await asyncio.gather(
            outputs_of(serving, "a"), asyncio.to_thread(elsewhere)
        )
        assert ours[-1].outputs[0].text == theirs[-1].outputs[0].text

    serve(use)


def test_many_streams_return_their_own_texts():
    async def use(serving: AsyncLLMEngine) -> None:
        counts = [1 + number % 13 for number in range(40)]
        streams = [
            outputs_of(serving, str(number), max_tokens=count, output_kind=DELTA)
            for number, count in enumerate(counts)
        ]
        for count, outputs in zip(counts, await asyncio.gather(*streams), strict=True):
            text = "".join(output.outputs[0].text for output in outputs)
            assert text == letters(said(count))

    serve(use, max_num_seqs=4)


def test_sleep_waits_for_or_aborts_requests():
    async def use(serving: AsyncLLMEngine) -> None:
        def ask(name: str, count: int) -> asyncio.Future[list[RequestOutput]]:
            asked = outputs_of(serving, name, max_tokens=count, output_kind=FINAL)
            return asyncio.ensure_future(asked)

        async def begun(count: int) -> None:
            while await serving.get_num_unfinished_requests() < count:
                await asyncio.sleep(0.001)

        asked = [ask("a", 40), ask("b", 40)]
        await begun(2)
        for wrong, name in (((3, "abort"), "level"), ((1, "keep"), "mode")):
            with pytest.raises(RequestError, match=f"{name} must be"):
                await serving.sleep(*wrong)
        assert await serving.get_num_unfinished_requests() == 2
        await serving.sleep()
        assert await serving.is_sleeping()
        for one in asked:
            (output,) = await one
            assert output.outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match=r"is asleep.* call wake_up\(\)"):
            await ask("c", 4)
        await serving.wake_up(["weights"])
        assert await serving.is_sleeping()
        await serving.wake_up()
        assert not await serving.is_sleeping()
        one = ask("d", 20)
        await begun(1)
        await serving.sleep(mode="wait")
        (output,) = await one
        assert output.outputs[0].text == letters(said(20))
        await serving.wake_up()

    serve(use, delay_s=0.005)


def test_other_methods_reach_the_engine():
    async def use(serving: AsyncLLMEngine) -> None:
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

    serve(use)
