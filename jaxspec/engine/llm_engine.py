"""The engine: requests in, outputs out, one launch ahead of what has been read."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, no_type_check

from jaxspec.config import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.controller import Controller
from jaxspec.engine.intake import Intake
from jaxspec.engine.loading import make_runner, read_tokenizer
from jaxspec.engine.logprobs import LogprobStream
from jaxspec.engine.metrics import EngineMetrics, Load
from jaxspec.engine.output import TextStream
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Launch, Progress, Scheduler
from jaxspec.engine.sleeping import Sleep
from jaxspec.engine.stats import EngineStats
from jaxspec.errors import (
    ConfigError,
    RequestError,
    refuse,
)
from jaxspec.metrics import Metric
from jaxspec.outputs import CompletionOutput, RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.tokenizer import Tokenizer


class LLMEngine:
    """vLLM's engine interface: `add_request`, `step`, `abort_request`.

    Attributes:
        runner: The device side, with counts of launches and compiles.
        stats: Totals over all requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.config = config
        self.tokenizer = tokenizer or read_tokenizer(config)
        self.runner = runner or make_runner(config)
        self.controller = Controller(config.speculative)
        self.scheduler = Scheduler(config, self.controller)
        self.stats = EngineStats()
        self.metrics = EngineMetrics(config, self.stats)
        self._intake = Intake(config, self.tokenizer)
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, TextStream] = {}
        self._logprobs: dict[str, LogprobStream] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # characters, tokens
        self._launched: deque[tuple[Launch, Any]] = deque()
        self._planned: Launch | None = None
        self._sleep = Sleep(config, self.runner)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Build an engine from vLLM's arguments."""
        return cls(engine_args.create_engine_config())

    @no_type_check  # `Intake` checks, with better errors
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
        """Validate and queue one request; nothing has run on the device yet.

        Args:
            priority: Lower goes first, with `scheduling_policy="priority"`.
            lora_request: Not supported, as the two after it.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable, the id is in
                use, or the engine sleeps.
            NotImplementedError: An argument or a sampling value that is not supported.
        """
        refuse("lora_request", lora_request)
        refuse("tokenization_kwargs", tokenization_kwargs or None)
        refuse("trace_headers", trace_headers or None)
        if self.is_sleeping():
            raise RequestError(
                "The engine sleeps and takes no requests: call wake_up() first."
            )
        if isinstance(request_id, str) and request_id in self._requests:
            raise RequestError(
                f"request_id {request_id!r} is running already: choose another",
                parameter="request_id",
                value=request_id,
            )
        request = self._intake.make(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority
        )
        params = request.params
        self._requests[request_id] = request
        self._streams[request_id] = TextStream(self.tokenizer, params)
        self._logprobs[request_id] = LogprobStream(
            self.tokenizer, params, request.prompt_token_ids
        )
        self._sent[request_id] = (0, 0)
        self.scheduler.add(request)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Launch the next round, read the one before it, return what is new.

        Returns an empty list when the launch could not be read yet or no request has
        anything to show (`output_kind`).

        A step that fails or is interrupted ends all requests: what the device did with
        them is not known any more. The engine takes new ones.
        """
        try:
            return self._step()
        except BaseException:
            self._reset()
            raise

    def _reset(self) -> None:
        for request_id in list(self._requests):
            self._forget(self._requests[request_id])
        self.scheduler = Scheduler(self.config, self.controller)
        self._launched.clear()
        self._planned = None

    def _step(self) -> list[RequestOutput]:
        start = time.monotonic()
        launch, self._planned = self._planned, None
        if launch is None or launch.is_over():
            launch = self.scheduler.plan()
        if launch is not None:
            if self._launched and not self.runner.is_compiled(launch.shape):
                self._planned = launch  # tokens must not wait for a compile
            else:
                result = self.runner.launch(launch.plan, launch.shape)
                self._launched.append((launch, result))
        waited = 0.0
        outputs: list[RequestOutput] = []
        is_full = len(self._launched) > 1
        if self._launched and (launch is None or self._planned or is_full):
            oldest, result = self._launched.popleft()
            before = time.monotonic()
            fetched = self.runner.fetch(result, oldest.shape)
            waited = time.monotonic() - before
            progress = self.scheduler.commit(oldest, fetched)
            self.stats.num_rounds += 1
            for part in progress:
                outputs += self._advance(part)
        self.stats.wait_s += waited
        self.stats.host_s += time.monotonic() - start - waited
        return outputs

    def _advance(self, part: Progress) -> list[RequestOutput]:
        """Turn new tokens into text, and end the request where they end it."""
        request, stream = part.request, self._streams[part.request.request_id]
        logprobs = self._logprobs[request.request_id]
        if part.prompt_logprobs is not None:
            logprobs.push_prompt(part.prompt_logprobs)
        logprobs.push(part.token_ids, part.logprobs)
        self.stats.record(part.num_draft_tokens, part.num_accepted, len(part.token_ids))
        if part.token_ids:
            now = time.monotonic()
            stats = request.stats
            if not self.config.disable_log_stats:
                self.metrics.add_tokens(request, now)
            if not stats.num_generation_tokens:
                stats.first_token_ts = now
                stats.first_token_latency = now - stats.queued_ts
            stats.last_token_ts = now
            stats.num_generation_tokens += len(part.token_ids)
        ended_by_id = part.is_done and _is_stop(request)
        shown = part.token_ids
        if ended_by_id and not self._shows_stop_token(request):
            shown = part.token_ids[:-1]
        matched = stream.push(shown)
        if matched is None and part.is_done:
            text = stream.finish()
            matched = None if text is None else (text, len(part.token_ids))
        if matched is not None:
            stop, count = matched
            surplus = len(part.token_ids) - count
            if surplus:
                del request.output_token_ids[-surplus:]
                logprobs.keep(len(request.output_token_ids))
                request.stats.num_generation_tokens -= surplus
                self.stats.num_generated_tokens -= surplus
            self.scheduler.finish(request, "stop", stop)
        elif part.is_done:
            last = request.output_token_ids[-1]
            # As in vLLM: the first end id is the EOS, the others are stop ids.
            is_eos = last == self.config.model_config.eos_token_ids[0]
            stop_id = None if is_eos and not request.params.ignore_eos else last
            if ended_by_id:
                self.scheduler.finish(request, "stop", stop_id)
            else:
                self.scheduler.finish(request, "length", None)
        return self._emit(request)

    def _shows_stop_token(self, request: Request) -> bool:
        return request.params.include_stop_str_in_output

    def _emit(self, request: Request) -> list[RequestOutput]:
        """The output that the request's `output_kind` asks for now, if any."""
        kind = request.params.output_kind
        is_finished = request.finish_reason is not None
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return []
        stream = self._streams[request.request_id]
        text = stream.visible(is_finished=is_finished)
        tokens = request.output_token_ids
        characters, count = self._sent[request.request_id]
        logprobs = self._logprobs[request.request_id]
        told, prompt_told = logprobs.since(0), logprobs.prompt
        if kind is RequestOutputKind.DELTA:
            if not is_finished and len(tokens) == count:
                return []
            self._sent[request.request_id] = (len(text), len(tokens))
            text, tokens = text[characters:], tokens[count:]
            told = logprobs.since(count)
            prompt_told = None if count else prompt_told
        if is_finished:
            self._forget(request)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=list(tokens),
            cumulative_logprob=logprobs.cumulative,
            logprobs=told,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            spec_decode_metrics=request.spec_metrics,
        )
        return [
            RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=request.prompt_token_ids,
                prompt_logprobs=prompt_told,
                outputs=[completion],
                finished=is_finished,
                metrics=request.stats,
                num_cached_tokens=request.num_cached_tokens,
            )
        ]

    def _forget(self, request: Request) -> None:
        if request.finish_reason is not None and not self.config.disable_log_stats:
            self.metrics.add_finished(request)
        del self._requests[request.request_id]
        del self._streams[request.request_id]
        del self._logprobs[request.request_id]
        del self._sent[request.request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished() or bool(self._launched or self._planned)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests at once, without an output; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for one in ids:
            request = self._requests.get(one)
            if request is not None:
                self.scheduler.finish(request, "abort", None)
                self._forget(request)

    def get_metrics(self) -> list[Metric]:
        """Return counts and distributions since the start, in vLLM's names.

        Raises:
            ConfigError: The engine was made with `disable_log_stats=True`.
        """
        if self.config.disable_log_stats:
            raise ConfigError(
                "Stat logging disabled: make the engine with disable_log_stats=False.",
                parameter="disable_log_stats",
                value=True,
            )
        return self.metrics.read(self._load())

    def do_log_stats(self) -> None:
        """Log what happened since the last time; `step` does so every ten seconds."""
        if not self.config.disable_log_stats:
            self.metrics.log(self._load())

    def _load(self) -> Load:
        scheduler, pages = self.scheduler, self.scheduler.pages
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=1 - pages.num_free / pages.num_pages,
            sleep_level=self._sleep.level,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget the pages of ended requests; False while pages are in use."""
        return self.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`.

        Args:
            level: 1 keeps the weights on the host; 2 reads them from the checkpoint
                again. Pages are dropped in both.

        Raises:
            RequestError: Requests run, or another level.
        """
        if self.has_unfinished_requests():
            raise RequestError(
                f"sleep() needs an idle engine, and {len(self._requests)} requests "
                "run: finish or abort them first."
            )
        self.reset_prefix_cache()
        self._sleep.begin(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` freed: outputs are then the same as before.

        Args:
            tags: "weights", "kv_cache" or both (None).
        """
        self._sleep.end(tags)

    def is_sleeping(self) -> bool:
        """Whether any part is off the devices."""
        return self._sleep.level > 0

    def announce_compiles(self, tell: Callable[[str], None] | None) -> None:
        """Have `tell` called with what is compiled, and with "" when that is done."""
        self.runner.announce = tell

    def warm_up(self, prompt_tokens: int | None = None) -> None:
        """Compile every executable that requests can need.

        Args:
            prompt_tokens: Longest prompt to expect; None for the whole budget.
        """
        for shape in self.scheduler.shapes(prompt_tokens):
            self.runner.executable(shape)

    def shutdown(self) -> None:
        """End all requests and wait for the device."""
        self.abort_request(list(self._requests))
        self._planned = None
        while self._launched:
            launch, result = self._launched.popleft()
            self.runner.fetch(result, launch.shape)


def _is_stop(request: Request) -> bool:
    """Whether the newest token ended the request, rather than its length."""
    last = request.num_tokens - 1
    first_allowed = request.num_prompt_tokens + request.params.min_tokens
    return last >= first_allowed and request.output_token_ids[-1] in request.stop_ids
