"""The thread that steps an engine, and the ways of other threads to it and from it.

Calls go in through a queue that is served between two steps; outputs come back through
a collector per request, in the event loop of whoever waits.
"""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from jaxspec.engine.input_processor import Prepared
from jaxspec.engine.llm_engine import LOG_INTERVAL_S, LLMEngine
from jaxspec.errors import EngineDeadError, EngineGenerateError, is_panic
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind

_log = logging.getLogger(__name__)

# Steps that fail one after the other, and nothing came of any: it will not get better.
MAX_FAILURES = 3

Command = tuple[Callable[[LLMEngine], Any], Future[Any]]


class EngineThread:
    """Owns an engine: only this thread uses it, and calls run between two steps.

    Attributes:
        dead_error: Why the thread has ended for good, or None.
    """

    def __init__(
        self,
        engine: LLMEngine,
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[BaseException], None],
    ):
        """Make the thread; `start` starts it.

        Args:
            deliver: Called in the thread with what a step gave.
            fail: Called in the thread when a step has failed: its requests have ended.
        """
        self.dead_error: EngineDeadError | None = None
        self._engine, self._deliver, self._fail = engine, deliver, fail
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_paused = self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="jaxspec-engine", daemon=True
        )

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it steps, or would if there were requests."""
        return self._thread.is_alive() and not self._is_stopped

    def call(self, function: Callable[[LLMEngine], Any]) -> Future[Any]:
        """Have a function called with the engine, before the next step.

        Returns:
            What it returns or raises; `EngineDeadError` where no step will come.
        """
        result: Future[Any] = Future()
        with self._lock:
            if self._is_stopped:
                result.set_exception(self.dead_error or EngineDeadError())
            else:
                self._commands.put((function, result))
        return result

    def pause(self, *, is_paused: bool) -> None:
        """Take no steps, or take them again; calls are answered meanwhile."""
        self._is_paused = is_paused
        self._commands.put(None)

    def stop(self, timeout: int | float | None = None) -> bool:
        """End the thread after the step it is in; whether that is over."""
        self._close(self.dead_error)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while not self._is_stopped:
            has_work = self._engine.has_unfinished_requests() and not self._is_paused
            if not has_work:
                self._engine.log_if_due()  # what came since the last step's line
            self._handle_calls(waits=not has_work)
            if not has_work or self._is_stopped:
                continue
            try:
                outputs = self._engine.step()
            except EngineDeadError as error:
                _log.exception("The engine cannot go on")
                self._end_all(error, is_last=True)
            except Exception as error:  # noqa: BLE001 - callers get it
                failures += 1
                _log.exception("A step failed: the requests it was for have ended")
                self._end_all(error, is_last=failures == MAX_FAILURES)
            except BaseException as error:
                self._end_all(error, is_last=True)
                raise
            else:
                if outputs:
                    failures = 0
                    self._deliver(outputs)

    def _handle_calls(self, *, waits: bool) -> None:
        """Run the queued calls; `waits` blocks until there is one."""
        try:
            command = self._commands.get(block=waits, timeout=LOG_INTERVAL_S)
            while True:
                if command is not None:
                    self._handle(*command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _handle(
        self, function: Callable[[LLMEngine], Any], result: Future[Any]
    ) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(self._engine))
        except BaseException as error:
            # The caller of a call that met a panic would wait for ever.
            result.set_exception(error)
            if not (isinstance(error, Exception) or is_panic(error)):
                raise

    def _end_all(self, error: BaseException, *, is_last: bool) -> None:
        if is_last:
            dead = EngineDeadError()
            dead.__cause__ = error
            self._close(dead)
            error = dead
        self._fail(error)

    def _close(self, error: EngineDeadError | None) -> None:
        """Take no more calls; queued ones get the error."""
        with self._lock:
            self.dead_error, self._is_stopped = error, True
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(error or EngineDeadError())
        self._commands.put(None)  # for a thread that waits


class EngineDriver:
    """One engine, the thread that steps it, and who waits for its outputs.

    Attributes:
        engine: Belongs to the thread: not to be touched while requests run.
        collectors: By request; only the thread adds to them.
        num_texts: Of requests that have been given to it and have not ended.
    """

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.collectors: dict[str, RequestOutputCollector] = {}
        self.num_texts = 0
        self.thread = EngineThread(engine, self._deliver, self._fail)
        self.thread.start()

    def admit(
        self, prepared: Prepared, collector: "RequestOutputCollector"
    ) -> Future[Any]:
        """Queue a request before the next step, so that no output comes before it."""

        def admit(engine: LLMEngine) -> None:
            engine.admit(prepared)
            self.collectors[prepared.request_id] = collector

        return self.thread.call(admit)

    def take_back(self, collector: "RequestOutputCollector") -> None:
        """Abort a request that nobody waits for.

        Not by its id: that may be another request's by then.
        """

        def take_back(engine: LLMEngine) -> None:
            if self.collectors.get(collector.request_id) is collector:
                self.forget(collector)
                engine.abort_request(collector.request_id)

        self.thread.call(take_back)

    def forget(self, collector: "RequestOutputCollector") -> None:
        """Pass no more outputs of a request."""
        if self.collectors.get(collector.request_id) is collector:
            del self.collectors[collector.request_id]

    def abort(self, engine: LLMEngine, ids: Iterable[str]) -> None:
        """End requests, in the thread; who waits gets a last output."""
        ids = list(ids)
        engine.abort_request(ids)
        for one in ids:
            collector = self.collectors.get(one)
            if collector is not None:
                _call_soon(collector.loop, collector.abort)

    def shutdown(self, timeout: int | float | None) -> None:
        """End the thread, and the engine if the thread ends in time."""
        has_stopped = self.thread.stop(timeout)
        self._fail(EngineDeadError("The engine was shut down."))
        if has_stopped and self.thread.dead_error is None:
            self.engine.shutdown()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass a step's outputs to their event loops, in one call per loop."""
        batches: dict[
            asyncio.AbstractEventLoop,
            list[tuple[RequestOutputCollector, RequestOutput]],
        ] = {}
        for output in outputs:
            collector = self.collectors.get(output.request_id)
            if collector is not None:
                output.freeze()  # whoever reads it does so while the engine goes on
                batches.setdefault(collector.loop, []).append((collector, output))
        for loop, batch in batches.items():
            _call_soon(loop, _put_all, batch)

    def _fail(self, error: BaseException) -> None:
        """Pass an error to every request that it has ended, each its own exception."""
        for collector in list(self.collectors.values()):
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


class RequestOutputCollector:
    """Merges the outputs of one request that its caller has not fetched yet.

    Used in the event loop that it was made in. A caller that is slower than the engine
    gets fewer and longer outputs, and never holds up the others.
    """

    def __init__(self, request_id: str, kind: RequestOutputKind, num_texts: int = 1):
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._is_delta = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | None = None
        self._latest: RequestOutput | None = None
        # What was last put of each text: an output may be of some only.
        self._texts = {
            index: CompletionOutput(index=index, text="", token_ids=[])
            for index in range(num_texts)
        }
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Take an output; nothing is added after the last one or an error."""
        self._texts |= {one.index: one for one in output.outputs}
        if self._waiting is None:
            self._waiting = output
        else:
            self._waiting.add(output, aggregate=self._is_delta)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """Make the next `get` raise; drop what was not fetched."""
        self._waiting, self._error = None, error
        self._has_news.set()

    def abort(self) -> None:
        """Finish with the text so far, for the reason "abort"."""
        self.put(self._aborted())

    async def get(self) -> RequestOutput:
        """Wait for an output.

        Raises:
            BaseException: What `fail` was given.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        output, self._waiting = self._waiting, None
        assert output is not None
        self._latest = output
        return output

    def _aborted(self) -> RequestOutput:
        """The last output: the texts so far, or (deltas) nothing new of who went on."""
        texts = list(self._texts.values())
        if self._is_delta:
            texts = [_emptied(one) for one in texts if not one.finished()]
        latest = self._waiting or self._latest
        if latest is None:
            latest = RequestOutput(
                request_id=self.request_id, prompt=None, prompt_token_ids=None
            )
        return dataclasses.replace(
            latest,
            finished=True,
            outputs=[one if one.finished() else _ended(one) for one in texts],
        )


def _emptied(completion: CompletionOutput) -> CompletionOutput:
    logprobs = completion.logprobs
    nothing = None if logprobs is None else logprobs[:0]
    none = None if completion.token_origins is None else []
    return dataclasses.replace(
        completion, text="", token_ids=[], logprobs=nothing, token_origins=none
    )


def _ended(completion: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(completion, finish_reason="abort")


def _put_all(batch: list[tuple[RequestOutputCollector, RequestOutput]]) -> None:
    for collector, output in batch:
        collector.put(output)


def _call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function in an event loop, unless the loop has closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
