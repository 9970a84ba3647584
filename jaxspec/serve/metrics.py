"""Owns GET /metrics: what the engine and the server count, in Prometheus' text form."""

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
# Any other method is counted as `OTHER`: clients may invent any number of them.
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
OTHER = "other"
# Of ours; vLLM's names are known.
_HELP = {
    "jaxspec:round_time_seconds": "From a launch, or the end of the one before, to "
    "its tokens",
    "jaxspec:round_time_predicted_seconds": "What that was expected to be, where "
    "anything was known of such a launch",
    "jaxspec:round_time_error_seconds": "By how much the two differed, in either "
    "direction",
    "jaxspec:host_time_seconds": "What a step takes besides waiting and compiling",
    "jaxspec:draft_tokens_chosen": "Launches that decode, by their drafts per sequence",
    "jaxspec:speculation_num_drafts": "Drafts per sequence as chosen now (K)",
    "jaxspec:speculation_gain": "Tokens per second that K should bring, as a share of "
    "what plain decoding does; 0 where that is not known",
    "jaxspec:speculation_has_leaves": "Whether drafts have side leaves, or the rest of "
    "their tree, beside the chain now (1), or would not pay (0)",
    "jaxspec:speculation_saved_seconds": "Won against plain decoding, over rounds that "
    "won",
    "jaxspec:speculation_lost_seconds": "Lost against plain decoding, over rounds that "
    "lost, and for asking the draft model",
    "jaxspec:speculation_probes": "How often the draft model was asked while nothing "
    "was drafted",
    "jaxspec:speculation_stops": "How often drafts lost too much time and were left "
    "out for a while",
    "jaxspec:speculation_drafts_compared": "Draft tokens compared with what the target "
    "wants: verified, up to a round's first rejection, or asked for without drafting",
    "jaxspec:speculation_drafts_agreed": "How many of them stayed, or probably would "
    "have",
    "jaxspec:spec_decode_num_accepted_leaves": "Accepted drafts from beside the chain, "
    "with side leaves or a tree",
    "jaxspec:spec_decode_num_compared_by_rank": "Drafts of a tree whose chance it was, "
    "as those before them were accepted: by depth from 1, by rank at their place from "
    "0, after the chain of first choices or after a side path",
    "jaxspec:spec_decode_num_accepted_by_rank": "How many of them were what the target "
    "wanted",
    "jaxspec:synthetic_acceptance_info": "Acceptance is given, not found: chance of "
    "each draft to stay after those before it",
    "jaxspec:grammar_failures": "Texts that ended with an error of their grammar",
    "jaxspec:num_compiles": "Programs that were compiled",
    "jaxspec:compile_seconds": "How long that took",
    "jaxspec:warming": "Programs that are still to be compiled; 0 when all are there",
    "jaxspec:memory_bytes": "Of one device, as planned at the start, by what it is for",
    "jaxspec:memory_limit_bytes": "What a device has for that; 0 where nobody planned "
    "by it, as on a CPU",
    "jaxspec:memory_page_bytes": "Of one device, for keys and values of one page, by "
    "model",
    "jaxspec:memory_draft_bytes": "Of one device, for the draft model: weights, its "
    "part of the pages, and what programs take more",
    "jaxspec:memory_programs_found_bytes": "What the programs made so far take of a "
    "device, as compilers tell",
    "jaxspec:max_concurrency": "Sequences of max_model_len tokens that there are pages "
    "for",
    "jaxspec:request_timeouts": "Requests whose headers or body did not arrive in time",
    "jaxspec:descriptor_shortages": "How often no file descriptor was free, so that "
    "new connections were closed",
    "jaxspec:sequences_lost": "Sequences of max_model_len tokens that there would be "
    "pages for as well without the draft model",
}


class EngineFamilies(Collector):
    """What an engine has counted, as Prometheus has it."""

    def __init__(self, found: Iterable[metrics.Metric]):
        self._found = list(found)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, with all its values together."""
        by_name: dict[str, list[metrics.Metric]] = {}
        for one in self._found:
            by_name.setdefault(one.name, []).append(one)
        for name, values in by_name.items():
            yield _family(name, values)


def _family(name: str, values: list[metrics.Metric]) -> Metric:
    words = name.partition(":")[2].replace("_", " ").capitalize()
    text, labels = _HELP.get(name, words), list(values[0].labels)
    if isinstance(values[0], metrics.Vector):
        labels.append("position")
    family = _FORMS[type(values[0])](name, text, labels=labels)
    for one in values:
        told = list(one.labels.values())
        match one:
            case metrics.Gauge() | metrics.Counter():
                family.add_metric(told, one.value)
            case metrics.Vector():
                for position, count in enumerate(one.values):
                    family.add_metric([*told, str(position)], count)
            case metrics.Histogram():
                buckets = [(bound, float(n)) for bound, n in one.buckets.items()]
                family.add_metric(told, buckets, one.sum)
    return family


class HttpMetrics:
    """Counts requests by path and status, under the instrumentator's usual names.

    Attributes:
        registry: Where they are found.
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
            "Seconds from a request to the end of its answer",
            labels,
            buckets=_COARSE_S,
            registry=registry,
        )
        self._fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "The same, for all paths together and with more buckets",
            buckets=_FINE_S,
            registry=registry,
        )

    def add(self, handler: str, method: str, status: int, took_s: float) -> None:
        """Count a request that has been answered.

        Every label has a bounded number of values, whatever clients send.

        Args:
            handler: The path of a route, not that of a request.
            method: As the client sent it.
        """
        method = method if method in _METHODS else OTHER
        self._count.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(took_s)
        self._fine_duration.observe(took_s)


class CountRequests:
    """Middleware that counts what passes."""

    def __init__(self, app: ASGIApp, counts: HttpMetrics):
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.monotonic()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            # Not the path itself: anybody can make up as many as they like.
            handler = getattr(scope.get("route"), "path", "none")
            took_s = time.monotonic() - start
            self._counts.add(handler, scope["method"], status, took_s)


def metric_routes(serving: Serving, counts: HttpMetrics) -> APIRouter:
    """Make GET /metrics."""
    router = APIRouter()

    @router.get("/metrics")
    async def read_metrics() -> Response:
        """Tell what was counted since the start."""
        try:
            found = await serving.engine.get_metrics()
        except (ConfigError, EngineDeadError):
            found = []  # it does not count, or does not any more
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
