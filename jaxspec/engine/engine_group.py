"""Data parallelism: several engines behind the interface of one.

Assigns requests to engines, and runs steps of several engines at once. Every engine has
its own models, pages, programs and devices; engines do not communicate.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, no_type_check

from jaxspec.config.engine import EngineConfig, ServedModel
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.engine_lock import EngineLock, exclusive
from jaxspec.engine.input_processor import InputProcessor, Prepared
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.engine.metrics import Load
from jaxspec.engine.runner import Runner
from jaxspec.errors import RequestError, refuse
from jaxspec.metrics import Metric
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer

T = TypeVar("T")


def make_engines(engine_args: EngineArgs) -> list[LLMEngine]:
    """Build `data_parallel_size` engines.

    Raises:
        ConfigError: There are too few devices; raised before weights are read.
    """
    config = engine_args.create_engine_config()
    engines = [LLMEngine(config)]
    for rank in range(1, config.data_parallel_size):
        rank_config = dataclasses.replace(config, data_parallel_rank=rank)
        engines.append(LLMEngine(rank_config, tokenizer=engines[0].tokenizer))
    return engines


def least_loaded(engines: Sequence[T], load: Callable[[T], tuple[Any, ...]]) -> T:
    """Return the engine with the least load; among equals the first."""
    return min(engines, key=load)


def total_load(loads: Sequence[Load]) -> Load:
    """Return the load of several engines: sums, and the mean KV cache usage."""
    first = loads[0]
    return dataclasses.replace(
        first,
        num_running=sum(one.num_running for one in loads),
        num_waiting=sum(one.num_waiting for one in loads),
        num_deferred=sum(one.num_deferred for one in loads),
        num_warming=sum(one.num_warming for one in loads),
        kv_usage=sum(one.kv_usage for one in loads) / len(loads),
    )


class _Call(Generic[T]):
    """A call of one engine, in that engine's thread.

    Ctrl-C may interrupt the main thread between any two instructions.
    `concurrent.futures` is written in Python: an interrupt could leave its locks held.
    Waiting here takes a lock that is written in C, in a `with` statement, which always
    releases it.

    Attributes:
        is_done: The function has returned or failed.
        value, error: What it returned, or what it raised.
    """

    def __init__(self, function: Callable[[], T]):
        self.is_done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self._function = function
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Call the function; in the engine's thread."""
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            self.error = error
        self.is_done = True
        self._running.release()

    def wait(self) -> None:
        """Wait until the call is done."""
        with self._running:
            pass


class _EngineThread:
    """Makes one engine's calls in turn."""

    def __init__(self, engine: LLMEngine, ended: "SimpleQueue[None]"):
        """Start the thread.

        Args:
            ended: Gets an entry after each call.
        """
        self._engine = engine
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._is_ended = False
        # A daemon: the exit waits for its step, see `LLMEngine.begin_exit`.
        self._thread = threading.Thread(
            target=_make_calls,
            args=(self._calls, ended),
            name="jaxspec-engine",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def start(self, function: Callable[[], T]) -> _Call[T]:
        """Make a call once those before it are done.

        Raises:
            RuntimeError: The engine has been shut down, or the interpreter exits.
        """
        call = _Call(function)
        self._calls.put(call)
        # Afterwards, as `end` may come meanwhile; the thread then makes no more calls.
        if self._is_ended or self._engine.runner.compiler.is_exiting:
            raise RuntimeError("The engine has been shut down")
        return call

    def end(self) -> None:
        """End the thread after its calls, and wait for it."""
        self._is_ended = True
        self._calls.put(None)
        self._thread.join()


def _make_calls(
    calls: "SimpleQueue[_Call[Any] | None]", ended: "SimpleQueue[None]"
) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # it refers to the engine
        ended.put(None)


class EngineGroup:
    """The interface of `LLMEngine`, with a thread for each engine.

    The first engine's input processor prepares all requests, so that requests without a
    seed sample as with a single engine. Steps may be running between two calls of
    `step`; every other call waits for them.
    """

    def __init__(self, engines: Sequence[LLMEngine]):
        self.lock = EngineLock()
        self.engines = list(engines)
        # An entry per call that has ended, perhaps some time ago.
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads = {one: _EngineThread(one, self._ended) for one in self.engines}
        self._steps: dict[_Call[list[RequestOutput]], LLMEngine] = {}
        # Outputs of finished steps, for the next call of `step`.
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None

    @property
    def _first(self) -> LLMEngine:
        return self.engines[0]

    @property
    def config(self) -> EngineConfig:
        """The first engine's configuration; the others differ only in their rank."""
        return self._first.config

    @property
    def model_config(self) -> ServedModel:
        return self._first.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._first.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        return self._first.input_processor

    @property
    def runner(self) -> Runner:
        """The first engine's runner."""
        return self._first.runner

    @exclusive
    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """See `LLMEngine.set_tokenizer`."""
        self._each(lambda engine: engine.set_tokenizer(tokenizer))

    @no_type_check  # `InputProcessor` checks, with better errors
    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: dict[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Check a request and queue it at the least loaded engine; see `LLMEngine`."""
        refuse("lora_request", lora_request)
        refuse("tokenization_kwargs", tokenization_kwargs or None)
        self.add_prepared(
            self.input_processor.prepare(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                trace_headers=trace_headers,
            )
        )
        return request_id

    @exclusive
    def add_prepared(self, prepared: Prepared) -> None:
        """Queue what `input_processor.prepare` made; see `LLMEngine.add_prepared`."""
        self._settle()
        self._choose(prepared).add_prepared(prepared)

    def _choose(self, prepared: Prepared) -> LLMEngine:
        for engine in self.engines:
            if engine.is_unfinished(prepared.request_id):
                return engine  # this engine rejects the duplicate id
        return least_loaded(
            self.engines, lambda engine: (engine.get_num_unfinished_requests(),)
        )

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Step every engine that has requests; return the new outputs.

        Raises:
            Exception: The error of an engine's step; see `LLMEngine.step`.
        """
        busy = set(self._steps.values())
        for engine in self.engines:
            if engine not in busy and engine.has_unfinished_requests():
                self._steps[self._threads[engine].start(engine.step)] = engine
        num_running = len(self._steps)
        while self._steps and not self._outputs:
            self._collect()
            if len(self._steps) < num_running:
                break
            self._ended.get()
        self._collect()
        if self._error is not None:
            self._settle()  # `is_unfinished` then knows which requests have ended
            error, self._error = self._error, None
            raise error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _collect(self) -> None:
        """Collect the outputs and errors of finished steps."""
        for step in [one for one in self._steps if one.is_done]:
            del self._steps[step]
            self._outputs += step.value or []
            self._error = self._error or step.error

    def _settle(self) -> None:
        """Wait until no engine runs a step."""
        for step in self._steps:
            step.wait()
        self._collect()

    def _each(self, function: Callable[[LLMEngine], T]) -> list[T]:
        """Call a function with each engine, once no engine is running a step."""
        self._settle()
        return [function(engine) for engine in self.engines]

    @exclusive
    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything left to do, or to return."""
        if self._steps or self._outputs or self._error is not None:
            return True
        return any(engine.has_unfinished_requests() for engine in self.engines)

    @exclusive
    def is_unfinished(self, request_id: str) -> bool:
        """Return whether a request waits or runs, or has outputs left to return.

        While steps are under way, this is also true of requests that have ended.
        """
        return (
            bool(self._steps)
            or any(one.request_id == request_id for one in self._outputs)
            or any(engine.is_unfinished(request_id) for engine in self.engines)
        )

    @exclusive
    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run."""
        return sum(self._each(LLMEngine.get_num_unfinished_requests))

    @exclusive
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests at once, without an output; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._each(lambda engine: engine.abort_request(ids))
        self._outputs = [one for one in self._outputs if one.request_id not in ids]

    @exclusive
    def get_metrics(self) -> list[Metric]:
        """Return the metrics of all engines, distinguished by the label `engine`."""
        return [one for found in self._each(LLMEngine.get_metrics) for one in found]

    @exclusive
    def do_log_stats(self) -> None:
        """Log statistics since the last log, a line for each engine."""
        self._each(LLMEngine.do_log_stats)

    @exclusive
    def load(self) -> Load:
        """Return the current load of all engines together."""
        return total_load(self._each(LLMEngine.load))

    @exclusive
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix caches; see `LLMEngine.reset_prefix_cache`."""
        flags = reset_running_requests, reset_connector
        return all(self._each(lambda engine: engine.reset_prefix_cache(*flags)))

    @exclusive
    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLMEngine.sleep`.

        Raises:
            RequestError: Requests are running, or `level` is neither 1 nor 2; no engine
                sleeps then.
        """
        count = self.get_num_unfinished_requests()
        if count:
            raise RequestError(
                f"sleep() needs idle engines, but {count} requests are running: "
                "finish or abort them first."
            )
        self._each(lambda engine: engine.sleep(level))

    @exclusive
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` freed; see `LLMEngine.wake_up`."""
        self._each(lambda engine: engine.wake_up(tags))

    @exclusive
    def is_sleeping(self) -> bool:
        """Return whether any part of any engine is off the devices."""
        return any(self._each(LLMEngine.is_sleeping))

    def announce_compiles(self, announce: Callable[[str], None] | None) -> None:
        """Call `announce` with the name of each compile; see `LLMEngine`."""
        for engine in self.engines:
            engine.announce_compiles(announce)

    def warm_up(
        self,
        prompt_tokens: int | None = None,
        sampling_params: Iterable[SamplingParams] = (),
    ) -> None:
        """Compile every program that requests can need, in all engines at once."""
        params = list(sampling_params)
        warm_ups = [
            thread.start(functools.partial(engine.warm_up, prompt_tokens, params))
            for engine, thread in self._threads.items()
        ]
        for warm_up in warm_ups:
            warm_up.wait()
        for warm_up in warm_ups:
            if warm_up.error is not None:
                raise warm_up.error

    def wait_for_programs(self) -> None:
        """Wait until no program is being compiled or queued."""
        for engine in self.engines:
            engine.wait_for_programs()

    @exclusive
    def shutdown(self) -> None:
        """Abort all requests, wait for the devices and free their memory."""
        self._each(LLMEngine.shutdown)
        for thread in self._threads.values():
            thread.end()
