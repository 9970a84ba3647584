"""The engine: takes requests, returns outputs, and keeps one launch in flight."""

import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, no_type_check

from jaxspec.config.engine import EngineConfig, ServedModel
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.calibration import Calibrator
from jaxspec.engine.corpora import Corpora
from jaxspec.engine.engine_lock import EngineLock, exclusive
from jaxspec.engine.input_processor import InputProcessor, Prepared
from jaxspec.engine.kv_events import KvEventPublisher
from jaxspec.engine.loader import Sleep, check_level, make_runner, read_tokenizer
from jaxspec.engine.memory.plan import MemoryPlan
from jaxspec.engine.metrics import EngineMetrics, Load
from jaxspec.engine.output_processor import OutputProcessor
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduling.launch import (
    AsLaunchErrors,
    Launch,
    LaunchError,
    salt_words,
)
from jaxspec.engine.scheduling.lookup_estimator import TextIndex, index_corpora
from jaxspec.engine.scheduling.page_events import PageEvents
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.round_estimates import make_acceptance
from jaxspec.engine.scheduling.scheduler import Scheduler
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.policy import Choice, SpeculationPolicy
from jaxspec.engine.speculation.step_times import FIXED_ROWS, StepTimes
from jaxspec.engine.stat_loggers import check_stat_loggers
from jaxspec.engine.tracing import RequestTracer
from jaxspec.errors import (
    ConfigError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
    check_integer,
    refuse,
    wrong_argument,
)
from jaxspec.exit import finish_at_exit
from jaxspec.metrics import Metric
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import Features, StepShape
from jaxspec.program.wire import DraftPrefillResult, StepResult
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer, first_difference

_log = logging.getLogger(__name__)
LOG_INTERVAL_S = 10.0
# Longest wait for a program or a mask before calls of other threads are served.
MAX_WAIT_S = 0.05


class LLMEngine:
    """vLLM's engine interface: `add_request`, `step`, `abort_request`.

    Methods may be called in any thread. A step returns the outputs of all requests,
    including requests that other threads have added.

    Attributes:
        lock: Held while a method runs; hold it for several calls in a row.
        config: The configuration, with sizes that depend on the devices filled in.
        memory: Memory plan of the devices; None if a runner was passed.
        runner: Device state and programs, with counts of launches and compiles.
        stats: Totals over all requests.
        policy: Chooses K.
        step_times: Measured seconds of rounds.
        acceptance: Measured acceptance rates.
        calibrator: Times new programs.
        input_processor: Checks requests; any thread may call its `prepare`.
        corpora: Texts that suffix drafts may copy.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.lock = EngineLock()
        self.tokenizer = tokenizer or read_tokenizer(config)
        self.memory: MemoryPlan | None = None
        self._page_events: PageEvents | None = None
        self._publisher: KvEventPublisher | None = None
        tracer: RequestTracer | None = None
        if config.otlp_traces_endpoint is not None:
            # Reject a missing package before the weights are read.
            endpoint, name = config.otlp_traces_endpoint, config.served_model_name
            tracer = RequestTracer(endpoint, name)
        try:
            if config.kv_events.is_on:
                # Reject an unusable address before the weights are read.
                size, rank = config.page_size, config.data_parallel_rank
                self._publisher = KvEventPublisher(config.kv_events, size, rank)
                self._page_events = PageEvents()
            if runner is None:
                runner = make_runner(config)
                config, self.memory = runner.config, runner.memory
        except BaseException:
            self._close_publisher()
            if tracer is not None:
                tracer.close()
            raise
        self.config, self.runner = config, runner
        self.stats = EngineStats()
        self.policy = SpeculationPolicy(config.speculative)
        self.step_times = StepTimes(FIXED_ROWS if runner.skips_padding else None)
        self.acceptance = make_acceptance(config, self.policy)
        speculative = config.speculative
        max_tokens = speculative and speculative.suffix_decoding_max_corpus_tokens
        self.corpora = Corpora(max_tokens=max_tokens or 0)
        self._corpora_index: Mapping[str | None, TextIndex] = {}
        self._corpora_lock = threading.Lock()
        self.scheduler = self._make_scheduler()
        self.metrics = EngineMetrics(config, self.stats, self.memory)
        self.output_processor = OutputProcessor(
            config, self.tokenizer, self.metrics, self.stats, tracer
        )
        self.input_processor = InputProcessor(config, self.tokenizer)
        self._groups = itertools.count()
        # Unread launches: launch, device result, time of the launch.
        self._launched: deque[tuple[Launch, Any, float]] = deque()
        self._last_read_ts = 0.0
        self._sleep = Sleep(config, self.runner)
        # The program that must be compiled before the engine `is_ready`; None without
        # warm-up.
        self._first_program: StepShape | None = None
        self.calibrator = Calibrator(
            config, runner, self.policy, self.step_times, self._sleep
        )
        finish_at_exit(self)

    @property
    def model_config(self) -> ServedModel:
        """The model properties that scripts for vLLM read."""
        return ServedModel(self.config)

    @exclusive
    @no_type_check  # it has its own check, with a better error
    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Replace the tokenizer by one that differs e.g. in its chat template.

        Raises:
            RequestError: Requests are running.
            ConfigError: The object is not a `Tokenizer` of this package, or has other
                pieces.
        """
        if not isinstance(tokenizer, Tokenizer):
            hint = "Tokenizer.from_folder(folder, chat_template) makes one."
            allowed = "a jaxspec.text.tokenizer.Tokenizer"
            raise wrong_argument(ConfigError, "tokenizer", allowed, tokenizer, hint)
        if self.has_unfinished_requests():
            raise RequestError(
                "The tokenizer cannot change while requests are running: finish or "
                "abort them first."
            )
        token = first_difference(self.tokenizer, tokenizer)
        if token is not None:
            raise ConfigError(
                "The tokenizer must map every id to the same piece as the current "
                f"one, but id {token} differs.",
                parameter="tokenizer",
                value=tokenizer,
            )
        self.tokenizer = tokenizer
        self.output_processor.tokenizer = tokenizer
        self.input_processor.set_tokenizer(tokenizer)

    def _make_scheduler(self) -> Scheduler:
        scheduler = Scheduler(
            self.config,
            self.policy,
            self.stats,
            programs=self.runner.programs,
            step_times=self.step_times,
            acceptance=self.acceptance,
            page_events=self._page_events,
        )
        scheduler.set_corpora(self._corpora_index)
        if self.runner.compiles_in_background:
            scheduler.shapes.hold_drafts()
        return scheduler

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: Sequence[type] | None = None,
    ) -> "LLMEngine":
        """Build an engine from vLLM's arguments.

        Args:
            usage_context: Accepted for vLLM's signature; no usage is reported.
            stat_loggers: Classes of `jaxspec.v1.metrics.loggers`, without effect.

        Raises:
            UnsupportedError: `data_parallel_size` is above 1, or a class of
                `stat_loggers` is the caller's own.
        """
        check_stat_loggers(stat_loggers)
        config = engine_args.create_engine_config()
        if config.data_parallel_size > 1:
            raise UnsupportedError(
                f"data_parallel_size={config.data_parallel_size}: an LLMEngine is one "
                "engine. LLM, AsyncLLMEngine and the server have several.",
                parameter="data_parallel_size",
                value=config.data_parallel_size,
            )
        return cls(config)

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
        """Validate and queue one request; no device work is done here.

        Args:
            priority: Lower values run first, with `scheduling_policy="priority"`.
            lora_request: Not supported, like `tokenization_kwargs`.
            trace_headers: HTTP headers of the trace that the request belongs to; needs
                `otlp_traces_endpoint`.

        Raises:
            RequestError: The prompt or a sampling value is not acceptable, the id is in
                use, or the engine sleeps.
            NotImplementedError: An argument or a sampling value that is not supported.
        """
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
    def add_prepared(
        self, prepared: Prepared, *, may_wait_for_wake_up: bool = False
    ) -> None:
        """Queue what `input_processor.prepare` made.

        Args:
            may_wait_for_wake_up: Also while the engine sleeps; `step` must not be
                called then.

        Raises:
            RequestError: The id is in use, or the engine sleeps.
            EngineDeadError: The interpreter exits.
            ConfigError: No program on these devices can serve it.
        """
        self.runner.check_features(prepared.requests[0].features)
        parent = prepared.parent
        if self.is_sleeping() and not may_wait_for_wake_up:
            raise RequestError(
                "The engine is asleep and accepts no requests: call wake_up() first."
            )
        self._check_open(prepared.request_id)
        if parent is not None:
            for child_id in parent.children:
                self._check_open(child_id)
        # The texts share the prompt's pages, even without prefix caching.
        group = None if parent is None else next(self._groups)
        for index, request in enumerate(prepared.requests):
            request.cache_group = group
            self.output_processor.open(
                request, None if parent is None else (parent, index)
            )
            self.scheduler.add(request)

    def _check_open(self, request_id: str) -> None:
        """Raise if the engine cannot accept a request with this id now."""
        if self.runner.compiler.is_exiting:
            raise EngineDeadError(
                "The Python interpreter is exiting: no request can run."
            )
        if self.is_unfinished(request_id):
            raise RequestError(
                f"request_id {request_id!r} is already running: choose another id",
                parameter="request_id",
                value=request_id,
            )

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Start the next launch, read the previous one, and return its outputs.

        Returns an empty list if there is no previous launch, or if no request has an
        output (see `output_kind`).

        If a launch fails while drafting is on, drafting stops and requests continue
        without it. If one fails with drafting off, the running requests end and its
        error is raised. An interrupt ends all requests, because the state of the device
        is unknown. The engine accepts new requests afterwards.
        """
        try:
            outputs = self._step()
        except LaunchError as failure:
            outputs = self._restart(failure.reason)
        except BaseException:
            self._reset()
            raise
        finally:
            self._publish_pages()
        self.log_if_due()
        return outputs

    def _close_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _close_tracer(self) -> None:
        if self.output_processor.tracer is not None:
            self.output_processor.tracer.close()
            self.output_processor.tracer = None

    def _publish_pages(self) -> None:
        """Publish KV events for pages added to or removed from the prefix cache."""
        if self._publisher is None or self._page_events is None:
            return
        if events := self._page_events.take():
            self._publisher.publish(events)

    def _restart(self, error: Exception) -> list[RequestOutput]:
        """Restart after a failed launch; drop the launch's tokens."""
        self._launched.clear()
        if self.runner.followers is not None:
            # With several hosts the engine cannot continue: the other processes cannot
            # undo the launch.
            reason = f"A launch failed: {error!r}"
            self.runner.followers.break_off(reason, may_be_loss=True)
            raise EngineDeadError(
                f"A launch failed: {error!r}. With several hosts, the processes cannot "
                "recover from it. Restart all of them."
            ) from error
        has_drafts = self.policy.max_draft_tokens(1) > 0
        if has_drafts:
            _log.error(
                "A launch failed: the engine continues without drafts", exc_info=error
            )
            self.policy.stop("a launch failed")
            self.runner.leave_out_drafts()
            if self._first_program is not None:
                self.start_warm_up()
        else:
            self._end(self.output_processor.callers_of(self._at_work()), "error")
        self.scheduler.restart()
        self.runner.drop_pages()
        self.runner.restore_pages()
        if not has_drafts:
            raise error
        return []

    def _at_work(self) -> list[Request]:
        """Return the requests that a failure ends.

        These are the running requests or, if none run, the first waiting one.
        """
        scheduler = self.scheduler
        return scheduler.running or list(itertools.islice(scheduler.waiting, 1))

    def _reset(self) -> None:
        self.output_processor.reset()
        self.scheduler = self._make_scheduler()
        self._launched.clear()

    def _step(self) -> list[RequestOutput]:
        self._stop_if_no_program_drafts()
        must_read_first = self.calibrator.run_next(
            self.scheduler, is_busy=bool(self._launched)
        )
        start, outputs, waited = time.monotonic(), list[RequestOutput](), 0.0
        launch = None if must_read_first else self.scheduler.plan()
        if launch is not None:
            with AsLaunchErrors():
                result = self.runner.launch(launch.plan, launch.shape)
            self._launched.append((launch, result, time.monotonic()))
        if self._launched and (launch is None or len(self._launched) > 1):
            outputs, waited = self._read()
        elif launch is None and self.scheduler.has_unfinished():
            waited = self._wait_for_masks_or_program()
        self.stats.wait_s += waited
        host_s = time.monotonic() - start - waited
        self.stats.host_s += host_s
        self.metrics.add_step(host_s)
        return outputs

    def _stop_if_no_program_drafts(self) -> None:
        """Stop drafting if all programs with drafts failed to compile."""
        compiler = self.runner.compiler
        if not any(shape.num_levels for shape in compiler.failures):
            return
        if not any(shape.num_levels for shape in compiler.made):
            self.policy.stop("no program with drafts could be compiled")

    def _wait_for_masks_or_program(self) -> float:
        """Wait a while for a mask or a program; return the seconds waited."""
        before = time.monotonic()
        if self.scheduler.masks.wait(MAX_WAIT_S):
            return time.monotonic() - before
        with AsLaunchErrors():
            self.runner.compiler.check(self._must_exist)
        self.runner.compiler.wait(MAX_WAIT_S)
        return time.monotonic() - before

    def _must_exist(self, shape: StepShape) -> bool:
        """Return whether an error of this program ends requests that wait for one."""
        is_unused = shape.is_draft_prefill and self.policy.is_stopped
        return not (is_unused or self.scheduler.shapes.is_on_demand(shape))

    def _read(self) -> tuple[list[RequestOutput], float]:
        """Read the oldest launch; return its outputs, and the seconds waited for it."""
        launch, result, launched_ts = self._launched.popleft()
        before = time.monotonic()
        with AsLaunchErrors():
            fetched = self.runner.fetch(result, launch.shape)
        now = time.monotonic()
        # The device runs one launch at a time.
        took_s = now - max(launched_ts, self._last_read_ts)
        self._last_read_ts = now
        rounds, outputs = fetched.rounds, list[RequestOutput]()
        self.scheduler.settle(launch, len(rounds))
        for round_result in rounds:
            outputs += self._process_result(launch, round_result, took_s / len(rounds))
        return outputs, now - before

    def _process_result(
        self, launch: Launch, result: StepResult | DraftPrefillResult, took_s: float
    ) -> list[RequestOutput]:
        """Commit one round of a launch; return its outputs."""
        self.scheduler.record_time(launch, result, took_s)
        num_before = self.stats.num_generated_tokens
        advance = self.scheduler.commit(launch, result)
        self.metrics.warn_of_low_acceptance(self.acceptance, lambda: self.choice)
        if not self.config.disable_log_stats:
            generated = self.stats.num_generated_tokens - num_before
            self.metrics.add_round(launch, generated, took_s)
        self.stats.num_rounds += 1
        return self.output_processor.advance(advance, self.scheduler.finish)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything left to do."""
        return self.scheduler.has_unfinished() or bool(self._launched)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether a request waits or runs."""
        return request_id in self.output_processor

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run."""
        return len(self.output_processor.streams)

    @exclusive
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests at once, without an output; unknown ids are ignored.

        All texts of a request with n > 1 end; single texts cannot be aborted.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._end(ids, "abort")

    def _end(self, ids: Iterable[str], reason: str) -> None:
        for request_id in ids:
            for request in self.output_processor.requests_of(request_id):
                self.scheduler.finish(request, reason, None)
                self.output_processor.close(request)

    @exclusive
    def get_metrics(self) -> list[Metric]:
        """Return counts and distributions since the start, in vLLM's names.

        Raises:
            ConfigError: The engine was made with `disable_log_stats=True`.
        """
        if self.config.disable_log_stats:
            raise ConfigError(
                "Stat logging is disabled: create the engine with "
                "disable_log_stats=False.",
                parameter="disable_log_stats",
                value=True,
            )
        return self.metrics.read(self.load())

    @exclusive
    def do_log_stats(self) -> None:
        """Log statistics since the last log; `step` does so every ten seconds."""
        if self.config.disable_log_stats:
            return
        self.metrics.log(self.load())

    def log_if_due(self) -> None:
        """Call `do_log_stats` if the last log is ten seconds old."""
        if self.metrics.seconds_since_log() > LOG_INTERVAL_S:
            self.do_log_stats()

    @exclusive
    def load(self) -> Load:
        """Return the current load of the engine."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        policy, acceptance = self.policy, self.acceptance
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_deferred=scheduler.num_deferred,
            kv_usage=1 - pool.num_free / pool.num_units,
            sleep_level=self._sleep.level,
            num_compiles=self.runner.num_compiles,
            compile_s=self.runner.compile_s,
            num_warming=self.runner.compiler.num_wanted,
            choice=self.choice,
            saved_s=policy.saved_s,
            lost_s=policy.lost_s,
            num_probes=policy.num_probes,
            num_stops=policy.num_stops,
            is_stopped=policy.is_stopped,
            num_compared=acceptance.num_compared,
            num_agreed=acceptance.num_agreed,
            program_bytes=self.runner.temporary_bytes + self.runner.code_bytes,
        )

    @exclusive
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Clear the prefix cache; do nothing and return False while pages are in use.

        Args:
            reset_running_requests: Preempt the running requests first, so that no page
                is in use; they compute their pages again later.
            reset_connector: Accepted for vLLM's signature; there is no KV connector.
        """
        if reset_running_requests and self.scheduler.running:
            # Tokens that were not read yet are dropped here, and sampled again later
            # with the same seeds.
            self._drain()
            self.scheduler.restart()
        is_done = self.scheduler.reset_prefix_cache()
        self._publish_pages()
        return is_done

    def add_external_corpus(
        self,
        corpus_id: str,
        token_chunks: Sequence[Sequence[int]],
        cache_salt: str | None = None,
    ) -> int:
        """Add texts that suffix drafts may copy; return their number of tokens.

        Corpora change speed only, never texts. Running requests are not interrupted.

        Args:
            corpus_id: Name of the corpus.
            token_chunks: Token ids of each text; empty texts are left out.
            cache_salt: Only requests with the same salt find the texts.

        Raises:
            RequestError: The id is in use, a token does not exist, or there would be
                more than `MAX_CORPORA` corpora, or more tokens than
                `suffix_decoding_max_corpus_tokens`.
            UnsupportedError: That limit is 0, or drafts are of another method.
        """
        vocab_size = self.config.model_config.vocab_size
        with self._corpora_lock:
            self._set_corpora(
                self.corpora.added(corpus_id, token_chunks, cache_salt, vocab_size)
            )
            return self.corpora.num_tokens[corpus_id]

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Remove a corpus.

        Raises:
            RequestError: There is no such corpus.
        """
        with self._corpora_lock:
            self._set_corpora(self.corpora.removed(corpus_id))

    def list_external_corpora(self) -> dict[str, int]:
        """Return the number of tokens of each corpus, by its id."""
        return self.corpora.num_tokens

    def check_new_corpus(self, corpus_id: str, cache_salt: str | None = None) -> None:
        """Check what `add_external_corpus` needs, whatever the tokens are.

        Raises:
            RequestError, UnsupportedError: As there.
        """
        self.corpora.check_new(corpus_id, cache_salt)

    def restore_corpora(self, corpora: Corpora) -> None:
        """Replace all corpora by those of an earlier time."""
        with self._corpora_lock:
            self._set_corpora(corpora)

    def _set_corpora(self, corpora: Corpora) -> None:
        """Replace all corpora; if the device raises an error, nothing changes."""
        texts = corpora.texts
        index = index_corpora(texts)
        table = self.runner.corpora_table(
            [(salt_words(salt), tokens) for salt, tokens in texts]
        )
        with self.lock:
            self.runner.set_corpora(table)
            self.corpora, self._corpora_index = corpora, index
            self.scheduler.set_corpora(index)

    @exclusive
    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory until `wake_up`.

        Args:
            level: 1 keeps the weights on the host; 2 reads them from the checkpoint
                again. Pages are dropped in both.

        Raises:
            RequestError: Requests are running, or `level` is neither 1 nor 2.
        """
        check_level(level)
        count = self.get_num_unfinished_requests()
        if count:
            raise RequestError(
                f"sleep() needs an idle engine, but {count} requests are running: "
                "finish or abort them first."
            )
        self._drain()
        self.reset_prefix_cache()
        self._sleep.begin(level)

    @exclusive
    @no_type_check  # `Sleep` checks, with better errors
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what `sleep` freed; outputs are the same as before.

        Args:
            tags: "weights", "kv_cache" or both (None).
        """
        self._sleep.end(tags)

    def is_sleeping(self) -> bool:
        """Return whether weights or pages are off the devices."""
        return self._sleep.level > 0

    def announce_compiles(self, announce: Callable[[str], None] | None) -> None:
        """Call `announce` with the name of each compile, and with "" at its end."""
        self.runner.compiler.announce = announce

    @no_type_check  # `InputProcessor` checks, with better errors
    def warm_up(
        self,
        prompt_tokens: int | None = None,
        sampling_params: Iterable[SamplingParams] = (),
    ) -> None:
        """Compile every program that requests can need.

        Args:
            prompt_tokens: Longest prompt to expect; None for the whole budget.
            sampling_params: Examples of requests to expect. Logprobs, penalties,
                biases, token masks and structured outputs need programs of their own,
                which are compiled only if one of the examples uses them.

        Raises:
            RequestError: As for `add_request`.
            NotImplementedError: As for `add_request`.
        """
        for shape in self._wanted(prompt_tokens, sampling_params, with_on_demand=True):
            self.runner.executable(shape)
        with self.lock:
            # While requests of other threads run, `step` times the programs instead.
            if not self._launched:
                self.calibrator.run_all(self.scheduler)

    def start_warm_up(self, sampling_params: Iterable[SamplingParams] = ()) -> None:
        """Compile programs as `warm_up` does, but in the background.

        Programs that are compiled on demand are left out.

        Requests are served as soon as the first program is compiled.

        Raises:
            RequestError: As for `add_request`.
            NotImplementedError: As for `add_request`.
        """
        shapes = self._wanted(None, sampling_params)
        self._first_program = shapes[0]
        self.runner.compiler.prepare(shapes)

    @no_type_check  # it has its own check, with a better error
    def _wanted(
        self,
        prompt_tokens: int | None,
        sampling_params: Iterable[SamplingParams],
        *,
        with_on_demand: bool = False,
    ) -> list[StepShape]:
        """Return the programs that requests need; the first serves plain requests."""
        if prompt_tokens is not None:
            check_integer(RequestError, "prompt_tokens", prompt_tokens, low=1)
        wanted = [Features(all_greedy=True), Features()]
        for params in sampling_params:
            features = self.input_processor.features(params)
            self.runner.check_features(features)
            decoding = dataclasses.replace(features, num_prompt_logprobs=None)
            wanted += [features, decoding]
        return self.scheduler.shapes.all(
            prompt_tokens, wanted, with_on_demand=with_on_demand
        )

    def wait_for_programs(self) -> None:
        """Wait until no program is being compiled or queued.

        Raises:
            Exception: A compile failed.
        """
        self.runner.compiler.wait_for_all()

    @property
    def is_ready(self) -> bool:
        """Whether a plain request would start at once; may be read in any thread."""
        first = self._first_program
        return first is None or first in self.runner.programs

    @property
    def num_warming(self) -> int:
        """Number of programs left to compile; may be read in any thread."""
        return self.runner.compiler.num_wanted

    @property
    def choice(self) -> Choice:
        """The current choice of K; may be read in any thread."""
        return self.scheduler.choice

    @property
    def compiling(self) -> str | None:
        """Name of the program being compiled, or None; may be read in any thread."""
        current = self.runner.compiler.current
        return None if current is None else current.name

    @exclusive
    def shutdown(self) -> None:
        """Abort all requests, wait for the device, free its memory and all programs.

        The engine then sleeps: `wake_up` reads the weights again, and programs are
        compiled again when needed. With several hosts, the follower processes end.
        """
        self.runner.compiler.stop()
        self.abort_request(self.output_processor.callers_of(self.output_processor))
        self._drain()
        self.reset_prefix_cache()
        self._sleep.begin(2)
        self.runner.compiler.clear()
        self._close_publisher()
        self._close_tracer()
        self.runner.leave()

    def _drain(self) -> None:
        """Wait for all launches, and drop their results."""
        while self._launched:
            launch, result, _ = self._launched.popleft()
            self.runner.fetch(result, launch.shape)

    def begin_exit(self) -> None:
        """Take no more steps, because the interpreter exits.

        Keeps the lock, so that daemon threads that step the engine block until the end.
        """
        self.lock.__enter__()

    def finish_exit(self) -> None:
        """Wait for launches on the devices."""
        self._drain()
        self._close_publisher()
        self._close_tracer()
