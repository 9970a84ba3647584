"""Records a span of OpenTelemetry for each finished request, with vLLM's names.

OpenTelemetry is imported only if traces are on.
"""

import importlib
import logging
import os
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from jaxspec.engine.scheduling.request import Request
from jaxspec.errors import ConfigError, escaped, wrong_argument
from jaxspec.extras import needs_extra

_log = logging.getLogger(__name__)

NAME = "otlp_traces_endpoint"
SPAN = "llm_request"
# Names of HTTP headers that continue the client's trace (W3C Trace Context).
TRACE_HEADERS = ("traceparent", "tracestate")
# Exporters by the value of OpenTelemetry's variable for the protocol.
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
# Maximum seconds that `close` waits for the last spans to be sent.
CLOSE_S = 5.0


def make_exporter(endpoint: str) -> Any:
    """Make the exporter that sends spans to a collector.

    The protocol is gRPC, unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is "http/protobuf".

    Raises:
        ConfigError: The protocol is unknown, or OpenTelemetry is missing.
    """
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol not in _EXPORTERS:
        allowed = " or ".join(map(repr, _EXPORTERS))
        raise wrong_argument(ConfigError, _PROTOCOL, allowed, protocol)
    with _needs_packages(endpoint):
        exporters = importlib.import_module(_EXPORTERS[protocol])
    return exporters.OTLPSpanExporter(endpoint=endpoint)


class RequestTracer:
    """Records and exports spans; a thread of OpenTelemetry's SDK sends them in batches.

    A slow or missing collector never delays the engine: the SDK drops spans that do not
    fit its queue.
    """

    def __init__(self, endpoint: str, model_name: str):
        """Start the exporter.

        Args:
            endpoint: URL of a collector.
            model_name: The model's name in spans.

        Raises:
            ConfigError: The protocol is unknown, or OpenTelemetry is missing.
        """
        with _needs_packages(endpoint):
            self._api = importlib.import_module("opentelemetry.trace")
            propagation = importlib.import_module(
                "opentelemetry.trace.propagation.tracecontext"
            )
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
        self._model_name = model_name
        self._propagator = propagation.TraceContextTextMapPropagator()
        # The engine closes the provider itself.
        self._provider = sdk.TracerProvider(shutdown_on_exit=False)
        processor = export.BatchSpanProcessor(make_exporter(endpoint))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("jaxspec.llm_engine")
        self._has_warned = False

    def record(self, request: Request, request_id: str) -> None:
        """Record a request that has ended; the first error is logged.

        Args:
            request_id: The caller's id; all texts of a request with n > 1 have it.
        """
        try:
            self._record(request, request_id)
        except Exception as error:  # noqa: BLE001 - it must not end the engine's step
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "The span of a request was not recorded; further errors of spans "
                    "are not logged",
                    exc_info=error,
                )

    def _record(self, request: Request, request_id: str) -> None:
        stats = request.stats
        e2e_s = time.monotonic() - stats.queued_ts
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [str(request.finish_reason)],
            "gen_ai.latency.e2e": e2e_s,
            **_parameters(request),
            **_times(request),
            **_acceptance(request),
        }
        start_ns = int(stats.arrival_time * 1e9)
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(dict(request.trace_headers or {})),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=start_ns,
        )
        if request.finish_reason == "error":
            reason = escaped(str(request.stop_reason or "a step failed"))
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))
        span.end(end_time=start_ns + int(e2e_s * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for at most `CLOSE_S` seconds.

        A daemon thread does it: the SDK itself may retry for minutes.
        """
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _parameters(request: Request) -> dict[str, Any]:
    """Return token counts, and sampling parameters that are not zero, as in vLLM."""
    params = request.params
    named = {
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.n": params.n,
    }
    return {name: value for name, value in named.items() if value} | {
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": request.stats.num_generation_tokens,
    }


def _times(request: Request) -> dict[str, float]:
    """Return the seconds of each part that the request has reached."""
    stats, times = request.stats, dict[str, float]()
    if stats.scheduled_ts:
        times["time_in_queue"] = stats.scheduled_ts - stats.queued_ts
    if stats.first_token_ts:
        times |= {
            "time_to_first_token": stats.first_token_latency,
            "time_in_model_prefill": stats.first_token_ts - stats.scheduled_ts,
            "time_in_model_decode": stats.last_token_ts - stats.first_token_ts,
            "time_in_model_inference": stats.last_token_ts - stats.scheduled_ts,
        }
    return {f"gen_ai.latency.{name}": seconds for name, seconds in times.items()}


def _acceptance(request: Request) -> dict[str, float | int]:
    """Return the counts of drafts, with the names of `metrics` in responses."""
    counts = request.spec_metrics
    if counts is None:
        return {}
    return {
        "jaxspec.num_spec_steps": counts.num_spec_steps,
        "jaxspec.num_draft_tokens": counts.num_draft_tokens,
        "jaxspec.num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        "jaxspec.mean_acceptance_length": counts.mean_acceptance_length,
        "jaxspec.draft_acceptance_rate": counts.acceptance_rate,
    }


def _needs_packages(endpoint: str) -> AbstractContextManager[None]:
    return needs_extra(
        "otel",
        "Sending traces",
        hint=f"Or leave out {NAME}.",
        parameter=NAME,
        value=endpoint,
    )
