"""The engine for event loops: many callers, each with outputs of its own."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, no_type_check

from jaxspec.engine.arg_utils import AsyncEngineArgs, EngineArgs
from jaxspec.engine.engine_thread import EngineThread, RequestOutputCollector
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.loader import check_level
from jaxspec.engine.metrics import Load
from jaxspec.engine.scheduling.controller import Choice
from jaxspec.errors import (
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    check_choice,
    refuse,
)
from jaxspec.metrics import Metric
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

__all__ = ["AsyncEngineArgs", "AsyncLLMEngine", "EngineDeadError"]

# Between looks at whether requests are left that a sleep waits for.
IDLE_POLL_S = 0.02


class AsyncLLMEngine:
    """vLLM's asynchronous engine: `generate` is an asynchronous generator.

    A thread of its own steps the engine; callers may be in any number of event loops.

    Attributes:
        engine: Belongs to the thread: not to be touched while requests run.
    """

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self._collectors: dict[str, RequestOutputCollector] = {}
        self._thread = EngineThread(engine, self._deliver, self._fail)
        self._thread.start()

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: object = None
    ) -> "AsyncLLMEngine":
        """Build an engine from vLLM's arguments.

        Args:
            usage_context: What vLLM reports; nothing is reported here.
        """
        return cls(LLMEngine.from_engine_args(engine_args))

    @no_type_check  # `InputProcessor` checks, with better errors
    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: Any = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: dict[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; outputs come as they are made.

        Nothing happens before the first output is asked for. Leaving the loop early, or
        a cancelled task, aborts the request. A caller that is slower than the engine
        gets several outputs as one: the newest, or deltas joined.

        Args:
            request_id: Of no other request that runs.
            priority: Lower goes first, with `scheduling_policy="priority"`.
            lora_request: Not supported, as the two after it.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable, the id is in
                use, or the engine sleeps.
            NotImplementedError: An argument or a sampling value that is not supported.
            EngineGenerateError: A step that the request took part in failed.
            EngineDeadError: The engine has ended.
        """
        refuse("lora_request", lora_request)
        refuse("tokenization_kwargs", tokenization_kwargs or None)
        refuse("trace_headers", trace_headers or None)
        collector = await self._add(request_id, prompt, sampling_params, priority)
        is_finished = False
        try:
            while not is_finished:
                output = await collector.get()
                _check_sound(output)
                is_finished = output.finished
                yield output
        except EngineDeadError:
            is_finished = True
            raise
        finally:
            if is_finished:
                self._forget(collector)
            else:
                # Not by its id: that may be another request's by then.
                self._thread.call(lambda engine: self._take_back(engine, collector))

    @no_type_check
    async def _add(
        self, request_id: str, prompt: Any, params: SamplingParams, priority: int
    ) -> RequestOutputCollector:
        """Check a request beside the event loop, and queue it."""
        if self._thread.dead_error is not None:
            raise self._thread.dead_error
        prepared = await asyncio.to_thread(
            self.engine.input_processor.prepare,
            request_id,
            prompt,
            params,
            priority=priority,
        )
        collector = RequestOutputCollector(request_id, params.output_kind, params.n)

        def admit(engine: LLMEngine) -> None:
            engine.admit(prepared)
            # Before the next step, so that no output comes before it.
            self._collectors[request_id] = collector

        added = self._thread.call(admit)
        try:
            await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            # It may be too late to take it back: what was admitted is aborted.
            self._thread.call(lambda engine: self._take_back(engine, collector))
            raise
        return collector

    def _take_back(self, engine: LLMEngine, collector: RequestOutputCollector) -> None:
        if self._collectors.get(collector.request_id) is collector:
            self._forget(collector)
            engine.abort_request(collector.request_id)

    def _forget(self, collector: RequestOutputCollector) -> None:
        if self._collectors.get(collector.request_id) is collector:
            del self._collectors[collector.request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their callers get a last output, of reason "abort".

        Unknown ids are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda engine: self._abort(engine, ids))

    def _abort(self, engine: LLMEngine, ids: list[str]) -> None:
        engine.abort_request(ids)
        for one in ids:
            collector = self._collectors.get(one)
            if collector is not None:
                _call_soon(collector.loop, collector.abort)

    async def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    async def check_health(self) -> None:
        """Return if the engine answers.

        Raises:
            EngineDeadError: It has ended.
        """
        await self._call(lambda engine: None)

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_running

    @property
    def is_stopped(self) -> bool:
        return not self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has ended because of errors."""
        return self._thread.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that requests get then."""
        return self._thread.dead_error or EngineDeadError()

    @property
    def is_ready(self) -> bool:
        """Whether a plain request would start at once; see `LLMEngine`."""
        return self.engine.is_ready

    @property
    def num_warming(self) -> int:
        """Programs that are still to be made."""
        return self.engine.num_warming

    @property
    def compiling(self) -> str | None:
        """The name of the program that is being made."""
        return self.engine.compiling

    @property
    def choice(self) -> Choice:
        """K as it is now, and what it should bring."""
        return self.engine.choice

    async def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return await self._call(LLMEngine.get_num_unfinished_requests)

    async def get_metrics(self) -> list[Metric]:
        """Return counts and distributions since the start; see `LLMEngine`."""
        return await self._call(LLMEngine.get_metrics)

    async def get_load(self) -> Load:
        """Return what the engine holds at this moment."""
        return await self._call(LLMEngine.load)

    async def do_log_stats(self) -> None:
        """Log what happened since the last time."""
        await self._call(LLMEngine.do_log_stats)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def reset_prefix_cache(self) -> bool:
        """Forget the pages of ended requests; False while pages are in use."""
        return await self._call(LLMEngine.reset_prefix_cache)

    @no_type_check  # it has its own checks, with better errors
    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the devices' memory until `wake_up`; see `LLMEngine.sleep`.

        Args:
            mode: "abort" ends requests with what there is of their texts; "wait" goes
                on until none is left, those that come meanwhile included.

        Raises:
            RequestError: There is no such level or mode.
        """
        check_level(level)
        hint = "" if mode != "keep" else "No text outlives the pages that are dropped."
        check_choice(RequestError, "mode", mode, ("abort", "wait"), hint)

        def fall_asleep(engine: LLMEngine) -> bool:
            if mode == "abort":
                self._abort(engine, list(self._collectors))
            if engine.get_num_unfinished_requests():
                return False
            engine.sleep(level)
            return True

        while not await self._call(fall_asleep):
            await asyncio.sleep(IDLE_POLL_S)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` freed: all, or "weights" or "kv_cache" alone."""
        await self._call(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether any part is off the devices."""
        return await self._call(LLMEngine.is_sleeping)

    async def pause_generation(self) -> None:
        """Take no steps until `resume_generation`; requests keep their places."""
        self._thread.pause(is_paused=True)

    async def resume_generation(self) -> None:
        """Take steps again."""
        self._thread.pause(is_paused=False)

    async def start_profile(self, folder: str = "jaxspec_profile") -> None:
        """Record what the devices do, for TensorBoard or Perfetto, into a folder."""
        await self._call(lambda engine: engine.runner.start_profile(folder))

    async def stop_profile(self) -> None:
        """Write what was recorded."""
        await self._call(lambda engine: engine.runner.stop_profile())

    async def encode(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "encode() belongs to pooling models; Gemma 2 generates text. To get token "
            "ids use (await get_tokenizer()).encode(text)."
        )

    def shutdown(self, timeout: int | float | None = None) -> None:
        """End all requests, and the thread; who waits gets `EngineDeadError`.

        Args:
            timeout: Most seconds to wait for the step that is under way.
        """
        has_stopped = self._thread.stop(timeout)
        self._fail(EngineDeadError("The engine was shut down."))
        if has_stopped and self._thread.dead_error is None:
            self.engine.shutdown()

    async def _call(self, function: Callable[[LLMEngine], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.call(function))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass a step's outputs to their event loops, in one call per loop."""
        batches: dict[
            asyncio.AbstractEventLoop,
            list[tuple[RequestOutputCollector, RequestOutput]],
        ] = {}
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                output.freeze()  # whoever reads it does so while the engine goes on
                batches.setdefault(collector.loop, []).append((collector, output))
        for loop, batch in batches.items():
            _call_soon(loop, _put_all, batch)

    def _fail(self, error: BaseException) -> None:
        """Pass an error to every request that it has ended, each its own exception."""
        for collector in list(self._collectors.values()):
            if isinstance(error, EngineDeadError):
                passed: Exception = EngineDeadError(str(error))
            elif self.engine.is_unfinished(collector.request_id):
                continue
            else:
                passed = EngineGenerateError(
                    f"A step failed that this request was part of: {error!r}. The "
                    "engine goes on; send the request again."
                )
            passed.__cause__ = error
            _call_soon(collector.loop, collector.fail, passed)


def _check_sound(output: RequestOutput) -> None:
    """Refuse a text that the model could not go on with.

    Raises:
        EngineGenerateError: There is one.
    """
    if any(one.finish_reason == "error" for one in output.outputs):
        raise EngineGenerateError(
            "The model's numbers became NaN or infinite for this request. The engine "
            "goes on; if it happens again the weights are damaged, or the type is too "
            "small for them."
        )


def _put_all(batch: list[tuple[RequestOutputCollector, RequestOutput]]) -> None:
    for collector, output in batch:
        collector.put(output)


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function in an event loop, unless the loop has closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
