"""The asynchronous engine: many callers, each with its own stream of outputs."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, no_type_check

from jaxspec.engine.arg_utils import AsyncEngineArgs, EngineArgs
from jaxspec.engine.engine_group import least_loaded, make_engines, total_load
from jaxspec.engine.engine_thread import EngineDriver, RequestOutputCollector
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.loader import check_level
from jaxspec.engine.metrics import Load
from jaxspec.engine.speculation.policy import Choice
from jaxspec.engine.stat_loggers import check_stat_loggers
from jaxspec.errors import (
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    RetryableRequestError,
    check_choice,
    refuse,
)
from jaxspec.metrics import Metric
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

__all__ = ["AsyncEngineArgs", "AsyncLLMEngine", "EngineDeadError"]

T = TypeVar("T")

# Seconds between two checks of `sleep` whether requests are left.
IDLE_POLL_S = 0.02
# Length from which a text takes more than some milliseconds to encode.
LONG_CHARACTERS = 20_000
# Number of threads for long work: new grammars, long texts.
NUM_LONG_WORK = 2


class AsyncLLMEngine:
    """vLLM's asynchronous engine: `generate` is an asynchronous generator.

    A thread of its own steps the engine; callers may be in any number of event loops.

    Attributes:
        engine: The first engine. Its thread owns it: do not use it while requests run.
    """

    def __init__(self, engine: LLMEngine, *others: LLMEngine):
        """Serve one or several engines; a request goes to the least loaded of them."""
        self.engine = engine
        self._drivers = [EngineDriver(one) for one in (engine, *others)]
        self._lock = threading.Lock()
        self._is_paused = self._rejects_requests = False
        self._long_work = ThreadPoolExecutor(NUM_LONG_WORK, "jaxspec-long-work")
        self._corpora_thread = ThreadPoolExecutor(1, "jaxspec-corpora")

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: Sequence[type] | None = None,
    ) -> "AsyncLLMEngine":
        """Build an engine from vLLM's arguments.

        Args:
            usage_context: Accepted for vLLM's signature; no usage is reported.
            stat_loggers: Classes of `jaxspec.v1.metrics.loggers`, without effect.

        Raises:
            UnsupportedError: A class of `stat_loggers` is the caller's own.
        """
        check_stat_loggers(stat_loggers)
        return cls(*make_engines(engine_args))

    @no_type_check  # `InputProcessor` checks, with better errors
    async def run_in_thread(self, function: Callable[[], T], *, is_long: bool) -> T:
        """Run a function in a thread, so that the event loop continues.

        Args:
            is_long: It may take seconds, like new grammars and long texts. Long work
                has its own threads, so that short work does not wait for it.
        """
        loop = asyncio.get_running_loop()
        threads = self._long_work if is_long else None
        run = partial(contextvars.copy_context().run, function)
        return await loop.run_in_executor(threads, run)

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
        """Continue a prompt; yield outputs as they are made.

        The request starts when the first output is awaited, or waits for `wake_up` if
        the engine sleeps. Leaving the loop early, or
        cancelling the task, aborts it. A caller that is slower than the engine gets
        several outputs as one: the newest, or deltas joined.

        Args:
            request_id: Unique among unfinished requests.
            priority: Lower values run first, with `scheduling_policy="priority"`.
            lora_request: Not supported, like `tokenization_kwargs`.
            trace_headers: HTTP headers of the trace that the request belongs to; needs
                `otlp_traces_endpoint`.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable, the id is in
                use.
            RetryableRequestError: The engine is paused; see `pause_generation`.
            NotImplementedError: An argument or a sampling value that is not supported.
            EngineGenerateError: A step of this request failed.
            EngineDeadError: The engine has stopped.
        """
        collector = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        try:
            is_finished = False
            while not is_finished:
                output = await collector.get()
                _check_sound(output)
                is_finished = output.finished
                yield output
        finally:
            collector.close()

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: dict[str, str] | None = None,
        priority: int = 0,
    ) -> RequestOutputCollector:
        """Start a request; return the queue of its outputs.

        `await queue.get()` returns the next output, `queue.get_nowait()` returns None
        if there is none yet, and `queue.close()` aborts the request. An output with
        `finished` is the last one. The other arguments and errors are those of
        `generate`.

        Args:
            arrival_time: Accepted for vLLM's signature; a request arrives now.
        """
        refuse("lora_request", lora_request)
        refuse("tokenization_kwargs", tokenization_kwargs or None)
        if self.errored:
            raise self.dead_error
        self._check_not_paused()
        # `prepare` rejects parameters of another type.
        is_long = getattr(params, "structured_outputs", None) is not None
        is_long |= isinstance(prompt, str) and len(prompt) > LONG_CHARACTERS
        # The first engine's input processor serves all engines.
        prepared = await self.run_in_thread(
            partial(
                self.engine.input_processor.prepare,
                request_id,
                prompt,
                params,
                priority=priority,
                trace_headers=trace_headers,
            ),
            is_long=is_long,
        )
        self._check_not_paused()
        count = len(prepared.requests)
        with self._lock:
            driver = self._choose(prepared.request_id)
            driver.num_texts += count

        def end(collector: RequestOutputCollector, is_running: bool) -> None:
            if is_running:
                driver.take_back(collector)
            else:
                driver.forget(collector)
            with self._lock:
                driver.num_texts -= count

        collector = RequestOutputCollector(
            request_id, params.output_kind, params.n, end
        )
        try:
            await _done(driver.add_prepared(prepared, collector))
        except BaseException:
            # After a cancellation the request may run already, so it is aborted.
            collector.close()
            raise
        return collector

    def _choose(self, request_id: str) -> EngineDriver:
        for driver in self._drivers:
            if driver.engine.is_unfinished(request_id):
                return driver  # this engine rejects the duplicate id
        return least_loaded(
            self._drivers, lambda one: (not one.engine.is_ready, one.num_texts)
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; callers get a last output with finish reason "abort".

        Unknown ids are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._each_driver(lambda driver: partial(driver.abort, ids=ids))

    async def get_tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer."""
        return self.engine.tokenizer

    async def check_health(self) -> None:
        """Return once every engine has responded.

        Raises:
            EngineDeadError: An engine has stopped.
        """
        await self._each(lambda engine: None)

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return all(driver.thread.is_running for driver in self._drivers)

    @property
    def is_stopped(self) -> bool:
        """Whether an engine has ended, because of errors or `shutdown`."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether any engine has stopped because of errors."""
        return any(driver.thread.dead_error for driver in self._drivers)

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that requests get if `errored`."""
        found = (driver.thread.dead_error for driver in self._drivers)
        return next(filter(None, found), EngineDeadError())

    @property
    def is_ready(self) -> bool:
        """Whether a plain request would start at once; see `LLMEngine`."""
        return any(driver.engine.is_ready for driver in self._drivers)

    @property
    def num_warming(self) -> int:
        """Number of programs left to compile."""
        return sum(driver.engine.num_warming for driver in self._drivers)

    @property
    def compiling(self) -> str | None:
        """Name of a program being compiled, or None."""
        found = (driver.engine.compiling for driver in self._drivers)
        return next(filter(None, found), None)

    @property
    def choice(self) -> Choice:
        """The first engine's current choice of K."""
        return self.engine.choice

    async def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run."""
        return sum(await self._each(LLMEngine.get_num_unfinished_requests))

    async def get_metrics(self) -> list[Metric]:
        """Return counts and distributions since the start; see `LLMEngine`.

        The label `engine` distinguishes several engines.
        """
        return [
            one for found in await self._each(LLMEngine.get_metrics) for one in found
        ]

    async def get_load(self) -> Load:
        """Return the current load of all engines together."""
        return total_load(await self._each(LLMEngine.load))

    async def do_log_stats(self) -> None:
        """Log statistics since the last log."""
        await self._each(LLMEngine.do_log_stats)

    async def is_tracing_enabled(self) -> bool:
        """Return whether a span is recorded for each request."""
        return self.engine.config.otlp_traces_endpoint is not None

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache; see `LLMEngine.reset_prefix_cache`."""
        flags = reset_running_requests, reset_connector
        return all(await self._each(lambda engine: engine.reset_prefix_cache(*flags)))

    async def add_external_corpus(
        self,
        corpus_id: str,
        token_chunks: Sequence[Sequence[int]],
        cache_salt: str | None = None,
    ) -> int:
        """Add texts that suffix drafts may copy; see `LLMEngine`."""
        return await self._change_corpora(
            lambda engine: engine.add_external_corpus(
                corpus_id, token_chunks, cache_salt
            )
        )

    async def remove_external_corpus(self, corpus_id: str) -> None:
        """Remove a corpus; see `LLMEngine`."""
        await self._change_corpora(
            lambda engine: engine.remove_external_corpus(corpus_id)
        )

    async def list_external_corpora(self) -> dict[str, int]:
        """Return the number of tokens of each corpus, by its id."""
        return self.engine.list_external_corpora()

    async def check_new_corpus(
        self, corpus_id: str, cache_salt: str | None = None
    ) -> None:
        """Check what does not depend on the tokens; see `LLMEngine`."""
        self.engine.check_new_corpus(corpus_id, cache_salt)

    async def _change_corpora(self, change: Callable[[LLMEngine], T]) -> T:
        """Change the corpora of all engines, or of none if one raises an error.

        The engines run meanwhile. One thread makes one change after another, also for a
        caller that is cancelled, so that all engines have the same corpora.
        """
        if self.errored:
            raise self.dead_error

        def change_all() -> T:
            before = self.engine.corpora
            changed, results = list[LLMEngine](), list[T]()
            try:
                for driver in self._drivers:
                    results.append(change(driver.engine))
                    changed.append(driver.engine)
            except BaseException:
                for engine in changed:
                    engine.restore_corpora(before)
                raise
            return results[0]

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._corpora_thread, change_all)

    @no_type_check  # it has its own checks, with better errors
    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the devices' memory until `wake_up`; see `LLMEngine.sleep`.

        Requests that arrive while the engine sleeps wait for `wake_up`.

        Args:
            mode: "abort" ends requests with the text so far; "wait" waits until no
                request is left, including those that arrive before the engine sleeps.

        Raises:
            RequestError: There is no such level or mode.
        """
        check_level(level)
        hint = "" if mode != "keep" else "Requests cannot outlive their dropped pages."
        check_choice(RequestError, "mode", mode, ("abort", "wait"), hint)

        def fall_asleep(driver: EngineDriver, engine: LLMEngine) -> bool:
            if mode == "abort":
                driver.abort(engine, list(driver.collectors))
            if engine.is_sleeping():
                return True
            if engine.get_num_unfinished_requests():
                return False
            engine.sleep(level)
            return True

        while not all(
            await self._each_driver(lambda driver: partial(fall_asleep, driver))
        ):
            await asyncio.sleep(IDLE_POLL_S)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Restore what `sleep` freed: all, or only "weights" or "kv_cache".

        Returns:
            Whether everything is restored; waiting requests then run.
        """
        await self._each(lambda engine: engine.wake_up(tags))
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        """Return whether any part of an engine is off the devices."""
        return any(await self._each(LLMEngine.is_sleeping))

    @no_type_check  # it has its own checks, with better errors
    async def pause_generation(
        self, *, mode: str = "abort", clear_cache: bool = True
    ) -> None:
        """Take no steps until `resume_generation`.

        Args:
            mode: "abort" ends requests with the text so far, "wait" waits until they
                have ended; both reject new requests while paused. "keep" stops
                requests where they are, and queues new ones.
            clear_cache: Clear the prefix cache. Requests that "keep" has stopped then
                compute their keys and values again.

        Raises:
            RequestError: There is no such mode.
        """
        check_choice(RequestError, "mode", mode, ("abort", "wait", "keep"))
        self._is_paused, self._rejects_requests = True, mode != "keep"
        if mode != "keep":
            await self._until_idle(mode)
        for driver in self._drivers:
            driver.thread.pause(is_paused=True)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Take steps and accept requests again."""
        self._is_paused = self._rejects_requests = False
        for driver in self._drivers:
            driver.thread.pause(is_paused=False)

    async def is_paused(self) -> bool:
        """Return whether `pause_generation` has stopped the engines."""
        return self._is_paused

    def _check_not_paused(self) -> None:
        if self._rejects_requests:
            raise RetryableRequestError(
                "The engine is paused, and rejects requests until resume_generation."
            )

    async def _until_idle(self, mode: str) -> None:
        """Wait until no request is left; with mode "abort", abort them all."""

        def is_idle(driver: EngineDriver, engine: LLMEngine) -> bool:
            if mode == "abort":
                driver.abort(engine, list(driver.collectors))
            return not engine.get_num_unfinished_requests()

        while not all(await self._each_driver(lambda driver: partial(is_idle, driver))):
            await asyncio.sleep(IDLE_POLL_S)

    async def start_profile(self, folder: str = "jaxspec_profile") -> None:
        """Record a device profile for TensorBoard or Perfetto in a folder."""
        first = self._drivers[0].thread  # the profiler is one per process
        await _done(first.call(lambda engine: engine.runner.start_profile(folder)))

    async def stop_profile(self) -> None:
        """Write the recorded profile."""
        first = self._drivers[0].thread
        await _done(first.call(lambda engine: engine.runner.stop_profile()))

    async def encode(self, *_: object, **__: object) -> None:
        """Raise `NotImplementedError`: vLLM's method for pooling models."""
        raise NotImplementedError(
            "encode() belongs to pooling models; Gemma generates text. To get token "
            "ids use (await get_tokenizer()).encode(text)."
        )

    def shutdown(self, timeout: int | float | None = None) -> None:
        """End all requests and threads; waiting callers get `EngineDeadError`.

        Args:
            timeout: Maximum number of seconds to wait for the current step.
        """
        for driver in self._drivers:
            driver.thread.stop(0)  # all end at once, and not one after the other
        for driver in self._drivers:
            driver.shutdown(timeout)

    async def _each(self, function: Callable[[LLMEngine], T]) -> list[T]:
        """Call a function with each engine, in its thread."""
        return await self._each_driver(lambda driver: function)

    async def _each_driver(
        self, function_of: Callable[[EngineDriver], Callable[[LLMEngine], T]]
    ) -> list[T]:
        called = [driver.thread.call(function_of(driver)) for driver in self._drivers]
        return await asyncio.gather(*map(_done, called))


async def _done(called: Future[T]) -> T:
    return await asyncio.wrap_future(called)


def _check_sound(output: RequestOutput) -> None:
    """Raise if a text ended with an error.

    Raises:
        EngineGenerateError: With the reason.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise EngineGenerateError(
                f"{completion.stop_reason} Other requests continue."
            )
