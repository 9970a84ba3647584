"""Owns `LLM`, the offline interface: a list of prompts in, a list of outputs out.

Passes requests to the engine and collects its outputs in the order of the prompts.
Independent of scheduling and devices.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

from jaxspec.beam_search import BeamSearch, BeamSearchOutput, step_params
from jaxspec.conversations import ChatOptions, Conversations, write_conversations
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.engine_group import EngineGroup, make_engines
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import (
    EngineDeadError,
    EngineGenerateError,
    RequestError,
    check_integer,
    plain_values,
    refuse,
    wrong_argument,
)
from jaxspec.inputs import PromptType, join_token_ids, parse_prompt, split_prompts
from jaxspec.metrics import Metric
from jaxspec.outputs import RequestOutput
from jaxspec.progress import Progress, watch_compiles
from jaxspec.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxspec.text.tokenizer import Tokenizer


class LLM:
    """A target model, optionally with a draft model, that continues texts.

    Methods may be called in any thread. Calls that run at the same time share the
    engine's batches, and each returns its own outputs. A call that fails or is
    interrupted ends its own requests only.

    Usable as a context manager; leaving it frees the device memory.

    Attributes:
        llm_engine: The engine, for adding requests and stepping by hand.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        disable_log_stats: bool = True,
        warm_up: bool = False,
        **engine_arguments: Any,
    ):
        """Load the models; `engine_arguments` are the other fields of `EngineArgs`.

        Args:
            warm_up: Compile the programs of ordinary requests now, instead of when the
                first ones come; see the method `warm_up`.

        Raises:
            ConfigError: An argument is invalid or unknown.
            NotImplementedError: An argument needs an unsupported feature.
        """
        args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            disable_log_stats=disable_log_stats,
            **engine_arguments,
        )
        self.llm_engine = (
            EngineGroup(make_engines(args))
            if args.data_parallel_size > 1
            else LLMEngine.from_engine_args(args)
        )
        self._request_ids = map(str, itertools.count())
        # The attributes below are protected by the engine's lock.
        self._unfinished: dict[str, tuple[Any, SamplingParams, int]] = {}
        self._finished: dict[str, RequestOutput] = {}
        # Errors of steps that ended a request, until that request's call raises them.
        self._failures: dict[str, Exception] = {}
        # Maps a request's id to the thread that enqueued it.
        self._enqueued: dict[str, int] = {}
        # Maps a request's id to the call that waits for it.
        self._calls: dict[str, _Call] = {}
        if warm_up:
            self.warm_up()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Make an `LLM` from all of its arguments."""
        return cls(**vars(engine_args))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm_engine.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer."""
        return self.llm_engine.tokenizer

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Replace the tokenizer by one with the same pieces, for its chat template.

        Raises:
            RequestError: Requests are running.
            ConfigError: It is not a `Tokenizer` of this package, or has other pieces.
        """
        self.llm_engine.set_tokenizer(tokenizer)

    def get_world_size(self) -> int:
        """Return the number of devices of all engines."""
        config = self.llm_engine.config
        return config.tensor_parallel_size * config.data_parallel_size

    def get_default_sampling_params(self) -> SamplingParams:
        """Return vLLM's defaults, changed by the model's generation_config.json."""
        return SamplingParams(**self.llm_engine.config.generation_defaults)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate texts for every prompt; return outputs in the order of the prompts.

        Every request is checked before the first one runs.

        Args:
            prompts: One prompt or a list: strings, token ids or dicts.
            sampling_params: One for all prompts, or one each; None for
                `get_default_sampling_params()`.
            use_tqdm: Show a progress bar; or a function to use in place of `tqdm`.
            prompt_token_ids: Deprecated; pass token ids as `prompts`.
            lora_request: Not supported.
            priority: One for all prompts, or one each, for
                `scheduling_policy="priority"`: lower values go first.

        Raises:
            RequestError: A prompt or its parameters are invalid; nothing was run.
            NotImplementedError: A parameter needs an unsupported feature.
        """
        prompt_list = join_token_ids(prompts, prompt_token_ids)
        refuse("lora_request", lora_request)
        with self._own_requests() as request_ids:
            self._add(request_ids, prompt_list, sampling_params, priority)
            return self._collect(request_ids, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Check and queue prompts as `generate` does, and return before they run.

        `wait_for_completion` runs them. Returns their ids, in the order of the prompts.
        """
        refuse("lora_request", lora_request)
        with self._own_requests() as request_ids:
            self._add(request_ids, split_prompts(prompts), sampling_params, priority)
            with self.llm_engine.lock:
                self._enqueued |= dict.fromkeys(request_ids, threading.get_ident())
            return request_ids

    def wait_for_completion(
        self, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Run the requests enqueued since the last call; return outputs in that order.

        These are the requests of this thread or, if it has none, of all threads.
        """
        with self._own_requests() as request_ids:
            with self.llm_engine.lock:
                here = threading.get_ident()
                own = [one for one, thread in self._enqueued.items() if thread == here]
                request_ids += own or list(self._enqueued)
                for request_id in request_ids:
                    del self._enqueued[request_id]
            return self._collect(request_ids, use_tqdm)

    def _add(
        self,
        request_ids: list[str],
        prompts: list[Any],
        sampling_params: Any,
        priority: int | Sequence[int] | None,
    ) -> None:
        """Queue requests for all of the prompts; add their ids to `request_ids`."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params_list = _one_per_prompt(sampling_params, len(prompts))
        ranks: Any = 0 if priority is None else plain_values(priority)
        if isinstance(ranks, int) and not isinstance(ranks, bool):
            ranks = [ranks] * len(prompts)
        if not isinstance(ranks, (list, tuple)) or len(ranks) != len(prompts):
            allowed = f"an integer, or a list of {len(prompts)}, one per prompt"
            raise wrong_argument(RequestError, "priority", allowed, priority)
        prepare = self.llm_engine.input_processor.prepare
        requests = []
        for request in zip(prompts, params_list, ranks, strict=True):
            prompt, params, rank = request
            request_id = next(self._request_ids)
            prepared = prepare(request_id, prompt, params, priority=rank)
            requests.append((prepared, request))
        request_ids += [prepared.request_id for prepared, _ in requests]
        with self.llm_engine.lock:
            for prepared, request in requests:
                self.llm_engine.add_prepared(prepared)
                self._unfinished[prepared.request_id] = request

    def chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them.

        Args:
            messages: Dicts with `role` and `content`; user and assistant alternate, and
                a system's text is merged into the user's turn if the model has no
                system role.
            sampling_params: As for `generate`.
            use_tqdm: As for `generate`.
            lora_request: Not supported.
            priority: As for `generate`, one per conversation.
            options: `chat_template` and others, see `ChatOptions`.

        Raises:
            RequestError: The roles do not alternate, or as for `generate`.
            ConfigError: `chat_template` cannot be used.
        """
        return self.generate(
            write_conversations(self.get_tokenizer(), messages, options),
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
        )

    def enqueue_chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[str]:
        """Check and queue conversations as `chat` does; see `enqueue`."""
        return self.enqueue(
            write_conversations(self.get_tokenizer(), messages, options),
            sampling_params,
            lora_request=lora_request,
            priority=priority,
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the most likely texts of every prompt; see `BeamSearchParams`.

        Each token of each beam is a request of its own, whose prompt is cached, without
        speculation.

        Args:
            prompts: As for `generate`.
            lora_request: Not supported.
            use_tqdm: As for `generate`.
            concurrency_limit: Prompts to search concurrently; None for all.

        Raises:
            RequestError: A prompt or a parameter is invalid; nothing was run.
        """
        refuse("lora_request", lora_request)
        if not isinstance(params, BeamSearchParams):
            allowed = "BeamSearchParams"
            raise wrong_argument(RequestError, "params", allowed, params)
        searches = [self._search(prompt, params) for prompt in split_prompts(prompts)]
        count = len(searches) or 1
        if concurrency_limit is not None:
            name = "concurrency_limit"
            count = check_integer(RequestError, name, concurrency_limit, low=1)
        config = self.llm_engine.config
        step = step_params(
            params,
            vocab_size=config.model_config.vocab_size,
            max_logprobs=config.max_logprobs,
        )
        progress = Progress(len(searches), use_tqdm)
        with progress.watch(self.llm_engine):
            for start in range(0, len(searches), count):
                self._run_searches(searches[start : start + count], step, progress)
        return [search.output(self.get_tokenizer()) for search in searches]

    def _search(self, prompt: Any, params: BeamSearchParams) -> BeamSearch:
        config = self.llm_engine.config
        vocab_size, longest = config.model_config.vocab_size, config.max_model_len
        parsed = parse_prompt(prompt, self.get_tokenizer(), vocab_size, longest)
        ends = self.llm_engine.input_processor.end_ids
        return BeamSearch(parsed, params, end_ids=ends, max_model_len=longest)

    def _run_searches(
        self, searches: list[BeamSearch], step: SamplingParams, progress: Progress
    ) -> None:
        """Extend all beams, token by token, until all searches have ended."""
        while searches:
            prompts = [search.prompts() for search in searches]
            with self._own_requests() as request_ids:
                self._add(request_ids, list(itertools.chain(*prompts)), step, None)
                self._run(request_ids, lambda output: None)
                outputs = iter(self._take(request_ids))
            for search, open_texts in zip(searches, prompts, strict=True):
                search.advance(list(itertools.islice(outputs, len(open_texts))))
                if not search.prompts():
                    tokenizer = self.get_tokenizer()
                    progress.add(search.request_output("", tokenizer, step))
            searches = [search for search in searches if search.prompts()]

    def encode(self, *_: object, **__: object) -> None:
        """Raise `NotImplementedError`: vLLM's method for pooling models."""
        raise NotImplementedError(
            "encode() is for pooling models; Gemma generates text. To get token ids "
            "use get_tokenizer().encode(text)."
        )

    def embed(self, *_: object, **__: object) -> None:
        """Raise `NotImplementedError`: vLLM's method for pooling models."""
        raise NotImplementedError(
            "embed() is for pooling models; Gemma generates text."
        )

    def get_metrics(self) -> list[Metric]:
        """Return counts and distributions since the start, with vLLM's names.

        Raises:
            ConfigError: Stat logging is off; pass `disable_log_stats=False`.
        """
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drop the pages of ended requests; see `LLMEngine.reset_prefix_cache`."""
        return self.llm_engine.reset_prefix_cache(
            reset_running_requests, reset_connector
        )

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`; see `LLMEngine.sleep`."""
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` freed: all, or only "weights" or "kv_cache"."""
        self.llm_engine.wake_up(tags)

    def warm_up(
        self,
        prompt_tokens: int | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] = (),
    ) -> None:
        """Compile the programs of requests now, instead of when the first one comes.

        Args:
            prompt_tokens: Length of the longest expected prompt; None for any.
            sampling_params: Also compile for requests like these, if they use logprobs,
                penalties, bias, token masks or structured outputs.
        """
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params]
        with watch_compiles(self.llm_engine):
            self.llm_engine.warm_up(prompt_tokens, sampling_params)

    def wait_for_programs(self) -> None:
        """Wait until all programs that requests have needed are compiled.

        A request's own program is compiled in the background while it runs in a larger
        one: call this after the first requests of a kind and before timing others.
        """
        with watch_compiles(self.llm_engine):
            self.llm_engine.wait_for_programs()

    def start_profile(self, folder: str = "jaxspec_profile") -> None:
        """Start a profile of the devices in a folder, for TensorBoard or Perfetto."""
        with self.llm_engine.lock:
            self.llm_engine.runner.start_profile(folder)

    def stop_profile(self) -> None:
        """Stop the profile and write it."""
        with self.llm_engine.lock:
            self.llm_engine.runner.stop_profile()

    def _collect(
        self, request_ids: list[str], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Run until these requests have ended; return their outputs.

        The last running call also runs all other requests to their end; their outputs
        remain for later calls.
        """
        with self.llm_engine.lock:
            num_missing = sum(one not in self._finished for one in request_ids)
        progress = Progress(num_missing, use_tqdm)
        with progress.watch(self.llm_engine):
            self._run(request_ids, progress.add)
        return self._take(request_ids)

    @contextmanager
    def _own_requests(self) -> Iterator[list[str]]:
        """Yield an empty list of request ids; abort these requests if the block fails.

        Also on KeyboardInterrupt: the next call must find an idle engine.
        """
        request_ids: list[str] = []
        try:
            yield request_ids
        except BaseException:
            with self.llm_engine.lock:
                self.llm_engine.abort_request(request_ids)
                for request_id in request_ids:
                    for by_request in (
                        self._unfinished,
                        self._finished,
                        self._failures,
                    ):
                        by_request.pop(request_id, None)
                    for by_request in (self._enqueued, self._calls):
                        by_request.pop(request_id, None)
            raise

    def _take(self, request_ids: list[str]) -> list[RequestOutput]:
        """Return the outputs of requests that have ended.

        Raises:
            EngineGenerateError: A step in another call failed and ended some of them.
            RequestError: Some were aborted. In both cases the others are removed from
                `request_ids`, and the next `wait_for_completion` returns their outputs.
        """
        with self.llm_engine.lock:
            lost = [one for one in request_ids if one not in self._finished]
            if not lost:
                return [self._finished.pop(one) for one in request_ids]
            failures = [self._failures[one] for one in lost if one in self._failures]
            found = [one for one in request_ids if one in self._finished]
            here = threading.get_ident()
            self._enqueued = dict.fromkeys(found, here) | self._enqueued
            request_ids[:] = lost
        names = ", ".join(lost)
        advice = "Enqueue them again; the next wait_for_completion() has the others."
        if failures:
            raise EngineGenerateError(
                f"Requests {names} ended without an output, because a step failed: "
                f"{failures[0]!r}. {advice}"
            ) from failures[0]
        raise RequestError(
            f"Requests {names} ended without an output: they were aborted, or an "
            f"earlier call failed and ended all running requests. {advice}",
            parameter="request_id",
            value=lost,
        )

    def _run(
        self, request_ids: list[str], add: Callable[[RequestOutput], None]
    ) -> None:
        """Step the engine until these requests have ended.

        The last running call steps until the engine is idle.

        Args:
            add: Called with each output, outside the lock.
        """
        call = _Call(request_ids)
        try:
            with self.llm_engine.lock:
                self._calls |= dict.fromkeys(request_ids, call)
            is_running = True
            while is_running:
                with self.llm_engine.lock:
                    is_running = not self._advance_and_check(call)
                    if is_running:
                        self._step(call)
                    ended, call.ended = call.ended, []
                for output in ended:
                    add(output)
        finally:
            with self.llm_engine.lock:
                for request_id in request_ids:
                    self._calls.pop(request_id, None)

    def _advance_and_check(self, call: "_Call") -> bool:
        """Advance `num_ended`; return whether a call can stop stepping the engine."""
        while call.num_ended < len(call.request_ids):
            if self.llm_engine.is_unfinished(call.request_ids[call.num_ended]):
                return False
            call.num_ended += 1
        is_last = len(self._calls) == len(call.request_ids)
        return not (is_last and self.llm_engine.has_unfinished_requests())

    def _step(self, call: "_Call") -> None:
        """Run a step, and pass the outputs to the calls that wait for them."""
        try:
            for output in self.llm_engine.step():
                request_id = output.request_id
                if output.finished and request_id in self._unfinished:
                    self._finished[request_id] = output
                    del self._unfinished[request_id]
                    if request_id in self._calls:
                        self._calls[request_id].ended.append(output)
        except Exception as error:
            if self._record_failure(call, error):
                raise
        except BaseException:
            self._add_again(call)
            raise

    def _record_failure(self, call: "_Call", error: Exception) -> bool:
        """Store a step's error for the other calls whose requests it has ended.

        Returns:
            Whether this call must raise it.
        """
        lost = self._lost()
        self._failures |= dict.fromkeys(lost, error)
        others = {self._calls.get(one) for one in lost} - {call, None}
        is_ours = any(self._calls.get(one) is call for one in lost)
        return is_ours or not others or isinstance(error, EngineDeadError)

    def _add_again(self, call: "_Call") -> None:
        """Restart the requests of other calls that an interrupt of this call has ended.

        None of their outputs has been returned yet: requests are FINAL_ONLY.
        """
        for request_id in self._lost():
            if self._calls.get(request_id) is not call:
                prompt, params, rank = self._unfinished[request_id]
                self.llm_engine.add_request(request_id, prompt, params, priority=rank)

    def _lost(self) -> list[str]:
        """Return the requests that the engine has dropped without an output."""
        return [
            request_id
            for request_id in self._unfinished
            if not self.llm_engine.is_unfinished(request_id)
            and request_id not in self._failures
            and request_id not in self._finished
        ]


@dataclass(eq=False)
class _Call:
    """Requests that one call waits for.

    Attributes:
        num_ended: Number of leading requests of `request_ids` that have ended.
        ended: Outputs that the call has not processed yet.
    """

    request_ids: list[str]
    num_ended: int = 0
    ended: list[RequestOutput] = field(default_factory=list[RequestOutput])


def _one_per_prompt(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return FINAL_ONLY copies of the parameters, one for each prompt."""
    if isinstance(params, SamplingParams):
        params = [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        allowed = "SamplingParams or a list of them"
        raise wrong_argument(RequestError, "sampling_params", allowed, params)
    if len(params) != num_prompts:
        raise RequestError(
            f"A list of sampling_params must have one entry per prompt: got "
            f"{len(params)} for {num_prompts} prompts.",
            parameter="sampling_params",
            value=len(params),
        )
    copies = []
    for position, prompt_params in enumerate(params):
        if not isinstance(prompt_params, SamplingParams):
            name = f"sampling_params[{position}]"
            raise wrong_argument(RequestError, name, "SamplingParams", prompt_params)
        copies.append(prompt_params.clone())
        copies[-1].output_kind = RequestOutputKind.FINAL_ONLY
    return copies
