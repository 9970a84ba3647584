"""Metrics and log lines of an engine, with vLLM's names.

Adds to `EngineStats` counts of finished requests, and distributions of times and
lengths.
"""

import bisect
import copy
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxspec.config.engine import EngineConfig
from jaxspec.config.token_tree import count_ranks
from jaxspec.engine.grammar_matcher import FAILURE_KINDS
from jaxspec.engine.memory.plan import MemoryPlan
from jaxspec.engine.scheduling.launch import Launch
from jaxspec.engine.scheduling.request import Request
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.policy import Choice
from jaxspec.metrics import Counter, Gauge, Histogram, Metric, Vector

_log = logging.getLogger(__name__)

# Dashboards use vLLM's prefix; scripts with `vllm` replaced by `jaxspec` use ours.
PREFIXES = ("vllm", "jaxspec")
# Prefix of metrics that vLLM does not have.
OWN = "jaxspec"

_TO_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TO_FIRST_TOKEN_S += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_PER_TOKEN_S += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
_PER_REQUEST_S += (50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# Histogram bounds in seconds: from rounds of a tiny pair on a GPU to those of a large
# pair on a CPU.
_ROUND_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075)
_ROUND_S += (0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Histogram bounds of the host's time per step; the goal is below 0.001 s with 64
# sequences.
_HOST_S = (0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.0025, 0.005, 0.01)
_HOST_S += (0.025, 0.05, 0.1, 0.25, 1.0)
_ITERATION_TOKENS = (1, *(1 << power for power in range(3, 15)))
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
# Number of draft tokens over which acceptance is checked, and the rate below which a
# warning is logged.
_COMPARED, _LOW_ACCEPTANCE = 2000, 0.3
_CAUSES = (
    "a chat template that is missing or not the model's own; a draft model of another "
    "family than the target, or of another fine-tune; a high temperature"
)
_HEAD_CAUSES = (
    "a chat template that is missing or not the model's own; a head that was trained "
    "for another fine-tune of the target, or on other texts; a high temperature"
)
_LOOKUP_CAUSES = "texts with little repetition; a high temperature"


@dataclass(kw_only=True)
class Load:
    """Load and state of an engine at one moment.

    Attributes:
        num_running: Running texts.
        num_waiting: Waiting texts.
        num_deferred: Waiting requests that wait for a program, not for capacity.
        kv_usage: Share of the pages that running requests hold, 0 to 1.
        sleep_level: 0 is awake.
        num_compiles, compile_s: Programs made since the start, and their seconds.
        num_warming: Programs left to compile.
        choice: The current choice of K.
        saved_s, lost_s, num_probes, num_stops: Since the start, as in
            `SpeculationPolicy`.
        is_stopped: Whether drafting has failed and stopped for good.
        num_compared, num_agreed: Since the start, as in `AcceptanceRates`.
        program_bytes: Memory of the compiled programs on one device.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage: float = 0.0
    sleep_level: int = 0
    num_compiles: int = 0
    compile_s: float = 0.0
    num_warming: int = 0
    choice: Choice = Choice()
    saved_s: float = 0.0
    lost_s: float = 0.0
    num_probes: int = 0
    num_stops: int = 0
    is_stopped: bool = False
    num_compared: int = 0
    num_agreed: float = 0.0
    program_bytes: int = 0


class Distribution:
    """A histogram with ascending bounds."""

    def __init__(self, bounds: tuple[float | int, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float | int) -> None:
        """Count one value; a value equal to a bound is counted below it."""
        self.add_many(value, 1)

    def add_many(self, value: float | int, count: int) -> None:
        """Count a value `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def read(self, name: str, labels: dict[str, str]) -> Histogram:
        """Return cumulative counts, as in Prometheus."""
        total, buckets = 0, {}
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            buckets["+Inf" if bound is None else str(float(bound))] = total
        return Histogram(
            name=name, labels=labels, count=total, sum=self._sum, buckets=buckets
        )


class EngineMetrics:
    """Counts of one engine, and its periodic log line."""

    def __init__(
        self,
        config: EngineConfig,
        stats: EngineStats,
        memory: MemoryPlan | None = None,
    ):
        """Count for one engine.

        Args:
            memory: Memory plan of its devices; None if there is none.
        """
        self._config, self._stats, self._memory = config, stats, memory
        rank, count = config.data_parallel_rank, config.data_parallel_size
        self._labels = {"model_name": config.served_model_name, "engine": str(rank)}
        # Prefix of log lines; empty if there is a single engine.
        self._place = f"Engine {rank:03d}: " if count > 1 else ""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._finished: dict[str, int] = dict.fromkeys(_FINISH_REASONS, 0)
        self._grammar_failures: dict[str, int] = dict.fromkeys(FAILURE_KINDS, 0)
        per_request = "e2e_request_latency", "request_queue_time"
        per_request += "request_inference_time", "request_prefill_time"
        bounds = {
            "time_to_first_token_seconds": _TO_FIRST_TOKEN_S,
            "inter_token_latency_seconds": _PER_TOKEN_S,
            "request_time_per_output_token_seconds": _PER_TOKEN_S,
            "iteration_tokens_total": _ITERATION_TOKENS,
            "request_params_n": (1, 2, 5, 10, 20),
            "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
        }
        for name in (*per_request, "request_decode_time"):
            bounds[f"{name}_seconds"] = _PER_REQUEST_S
        for name in ("prompt", "generation", "max_num_generation", "params_max"):
            bounds[f"request_{name}_tokens"] = lengths_up_to(config.max_model_len)
        bounds["request_prefill_kv_computed_tokens"] = bounds["request_prompt_tokens"]
        self._seen = {name: Distribution(edges) for name, edges in bounds.items()}
        self._round_s, self._host_s = Distribution(_ROUND_S), Distribution(_HOST_S)
        self._expected_s, self._error_s = Distribution(_ROUND_S), 0.0
        # Launches by K. All K are present from the start, so that rates include the
        # first launch of each.
        self._launches = dict.fromkeys(range(config.max_draft_tokens + 1), 0)
        self._last_log = (time.monotonic(), 0, copy.deepcopy(stats))
        self._was_busy = False
        # `num_compared` and `num_agreed` at the last check of acceptance; None after
        # the warning.
        self._last_check: tuple[int, float] | None = (0, 0.0)

    def add_tokens(self, requests: list[Request], now: float) -> None:
        """Count requests with new tokens, before their own times are updated."""
        # Number of requests by the time of their previous tokens.
        last: dict[float, int] = {}
        for request in requests:
            stats = request.stats
            if stats.num_generation_tokens:
                then = stats.last_token_ts
                last[then] = last.get(then, 0) + 1
                continue
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens or 0
            self._seen["time_to_first_token_seconds"].add(now - stats.queued_ts)
        for then, count in last.items():
            self._seen["inter_token_latency_seconds"].add_many(now - then, count)

    def add_round(self, launch: Launch, num_generated: int, took_s: float) -> None:
        """Count a launch that has been read."""
        self._seen["iteration_tokens_total"].add(launch.num_prefilled + num_generated)
        self._round_s.add(took_s)
        if launch.expected_s is not None:
            self._expected_s.add(launch.expected_s)
            self._error_s += abs(took_s - launch.expected_s)
        if launch.decoding:
            self._launches[launch.round_kind.num_draft_tokens] += 1

    def add_step(self, host_s: float) -> None:
        """Count the host time of a step."""
        self._host_s.add(host_s)

    def add_finished(self, request: Request) -> None:
        """Count a request that has ended."""
        reason, stats, seen = request.finish_reason, request.stats, self._seen
        assert reason is not None
        self._finished[reason] += 1
        params, generated = request.params, len(request.output_token_ids)
        computed = request.num_prompt_tokens - (request.num_cached_tokens or 0)
        values: dict[str, float] = {
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_prefill_kv_computed_tokens": computed,
            "request_generation_tokens": generated,
            "request_num_preemptions": stats.num_preemptions,
        }
        if params.max_tokens is not None:
            values["request_params_max_tokens"] = params.max_tokens
        last, first, start = stats.last_token_ts, stats.first_token_ts, 0.0
        if generated:
            start = stats.scheduled_ts
            values |= {
                "e2e_request_latency_seconds": last - stats.queued_ts,
                "request_queue_time_seconds": start - stats.queued_ts,
                "request_prefill_time_seconds": first - start,
                "request_decode_time_seconds": last - first,
                "request_inference_time_seconds": last - start,
            }
        if generated > 1:
            per_token = (last - first) / (generated - 1)
            values["request_time_per_output_token_seconds"] = per_token
        for name, value in values.items():
            seen[name].add(value)

    def add_grammar_failure(self, kind: str) -> None:
        """Count a text whose grammar failed while it was made."""
        self._grammar_failures[kind] += 1

    def add_answered(self, num_texts: int, most_tokens: int) -> None:
        """Count a finished request of `num_texts` texts.

        `add_finished` additionally counts each of the texts.

        Args:
            most_tokens: Length of the longest text.
        """
        self._seen["request_params_n"].add(num_texts)
        self._seen["request_max_num_generation_tokens"].add(most_tokens)

    def read(self, load: Load) -> list[Metric]:
        """Return metrics with vLLM's names, for each of `PREFIXES`; then our own."""
        gauges = {
            "num_requests_running": load.num_running,
            "num_requests_waiting": load.num_waiting,
            "kv_cache_usage_perc": load.kv_usage,
        }
        counters = {
            "prefix_cache_queries": self._stats.num_prefix_queries,
            "prefix_cache_hits": self._stats.num_prefix_hits,
            "num_preemptions": self._stats.num_preemptions,
            "prompt_tokens": self.num_prompt_tokens,
            "prompt_tokens_cached": self.num_cached_tokens,
            "generation_tokens": self._stats.num_generated_tokens,
        }
        metrics = [
            *(self._gauge(name, value) for name, value in gauges.items()),
            *(
                self._gauge("num_requests_waiting_by_reason", count, reason=reason)
                for reason, count in (
                    ("capacity", load.num_waiting - load.num_deferred),
                    ("deferred", load.num_deferred),
                )
            ),
            *self._states(load),
            *(self._counter(name, value) for name, value in counters.items()),
            *(
                self._counter("request_success", count, finished_reason=reason)
                for reason, count in self._finished.items()
            ),
            *self._drafts(),
            *(seen.read(name, dict(self._labels)) for name, seen in self._seen.items()),
        ]
        prefixed = [(prefix, metric) for prefix in PREFIXES for metric in metrics]
        prefixed += [(OWN, metric) for metric in self._own(load)]
        return [
            dataclasses.replace(metric, name=f"{prefix}:{metric.name}")
            for prefix, metric in prefixed
        ]

    def _own(self, load: Load) -> list[Metric]:
        """Return the metrics that vLLM does not have.

        K is a counter with a label, not a histogram: dashboards can stack the counters,
        while a histogram's buckets are cumulative.
        """
        labels = dict(self._labels)
        speculative, forced = self._config.speculative, list[Metric]()
        rates = speculative and speculative.forced_acceptance
        if rates:
            listed = ",".join(f"{one:g}" for one in rates)
            forced = [self._gauge("synthetic_acceptance_info", 1, chances=listed)]
        return [
            *forced,
            self._round_s.read("round_time_seconds", labels),
            self._expected_s.read("round_time_predicted_seconds", labels),
            self._counter("round_time_error_seconds", self._error_s),
            self._host_s.read("host_time_seconds", labels),
            *(
                self._counter("draft_tokens_chosen", count, num_draft_tokens=str(k))
                for k, count in self._launches.items()
            ),
            *(
                self._counter("grammar_failures", count, kind=kind)
                for kind, count in self._grammar_failures.items()
            ),
            *self._choice(load),
            *self._leaves(load),
            self._counter("num_compiles", load.num_compiles),
            self._counter("compile_seconds", load.compile_s),
            self._gauge("warming", load.num_warming),
            *self._planned(load),
        ]

    def _planned(self, load: Load) -> list[Metric]:
        """Return the metrics of the memory plan, if any: bytes of one device."""
        plan = self._memory
        if plan is None:
            return []
        length = plan.facts.max_model_len
        return [
            *(
                self._gauge("memory_bytes", num_bytes, part=name.replace(" ", "_"))
                for name, num_bytes, _ in plan.rows()
            ),
            self._gauge("memory_limit_bytes", plan.facts.limit_bytes or 0),
            *(
                self._gauge("memory_page_bytes", model.page_bytes, model=name)
                for name, model in (
                    ("target", plan.facts.target),
                    ("draft", plan.facts.draft),
                )
            ),
            self._gauge("memory_draft_bytes", plan.draft_bytes),
            self._gauge("memory_programs_found_bytes", load.program_bytes),
            self._gauge("max_concurrency", plan.concurrency(length)),
            self._gauge("sequences_lost", plan.sequences_lost),
        ]

    def _leaves(self, load: Load) -> list[Metric]:
        """Return the metrics of side branches, if the engine has any.

        Their tokens are not counted in vLLM's accepted tokens, whose positions are
        those of the main chain.
        """
        speculative = self._config.speculative
        if speculative is None or speculative.num_nodes == speculative.num_levels:
            return []
        count = self._stats.num_side_tokens
        metrics: list[Metric] = [
            self._counter("spec_decode_num_accepted_leaves", count),
            self._gauge("speculation_has_leaves", load.choice.has_side_branches),
        ]
        assert speculative.parents is not None, "side branches without a tree"
        ranks = count_ranks(speculative.parents, self._stats.tree_ends)
        for place, hits in ranks.items():
            labels = {
                "depth": str(place.depth),
                "rank": str(place.rank),
                "after": "side" if place.is_side else "chain",
            }
            name = "spec_decode_{}_by_rank"
            counts = {"num_compared": hits.compared, "num_accepted": hits.kept}
            for key, count in counts.items():
                metrics.append(self._counter(name.format(key), count, **labels))
        return metrics

    def _choice(self, load: Load) -> list[Metric]:
        """Return the metrics of the choice of K, if there are drafts."""
        if not self._config.max_draft_tokens:
            return []
        counters = {
            "saved_seconds": load.saved_s,
            "lost_seconds": load.lost_s,
            "probes": load.num_probes,
            "stops": load.num_stops,
            "given_up": self._stats.num_given_up,
            "drafts_compared": load.num_compared,
            "drafts_agreed": load.num_agreed,
        }
        return [
            self._gauge("speculation_num_drafts", load.choice.num_draft_tokens),
            self._gauge("speculation_gain", load.choice.gain or 0.0),
            self._gauge("speculation_failed", load.is_stopped),
            *(self._counter(f"speculation_{key}", n) for key, n in counters.items()),
        ]

    def _states(self, load: Load) -> list[Metric]:
        return [
            self._gauge("cache_config_info", 1, **self._cache()),
            *(
                self._gauge("engine_sleep_state", level == load.sleep_level, **label)
                for level, state in enumerate(_SLEEP_STATES)
                for label in ({"sleep_state": state},)
            ),
        ]

    def _cache(self) -> dict[str, str]:
        """Return the labels of `cache_config_info`, with vLLM's names.

        vLLM's metric has all fields of its `CacheConfig`. Fields of features that do
        not exist here (state-space models, shared keys, offloading) are left out.

        As in vLLM, `num_gpu_blocks` is the number of blocks that the pool allocates.
        If layers with a sliding window keep only their window, a block holds
        `block_size` tokens of some layers only, so the tokens that fit are not
        `num_gpu_blocks * block_size`, but `kv_cache_size_tokens`.
        """
        config, given_sizes = self._config, self._config.given
        share = given_sizes and given_sizes.gpu_memory_utilization
        if share is None and self._memory is not None:
            share = self._memory.utilization
        num_tokens = config.num_kv_tokens
        labels = {
            "block_size": config.page_size,
            "cache_dtype": config.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": share,
            "is_attention_free": False,
            "kv_cache_max_concurrency": num_tokens / config.max_model_len,
            "kv_cache_memory_bytes": given_sizes and given_sizes.kv_cache_memory_bytes,
            "kv_cache_size_tokens": num_tokens,
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.num_pages,
            "num_gpu_blocks_override": given_sizes and given_sizes.num_pages,
            "sliding_window": getattr(config.model_config, "sliding_window", None),
        }
        return {name: str(value) for name, value in labels.items()}

    def _drafts(self) -> list[Metric]:
        """Return vLLM's metrics of speculation, and gauges derived from them.

        `efficiency` is emitted tokens / (K + 1 tokens per round).
        """
        width, stats = self._config.max_draft_tokens, self._stats
        if not width:
            return []
        rounds = stats.num_draft_rounds
        emitted = stats.num_accepted_tokens + stats.num_side_tokens + rounds
        accepted = stats.accepted_per_position
        counters = {
            "num_drafts": rounds,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_emitted_tokens": emitted,
        }
        gauges = {
            "acceptance_rate": stats.acceptance_rate,
            "draft_acceptance_rate": stats.acceptance_rate,
            "efficiency": emitted / max(rounds * (width + 1), 1),
        }
        per_position = Vector(
            name="spec_decode_num_accepted_tokens_per_pos",
            labels=dict(self._labels),
            values=[*accepted, *[0] * (width - len(accepted))],
        )
        return [
            *(self._counter(f"spec_decode_{key}", n) for key, n in counters.items()),
            per_position,
            *(self._gauge(f"spec_decode_{key}", x) for key, x in gauges.items()),
        ]

    def _gauge(self, name: str, value: float | int, **labels: str) -> Gauge:
        return Gauge(name=name, labels=self._labels | labels, value=float(value))

    def _counter(self, name: str, value: int | float, **labels: str) -> Counter:
        return Counter(name=name, labels=self._labels | labels, value=value)

    def warn_of_low_acceptance(
        self, acceptance: AcceptanceRates, find_choice: Callable[[], Choice]
    ) -> None:
        """Warn once, with possible causes, if few drafts agree with the target.

        Args:
            find_choice: Returns the current K; called only for a warning.
        """
        if self._last_check is None or self._config.is_synthetic:
            return
        compared, agreed = self._last_check
        compared, agreed = (
            acceptance.num_compared - compared,
            acceptance.num_agreed - agreed,
        )
        if compared < _COMPARED:
            return
        self._last_check = acceptance.num_compared, acceptance.num_agreed
        if agreed >= _LOW_ACCEPTANCE * compared:
            return
        self._last_check = None
        speculative, k = self._config.speculative, find_choice().num_draft_tokens
        causes = _LOOKUP_CAUSES
        if speculative is not None and speculative.method_info.weights:
            has_head = speculative.method_info.has_head
            causes = _HEAD_CAUSES if has_head else _CAUSES
        _log.warning(
            "%sLow acceptance: the target agreed with %.0f%% of the last %d draft "
            "tokens. K is %d now%s. Possible causes: %s.",
            self._place,
            100 * agreed / compared,
            compared,
            k,
            "" if k else ": decoding continues without drafts",
            causes,
        )

    def seconds_since_log(self) -> float:
        """Seconds since the last line, or since the start."""
        return time.monotonic() - self._last_log[0]

    def log(self, load: Load) -> None:
        """Log statistics since the last log: one line, and one on drafts.

        An idle engine is logged once, then at level DEBUG.
        """
        now, stats = time.monotonic(), self._stats
        then, prompt_tokens, before = self._last_log
        seconds = max(now - then, 1e-9)
        self._last_log = (now, self.num_prompt_tokens, copy.deepcopy(stats))
        generated = stats.num_generated_tokens - before.num_generated_tokens
        prompt = self.num_prompt_tokens - prompt_tokens
        is_busy = bool(prompt or generated or load.num_running or load.num_waiting)
        level = logging.INFO if is_busy or self._was_busy else logging.DEBUG
        self._was_busy = is_busy
        hits = stats.num_prefix_hits / max(stats.num_prefix_queries, 1)
        _log.log(
            level,
            "%sAvg prompt throughput: %.1f tokens/s, "
            "Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            self._place,
            prompt / seconds,
            generated / seconds,
            load.num_running,
            load.num_waiting,
            100 * load.kv_usage,
            100 * hits,
        )
        rounds = stats.num_draft_rounds - before.num_draft_rounds
        if rounds:
            self._log_drafts(before, rounds, seconds)

    def _log_drafts(self, before: EngineStats, rounds: int, seconds: float) -> None:
        stats = self._stats
        drafted = stats.num_draft_tokens - before.num_draft_tokens
        accepted = stats.num_accepted_tokens - before.num_accepted_tokens
        earlier = [*before.accepted_per_position, *[0] * self._config.max_draft_tokens]
        rates = [
            (count - earlier[position]) / rounds
            for position, count in enumerate(stats.accepted_per_position)
        ]
        _log.info(
            "%sSpecDecoding metrics%s: Mean acceptance length: %.2f, "
            "Accepted throughput: %.2f tokens/s, Drafted throughput: %.2f tokens/s, "
            "Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            self._place,
            " (synthetic acceptance)" if self._config.is_synthetic else "",
            1 + accepted / rounds,
            accepted / seconds,
            drafted / seconds,
            accepted,
            drafted,
            ", ".join(f"{rate:.3f}" for rate in rates),
            100 * accepted / drafted,
        )


def lengths_up_to(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, none above `limit`."""
    powers = [10**power for power in range(len(str(limit)))]
    steps = (digit * power for power in powers for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)
