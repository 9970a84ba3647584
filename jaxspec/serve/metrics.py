"""Owns GET /metrics: counts of the engine and the server, in Prometheus' format."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec import metrics
from jaxspec.engine.metrics import PREFIXES
from jaxspec.errors import ConfigError, EngineDeadError
from jaxspec.serve.serving import Serving

_COARSE_S = (0.1, 0.5, 1.0)
_FINE_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
_FINE_S += (3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_FORMS: dict[type[metrics.Metric], Any] = {
    metrics.Gauge: GaugeMetricFamily,
    metrics.Counter: CounterMetricFamily,
    metrics.Vector: CounterMetricFamily,
    metrics.Histogram: HistogramMetricFamily,
}
# Any other method is counted as `OTHER`: clients may invent any number of methods.
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
OTHER = "other"
# Help texts of our own metrics; most of vLLM's are documented by vLLM.
_HELP = {
    **dict.fromkeys(
        (f"{prefix}:cache_config_info" for prefix in PREFIXES),
        "Sizes of the KV cache. If layers with a sliding window keep only their "
        "window, each of num_gpu_blocks holds block_size tokens of some layers only, "
        "and kv_cache_size_tokens is the number of tokens that fit",
    ),
    "jaxspec:round_time_seconds": "Time from a launch, or from the end of the previous "
    "one, until its tokens are read",
    "jaxspec:round_time_predicted_seconds": "Predicted time of those "
    "launches for which there was a prediction",
    "jaxspec:round_time_error_seconds": "Sum of absolute errors of the predicted times",
    "jaxspec:host_time_seconds": "Host time per step, without waiting for devices and "
    "compiling",
    "jaxspec:draft_tokens_chosen": "Decoding launches, by draft tokens per sequence",
    "jaxspec:speculation_num_drafts": "Draft tokens per sequence chosen now (K)",
    "jaxspec:speculation_gain": "Predicted tokens per second with K relative to plain "
    "decoding, minus 1; 0 if unknown",
    "jaxspec:speculation_has_leaves": "1 if drafts now have side leaves or side "
    "branches besides the main chain, 0 if these would not pay off",
    "jaxspec:speculation_saved_seconds": "Time won against plain decoding, summed over "
    "the rounds that won",
    "jaxspec:speculation_lost_seconds": "Time lost against plain decoding, summed over "
    "the rounds that lost, and time of draft probes",
    "jaxspec:speculation_probes": "Probes of the draft model while K was 0",
    "jaxspec:speculation_stops": "How often speculation was paused because it had lost "
    "too much time",
    "jaxspec:speculation_given_up": "Requests that got no more drafts because the "
    "pages that the draft model would have read were needed",
    "jaxspec:speculation_failed": "1 after speculation has failed and stopped for good",
    "jaxspec:speculation_drafts_compared": "Draft tokens compared with the target's: "
    "verified, up to a round's first rejection, or probed while K was 0",
    "jaxspec:speculation_drafts_agreed": "Compared draft tokens that were accepted, or "
    "would have been",
    "jaxspec:spec_decode_num_accepted_leaves": "Accepted draft tokens from side leaves "
    "or side branches",
    "jaxspec:spec_decode_num_compared_by_rank": "Draft tokens of a tree that were "
    "verified after their parents were accepted: by depth from 1, by rank among their "
    "siblings from 0, after the main chain or after a side branch",
    "jaxspec:spec_decode_num_accepted_by_rank": "Draft tokens counted by "
    "num_compared_by_rank that were accepted",
    "jaxspec:synthetic_acceptance_info": "Acceptance is simulated: probability that a "
    "draft token is accepted after those before it",
    "jaxspec:grammar_failures": "Sequences that ended because their grammar failed",
    "jaxspec:num_compiles": "Programs compiled",
    "jaxspec:compile_seconds": "Time spent compiling programs",
    "jaxspec:warming": "Programs that the warm-up has yet to compile",
    "jaxspec:memory_bytes": "Memory of one device as planned at startup, by use",
    "jaxspec:memory_limit_bytes": "Memory of a device available to the plan; 0 if the "
    "plan has no limit, as on a CPU",
    "jaxspec:memory_page_bytes": "Memory of one device for the keys and values of one "
    "of num_gpu_blocks (see cache_config_info), by model",
    "jaxspec:memory_draft_bytes": "Memory of one device for the draft model: weights, "
    "its share of the pages, and the additional temporary memory of programs",
    "jaxspec:memory_programs_found_bytes": "Memory of one device used by the programs "
    "compiled so far, as reported by the compiler",
    "jaxspec:max_concurrency": "Sequences of max_model_len tokens that the pages hold",
    "jaxspec:request_timeouts": "Requests whose headers or body did not arrive in time",
    "jaxspec:descriptor_shortages": "How often no file descriptor was free, so that "
    "new connections were closed",
    "jaxspec:sequences_lost": "Additional sequences of max_model_len tokens that the "
    "pages would hold without the draft model",
}


class EngineFamilies(Collector):
    """An engine's metrics as Prometheus metric families."""

    def __init__(self, found: Iterable[metrics.Metric]):
        self._found = list(found)

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric name, with all its label values."""
        by_name: dict[str, list[metrics.Metric]] = {}
        for one in self._found:
            by_name.setdefault(one.name, []).append(one)
        for name, values in by_name.items():
            yield _family(name, values)


def _family(name: str, values: list[metrics.Metric]) -> Metric:
    default = name.partition(":")[2].replace("_", " ").capitalize()
    text, labels = _HELP.get(name, default), list(values[0].labels)
    if isinstance(values[0], metrics.Vector):
        labels.append("position")
    family = _FORMS[type(values[0])](name, text, labels=labels)
    for one in values:
        label_values = list(one.labels.values())
        match one:
            case metrics.Gauge() | metrics.Counter():
                family.add_metric(label_values, one.value)
            case metrics.Vector():
                for position, count in enumerate(one.values):
                    family.add_metric([*label_values, str(position)], count)
            case metrics.Histogram():
                buckets = [(bound, float(n)) for bound, n in one.buckets.items()]
                family.add_metric(label_values, buckets, one.sum)
    return family


class HttpMetrics:
    """Counts requests by path and status.

    The names are those of prometheus-fastapi-instrumentator, which vLLM uses.

    Attributes:
        registry: Registry with the counts.
    """

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        labels = ("handler", "method")
        self._count = Counter(
            "http_requests",
            "Requests, by path, method and status",
            (*labels, "status"),
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request to the end of its response",
            labels,
            buckets=_COARSE_S,
            registry=registry,
        )
        self._fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "Seconds from a request to the end of its response, over all paths",
            buckets=_FINE_S,
            registry=registry,
        )

    def add(self, handler: str, method: str, status: int, took_s: float) -> None:
        """Count a finished request.

        Args:
            handler: Path of the route, not of the request: every label must have a
                bounded number of values, whatever clients send.
            method: HTTP method as the client sent it.
        """
        method = method if method in _METHODS else OTHER
        self._count.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(took_s)
        self._fine_duration.observe(took_s)


class CountRequests:
    """Middleware that counts requests."""

    def __init__(self, app: ASGIApp, counts: HttpMetrics):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.monotonic()

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        finally:
            # The route, not the request's path: clients may invent any number of paths.
            handler = getattr(scope.get("route"), "path", "none")
            took_s = time.monotonic() - start
            self._counts.add(handler, scope["method"], status, took_s)


def metric_routes(serving: Serving, counts: HttpMetrics) -> APIRouter:
    """Make GET /metrics."""
    router = APIRouter()

    @router.get("/metrics")
    async def read_metrics() -> Response:
        """Return all metrics since the start."""
        try:
            found = await serving.engine.get_metrics()
        except (ConfigError, EngineDeadError):
            found = []  # statistics are off, or the engine has ended
        found += _admissions(serving)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(EngineFamilies(found))
        text = generate_latest(registry) + generate_latest(counts.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _admissions(serving: Serving) -> list[metrics.Metric]:
    labels = {"model_name": serving.config.served_model_name, "engine": "0"}
    admission = serving.admission
    found: list[metrics.Metric] = [
        metrics.Counter(
            name=f"{prefix}:admission_rejections",
            labels=labels | {"reason": reason},
            value=count,
        )
        for prefix in ("vllm", "jaxspec")
        for reason, count in admission.num_refused.items()
    ]
    found += [
        metrics.Counter(
            name="jaxspec:request_timeouts", labels=labels | {"part": part}, value=count
        )
        for part, count in admission.num_timeouts.items()
    ]
    shortages = admission.num_descriptor_shortages
    name = "jaxspec:descriptor_shortages"
    found.append(metrics.Counter(name=name, labels=labels, value=shortages))
    return found
