"""Several engines behind one's interface: `data_parallel_size` above 1.

Owns who gets a request, and steps that are under way in several engines at once. Every
engine has models, pages and programs of its own, on devices of its own: none knows of
the others.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, no_type_check

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
    """Build as many engines as `data_parallel_size` says.

    Raises:
        ConfigError: There are too few devices for all of them; nothing has been read.
    """
    config = engine_args.create_engine_config()
    engines = [LLMEngine(config)]
    for rank in range(1, config.data_parallel_size):
        own = dataclasses.replace(config, data_parallel_rank=rank)
        engines.append(LLMEngine(own, tokenizer=engines[0].tokenizer))
    return engines


def least_loaded(engines: Sequence[T], load: Callable[[T], tuple[Any, ...]]) -> T:
    """The engine that gets the next request; of equals the first."""
    return min(engines, key=load)


def total_load(loads: Sequence[Load]) -> Load:
    """What several engines hold together: sums, and the mean share of pages."""
    first = loads[0]
    return dataclasses.replace(
        first,
        num_running=sum(one.num_running for one in loads),
        num_waiting=sum(one.num_waiting for one in loads),
        num_deferred=sum(one.num_deferred for one in loads),
        num_warming=sum(one.num_warming for one in loads),
        kv_usage=sum(one.kv_usage for one in loads) / len(loads),
    )


class EngineGroup:
    """The interface of `LLMEngine`, with a thread for each engine.

    Requests are read by the first engine's input processor: those that name no seed
    draw as they would if it were the only one. Between two calls of `step` steps may
    be under way; every other call waits for them.
    """

    def __init__(self, engines: Sequence[LLMEngine]):
        self.lock = EngineLock()
        self.engines = list(engines)
        self._pool = ThreadPoolExecutor(len(self.engines), "jaxspec-engine")
        self._steps: dict[Future[list[RequestOutput]], LLMEngine] = {}
        # Of steps that have ended, for the next call of `step`.
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None

    @property
    def _first(self) -> LLMEngine:
        return self.engines[0]

    @property
    def config(self) -> EngineConfig:
        """The first engine's; the others' differ in nothing but their rank."""
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
        """The first engine's."""
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
        refuse("trace_headers", trace_headers or None)
        self.admit(
            self.input_processor.prepare(
                request_id, prompt, params, arrival_time=arrival_time, priority=priority
            )
        )
        return request_id

    @exclusive
    def admit(self, prepared: Prepared) -> None:
        """Queue what `input_processor.prepare` made; see `LLMEngine.admit`."""
        self._settle()
        self._choose(prepared).admit(prepared)

    def _choose(self, prepared: Prepared) -> LLMEngine:
        for engine in self.engines:
            if engine.is_unfinished(prepared.request_id):
                return engine  # which refuses the id
        return least_loaded(
            self.engines, lambda engine: (engine.get_num_unfinished_requests(),)
        )

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Have every engine with requests take a step; returns what is new.

        Raises:
            Exception: What a step of one of them raised; see `LLMEngine.step`.
        """
        busy = set(self._steps.values())
        for engine in self.engines:
            if engine not in busy and engine.has_unfinished_requests():
                self._steps[self._pool.submit(engine.step)] = engine
        if self._steps and not self._outputs:
            wait(self._steps, return_when=FIRST_COMPLETED)
        self._collect()
        if self._error is not None:
            self._settle()  # `is_unfinished` then knows which requests have ended
            error, self._error = self._error, None
            raise error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _collect(self) -> None:
        """Take what the steps that have ended gave."""
        for step in [one for one in self._steps if one.done()]:
            del self._steps[step]
            error = step.exception()
            if error is None:
                self._outputs += step.result()
            else:
                self._error = self._error or error

    def _settle(self) -> None:
        """Wait until no engine is in a step."""
        wait(self._steps)
        self._collect()

    def _each(self, function: Callable[[LLMEngine], T]) -> list[T]:
        """Call a function with each engine, when none is in a step."""
        self._settle()
        return [function(engine) for engine in self.engines]

    @exclusive
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do, or to return."""
        if self._steps or self._outputs or self._error is not None:
            return True
        return any(engine.has_unfinished_requests() for engine in self.engines)

    @exclusive
    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request waits or runs, or its outputs are still to be returned.

        While steps are under way, this is also true of requests that have ended.
        """
        return (
            bool(self._steps)
            or any(one.request_id == request_id for one in self._outputs)
            or any(engine.is_unfinished(request_id) for engine in self.engines)
        )

    @exclusive
    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return sum(self._each(LLMEngine.get_num_unfinished_requests))

    @exclusive
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests at once, without an output; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._each(lambda engine: engine.abort_request(ids))
        self._outputs = [one for one in self._outputs if one.request_id not in ids]

    @exclusive
    def get_metrics(self) -> list[Metric]:
        """Return every engine's, told apart by their label `engine`."""
        return [one for found in self._each(LLMEngine.get_metrics) for one in found]

    @exclusive
    def do_log_stats(self) -> None:
        """Log what happened since the last time, a line for each engine."""
        self._each(LLMEngine.do_log_stats)

    @exclusive
    def load(self) -> Load:
        """Return what all engines hold together at this moment."""
        return total_load(self._each(LLMEngine.load))

    @exclusive
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the pages of ended requests; see `LLMEngine.reset_prefix_cache`."""
        flags = reset_running_requests, reset_connector
        return all(self._each(lambda engine: engine.reset_prefix_cache(*flags)))

    @exclusive
    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLMEngine.sleep`.

        Raises:
            RequestError: Requests run, or another level; no engine sleeps then.
        """
        count = self.get_num_unfinished_requests()
        if count:
            raise RequestError(
                f"sleep() needs idle engines, and {count} requests run: finish or "
                "abort them first."
            )
        self._each(lambda engine: engine.sleep(level))

    @exclusive
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` freed; see `LLMEngine.wake_up`."""
        self._each(lambda engine: engine.wake_up(tags))

    @exclusive
    def is_sleeping(self) -> bool:
        """Whether any part of any engine is off the devices."""
        return any(self._each(LLMEngine.is_sleeping))

    def announce_compiles(self, tell: Callable[[str], None] | None) -> None:
        """Have `tell` called with what is compiled; see `LLMEngine`."""
        for engine in self.engines:
            engine.announce_compiles(tell)

    def warm_up(
        self,
        prompt_tokens: int | None = None,
        sampling_params: Iterable[SamplingParams] = (),
    ) -> None:
        """Compile every executable that requests can need, for all at once."""
        params = list(sampling_params)
        made = [
            self._pool.submit(engine.warm_up, prompt_tokens, params)
            for engine in self.engines
        ]
        for one in made:
            one.result()

    def wait_for_programs(self) -> None:
        """Return when no program is being made, or wanted, any more."""
        for engine in self.engines:
            engine.wait_for_programs()

    @exclusive
    def shutdown(self) -> None:
        """End all requests, wait for the devices and free their memory."""
        self._each(LLMEngine.shutdown)
        self._pool.shutdown()
