"""The thread that steps an engine, and its communication with other threads.

Calls enter through a queue that is served between two steps. Outputs are returned
through one collector per request, in the event loop of its caller.
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

# The engine stops after this many consecutive failed steps without an output.
MAX_FAILURES = 3

Command = tuple[Callable[[LLMEngine], Any], Future[Any]]


class EngineThread:
    """Owns an engine: only this thread uses it; calls run between two steps.

    Attributes:
        dead_error: Why the thread has stopped for good, or None.
    """

    def __init__(
        self,
        engine: LLMEngine,
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[BaseException], None],
    ):
        """Make the thread; `start` starts it.

        Args:
            deliver: Called in the thread with the outputs of a step.
            fail: Called in the thread with the error of a failed step, whose requests
                have ended.
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
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs and serves requests."""
        return self._thread.is_alive() and not self._is_stopped

    def call(self, function: Callable[[LLMEngine], Any]) -> Future[Any]:
        """Call a function with the engine, in the thread, before the next step.

        Returns:
            A future of its result or error; of `EngineDeadError` if the thread has
            stopped.
        """
        result: Future[Any] = Future()
        with self._lock:
            if self._is_stopped:
                result.set_exception(self.dead_error or EngineDeadError())
            else:
                self._commands.put((function, result))
        return result

    def pause(self, *, is_paused: bool) -> None:
        """Pause or resume steps; calls are still served."""
        self._is_paused = is_paused
        self._commands.put(None)

    def stop(self, timeout: int | float | None = None) -> bool:
        """Stop the thread after its current step; return whether it has ended."""
        self._close(self.dead_error)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while not self._is_stopped:
            is_idle = self._is_paused or self._engine.is_sleeping()
            has_work = self._engine.has_unfinished_requests() and not is_idle
            if not has_work:
                self._engine.log_if_due()  # no further step will log
            self._handle_calls(waits=not has_work)
            if not has_work or self._is_stopped:
                continue
            try:
                outputs = self._engine.step()
            except EngineDeadError as error:
                _log.exception("The engine cannot continue")
                self._end_all(error, is_last=True)
            except Exception as error:  # noqa: BLE001 - callers get it
                failures += 1
                _log.exception("A step failed; its requests have ended")
                self._end_all(error, is_last=failures == MAX_FAILURES)
            except BaseException as error:
                self._end_all(error, is_last=True)
                raise
            else:
                if outputs:
                    failures = 0
                    self._deliver(outputs)

    def _handle_calls(self, *, waits: bool) -> None:
        """Run the queued calls; if `waits`, block until there is at least one."""
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
            # Also for a Rust panic, which is no `Exception`: otherwise the caller would
            # wait forever.
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
        """Accept no more calls; queued ones get the error."""
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
    """One engine, the thread that steps it, and the collectors of its outputs.

    Attributes:
        engine: Owned by the thread: do not use it while requests run.
        collectors: By request id; only the thread adds to them.
        num_texts: Number of texts of its unfinished requests.
    """

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.collectors: dict[str, RequestOutputCollector] = {}
        self.num_texts = 0
        self.thread = EngineThread(engine, self._deliver, self._fail)
        self.thread.start()

    def add_prepared(
        self, prepared: Prepared, collector: "RequestOutputCollector"
    ) -> Future[Any]:
        """Queue a request before the next step, with its collector registered first.

        While the engine sleeps, the request waits for its wake-up.
        """

        def add(engine: LLMEngine) -> None:
            engine.add_prepared(prepared, may_wait_for_wake_up=True)
            self.collectors[prepared.request_id] = collector

        return self.thread.call(add)

    def take_back(self, collector: "RequestOutputCollector") -> None:
        """Abort a request whose caller has left.

        The collector identifies the request: another request may have its id by then.
        """

        def take_back(engine: LLMEngine) -> None:
            if self.collectors.get(collector.request_id) is collector:
                self.forget(collector)
                engine.abort_request(collector.request_id)

        self.thread.call(take_back)

    def forget(self, collector: "RequestOutputCollector") -> None:
        """Deliver no more outputs of a request."""
        if self.collectors.get(collector.request_id) is collector:
            del self.collectors[collector.request_id]

    def abort(self, engine: LLMEngine, ids: Iterable[str]) -> None:
        """Abort requests, in the thread; their callers get a last output."""
        ids = list(ids)
        engine.abort_request(ids)
        for request_id in ids:
            collector = self.collectors.get(request_id)
            if collector is not None:
                _call_soon(collector.loop, collector.abort)

    def shutdown(self, timeout: int | float | None) -> None:
        """Stop the thread, and shut the engine down if the thread ends in time."""
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
                output.freeze()  # the caller reads it while the engine continues
                batches.setdefault(collector.loop, []).append((collector, output))
        for loop, batch in batches.items():
            _call_soon(loop, _put_all, batch)

    def _fail(self, error: BaseException) -> None:
        """Pass an error, as a new exception each, to the requests that it has ended."""
        for collector in list(self.collectors.values()):
            if isinstance(error, EngineDeadError):
                passed: Exception = EngineDeadError(str(error))
            elif self.engine.is_unfinished(collector.request_id):
                continue
            else:
                passed = EngineGenerateError(
                    f"A step of this request failed: {error!r}. The engine continues; "
                    "send the request again."
                )
            passed.__cause__ = error
            _call_soon(collector.loop, collector.fail, passed)


class RequestOutputCollector:
    """Merges the outputs of one request that its caller has not fetched yet.

    Used in the event loop that it was made in. A caller that is slower than the engine
    gets fewer and longer outputs, and does not delay others.
    """

    def __init__(
        self,
        request_id: str,
        kind: RequestOutputKind,
        num_texts: int = 1,
        on_end: Callable[["RequestOutputCollector", bool], None] | None = None,
    ):
        """Make an empty collector.

        Args:
            on_end: Called once, with the collector and whether the request still runs:
                after the last output, an error, or `close`.
        """
        self.request_id, self._on_end = request_id, on_end
        self.loop = asyncio.get_running_loop()
        self._is_delta = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | None = None
        self._latest: RequestOutput | None = None
        # Newest output of each text: an output may contain only some of the texts.
        self._texts = {
            index: CompletionOutput(index=index, text="", token_ids=[])
            for index in range(num_texts)
        }
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; none may follow the last one or an error."""
        self._texts |= {text.index: text for text in output.outputs}
        if self._waiting is None:
            self._waiting = output
        else:
            self._waiting.add(output, aggregate=self._is_delta)
        self._has_news.set()
        if output.finished:
            self._end(is_running=False)

    def fail(self, error: BaseException) -> None:
        """Make the next `get` raise; drop outputs that were not fetched."""
        self._waiting, self._error = None, error
        self._has_news.set()
        self._end(is_running=False)

    def abort(self) -> None:
        """Finish with the text so far and finish reason "abort"."""
        self.put(self._aborted())

    async def get(self) -> RequestOutput:
        """Wait for an output.

        Raises:
            BaseException: The error passed to `fail`.
        """
        await self._has_news.wait()
        output = self.get_nowait()
        assert output is not None
        return output

    def get_nowait(self) -> RequestOutput | None:
        """Return an output, or None if there is none yet.

        Raises:
            BaseException: The error passed to `fail`.
        """
        if not self._has_news.is_set():
            return None
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        output, self._waiting = self._waiting, None
        assert output is not None
        self._latest = output
        return output

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._end(is_running=True)

    def _end(self, *, is_running: bool) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self, is_running)

    def _aborted(self) -> RequestOutput:
        """Return the last output: texts so far, or empty deltas of unfinished ones."""
        texts = list(self._texts.values())
        if self._is_delta:
            texts = [_emptied(text) for text in texts if not text.finished()]
        latest = self._waiting or self._latest
        if latest is None:
            latest = RequestOutput(
                request_id=self.request_id, prompt=None, prompt_token_ids=None
            )
        return dataclasses.replace(
            latest,
            finished=True,
            outputs=[text if text.finished() else _ended(text) for text in texts],
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
