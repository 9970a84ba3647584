"""The engine: requests in, outputs out, one launch ahead of what has been read."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, no_type_check

import numpy as np

from jaxspec.config import EngineConfig
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.controller import Controller
from jaxspec.engine.grammar import GrammarCompiler
from jaxspec.engine.loading import make_runner, read_tokenizer
from jaxspec.engine.output import TextStream
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Launch, Progress, Scheduler
from jaxspec.engine.stats import EngineStats
from jaxspec.engine.token_masks import Reading
from jaxspec.errors import RequestError
from jaxspec.inputs import parse_prompt
from jaxspec.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestSpecDecodeMetrics,
    RequestStateStats,
)
from jaxspec.program.plan import RULES, Features
from jaxspec.sampling_params import RequestOutputKind, SamplingParams, check_supported
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
        self.grammars = GrammarCompiler(
            self.tokenizer,
            config.model_config.vocab_size,
            (*config.model_config.eos_token_ids, *self.tokenizer.turn_end_ids),
        )
        self._requests: dict[str, Request] = {}
        self._streams: dict[str, TextStream] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # characters, tokens
        self._launched: deque[tuple[Launch, Any]] = deque()
        self._planned: Launch | None = None
        # Seeds of requests that name none; a seeded engine repeats itself.
        self._random = np.random.default_rng(config.seed)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Build an engine from vLLM's arguments."""
        return cls(engine_args.create_engine_config())

    @no_type_check  # it has its own checks, with better errors
    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
    ) -> str:
        """Validate and queue one request; nothing has run on the device yet.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable, or the id
                is in use.
            NotImplementedError: A sampling value that is not supported yet.
        """
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id must be a string, got {type(request_id).__name__}",
                parameter="request_id",
                value=request_id,
            )
        if request_id in self._requests:
            raise RequestError(
                f"request_id {request_id!r} is running already: choose another",
                parameter="request_id",
                value=request_id,
            )
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, got {type(params).__name__}",
                parameter="params",
                value=params,
            )
        model = self.config.model_config
        params = params.clone()
        speculative = self.config.speculative
        params.validate_for(
            model.vocab_size,
            num_draft_tokens=speculative and speculative.num_speculative_tokens,
        )
        check_supported(params)
        parsed = parse_prompt(
            prompt, self.tokenizer, model.vocab_size, self.config.max_model_len
        )
        request = self._make_request(request_id, parsed, params, arrival_time)
        self._requests[request_id] = request
        self._streams[request_id] = TextStream(self.tokenizer, params)
        self._sent[request_id] = (0, 0)
        self.scheduler.add(request)
        return request_id

    def _make_request(
        self,
        request_id: str,
        parsed: Any,
        params: SamplingParams,
        arrival_time: float | None,
    ) -> Request:
        config = self.config
        model, speculative = config.model_config, config.speculative
        num_prompt = len(parsed.token_ids)
        limit = config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, num_prompt + params.max_tokens)
        num_draft = config.num_draft_tokens
        wanted = (params.extra_args or {}).get("num_speculative_tokens")
        if wanted is not None:
            num_draft = min(num_draft, wanted)
        drawn = self._random.integers(0, 2**32, size=2, dtype=np.uint32)
        seed, rule = (int(drawn[0]), int(drawn[1])), "standard"
        if speculative is not None:
            rule = speculative.rejection_sample_method
        if params.seed is not None:
            # The same text with any K, drafter or batch: see DESIGN, acceptance rules.
            seed = (params.seed >> 32 & 0xFFFFFFFF, params.seed & 0xFFFFFFFF)
            rule = "coupled"
        stop_ids = tuple(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends = (*model.eos_token_ids, *self.tokenizer.turn_end_ids)
            stop_ids = tuple(dict.fromkeys((*ends, *stop_ids)))
        metrics = None
        if num_draft:
            metrics = RequestSpecDecodeMetrics.empty(config.num_draft_tokens)
        grammar_id = self._begin_grammar(params, num_prompt, stop_ids)
        return Request(
            request_id=request_id,
            prompt=parsed.text,
            prompt_token_ids=parsed.token_ids,
            params=params,
            max_total=limit,
            num_draft_tokens=num_draft,
            seed=seed,
            rule=RULES[rule],
            stop_ids=stop_ids,
            stats=RequestStateStats(
                arrival_time=time.time() if arrival_time is None else arrival_time,
                queued_ts=time.monotonic(),
            ),
            spec_metrics=metrics,
            features=Features(has_grammar=grammar_id > 0),
            grammar_id=grammar_id,
        )

    def _begin_grammar(
        self, params: SamplingParams, num_prompt: int, stop_ids: tuple[int, ...]
    ) -> int:
        if params.structured_outputs is None:
            return 0
        reading = Reading(
            matcher=self.grammars.matcher(params.structured_outputs),
            num_prompt=num_prompt,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
        )
        # The masks see to it: the device does not know when a text is complete.
        params.min_tokens = 0
        return self.runner.token_masks.open(reading)

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
        self.stats.record(part.num_draft_tokens, part.num_accepted, len(part.token_ids))
        if part.token_ids:
            now = time.monotonic()
            stats = request.stats
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
        if kind is RequestOutputKind.DELTA:
            if not is_finished and len(tokens) == count:
                return []
            self._sent[request.request_id] = (len(text), len(tokens))
            text, tokens = text[characters:], tokens[count:]
        if is_finished:
            self._forget(request)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=list(tokens),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            spec_decode_metrics=request.spec_metrics,
        )
        return [
            RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=request.prompt_token_ids,
                outputs=[completion],
                finished=is_finished,
                metrics=request.stats,
                num_cached_tokens=0,
            )
        ]

    def _forget(self, request: Request) -> None:
        if request.grammar_id:
            self.runner.token_masks.close(request.grammar_id)
        del self._requests[request.request_id]
        del self._streams[request.request_id]
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
