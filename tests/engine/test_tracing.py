"""Spans of requests: names, times, acceptance, parents, and a missing package."""

import sys
import time
from typing import Any

import pytest

from jaxspec.config.kv_events import KvEventsConfig
from jaxspec.engine import llm_engine, tracing
from jaxspec.engine.tracing import RequestTracer
from jaxspec.errors import ConfigError
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_fake_engine, run_all
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, site_of
from tests.support.serving import Client as HttpClient

ENDPOINT = "http://localhost:4317"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LATENCIES = {
    f"gen_ai.latency.{name}"
    for name in (
        *("e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill"),
        *("time_in_model_decode", "time_in_model_inference"),
    )
}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spans are exported to memory."""
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter",
        reason="needs the extra otel",
    )
    one = memory.InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda endpoint: one)
    return one


def spans_of(engine: Any, exporter: Any) -> list[Any]:
    """Return the spans that have been recorded."""
    engine.output_processor.tracer._provider.force_flush()
    return list(exporter.get_finished_spans())


def test_span_has_vllms_attributes_and_acceptance(exporter: Any):
    engine, _ = make_fake_engine(otlp_traces_endpoint=ENDPOINT, num_draft_tokens=3)
    before = time.time_ns()
    params = SamplingParams(max_tokens=12, temperature=0.5, top_p=0.9, seed=1)
    engine.add_request("one", PROMPT, params, trace_headers=HEADERS)
    outputs = run_all(engine)["one"]
    (span,) = spans_of(engine, exporter)
    assert (span.name, span.kind.name) == ("llm_request", "SERVER")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert before <= span.start_time + 1000 <= span.end_time <= time.time_ns()
    found = dict(span.attributes)
    latencies = {name: found.pop(name) for name in LATENCIES}
    assert all(seconds >= 0 for seconds in latencies.values())
    duration_s = (span.end_time - span.start_time) / 1e9
    assert latencies["gen_ai.latency.e2e"] == pytest.approx(duration_s, abs=1e-6)
    stats = outputs[-1].metrics
    assert stats is not None
    first_token_s = latencies["gen_ai.latency.time_to_first_token"]
    assert first_token_s == stats.first_token_latency
    counts = outputs[-1].outputs[0].spec_decode_metrics
    assert counts is not None and counts.num_accepted_draft_tokens
    assert found == {
        "gen_ai.request.id": "one",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "target",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 12,
        "jaxspec.num_spec_steps": counts.num_spec_steps,
        "jaxspec.num_draft_tokens": counts.num_draft_tokens,
        "jaxspec.num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        "jaxspec.mean_acceptance_length": counts.mean_acceptance_length,
        "jaxspec.draft_acceptance_rate": counts.acceptance_rate,
    }


def test_every_text_and_abort_has_a_span(exporter: Any):
    engine, _ = make_fake_engine(
        otlp_traces_endpoint=ENDPOINT, num_draft_tokens=0, disable_log_stats=True
    )
    engine.add_request("two", PROMPT, SamplingParams(n=2, max_tokens=2))
    run_all(engine)
    engine.add_request("gone", PROMPT, SamplingParams())
    engine.abort_request("gone")
    spans = [dict(span.attributes) for span in spans_of(engine, exporter)]
    ids = [span["gen_ai.request.id"] for span in spans]
    assert ids == ["two", "two", "gone"]
    assert spans[-1]["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_in_queue" not in spans[-1], "it never ran"
    assert not any("jaxspec.num_draft_tokens" in span for span in spans)


def test_failed_request_has_an_error_status(exporter: Any):
    engine, runner = make_fake_engine(otlp_traces_endpoint=ENDPOINT, num_draft_tokens=0)
    patched: Any = runner
    patched.launch = None
    engine.add_request("one", PROMPT, SamplingParams())
    with pytest.raises(TypeError):
        engine.step()
    (span,) = spans_of(engine, exporter)
    assert span.status.status_code.name == "ERROR"


def test_last_spans_are_sent_at_shutdown(exporter: Any, monkeypatch):
    engine, _ = make_fake_engine(otlp_traces_endpoint=ENDPOINT)
    engine.add_request("one", PROMPT, SamplingParams(max_tokens=1))
    run_all(engine)
    assert not exporter.get_finished_spans(), "spans are sent in batches"
    engine.finish_exit()
    assert len(exporter.get_finished_spans()) == 1
    engine, _ = make_fake_engine(otlp_traces_endpoint=ENDPOINT)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.05)
    tracer: Any = engine.output_processor.tracer
    monkeypatch.setattr(tracer._provider, "shutdown", lambda: time.sleep(60))
    start = time.monotonic()
    engine.finish_exit()
    assert time.monotonic() - start < 10, "a missing collector delays no exit"
    assert engine.output_processor.tracer is None


def test_failing_span_does_not_end_the_step(exporter: Any, monkeypatch, caplog):
    engine, _ = make_fake_engine(otlp_traces_endpoint=ENDPOINT)
    tracer: Any = engine.output_processor.tracer
    monkeypatch.setattr(tracer, "_tracer", None)
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=2))
    assert set(run_all(engine)) == {"a", "b"}
    assert caplog.text.count("was not recorded") == 1
    assert "NoneType" in caplog.text


def test_failed_start_closes_the_tracer(exporter: Any, monkeypatch):
    closed: list[RequestTracer] = []
    monkeypatch.setattr(RequestTracer, "close", lambda self: closed.append(self))
    monkeypatch.setattr(llm_engine, "KvEventPublisher", None)
    with pytest.raises(TypeError, match="not callable"):
        make_fake_engine(
            otlp_traces_endpoint=ENDPOINT,
            kv_events=KvEventsConfig(enable_kv_cache_events=True),
        )
    assert len(closed) == 1


def test_server_continues_the_clients_trace(exporter: Any):
    changes = {"otlp_traces_endpoint": ENDPOINT}
    requests = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": MESSAGES}}
    with site_of(changes) as site, HttpClient(site) as http:
        for path, body in requests.items():
            for headers in (HEADERS, {}, {"traceparent": "nonsense"}):
                body = body | {"max_tokens": 2}
                response = http.post(path, json=body, headers=headers)
                assert response.status_code == 200
                engine = site.engine.engine
                span = spans_of(engine, exporter)[-1]
                is_same = f"{span.context.trace_id:032x}" == TRACE
                assert is_same == (headers == HEADERS)
                request_id = response.json()["id"]
                assert span.attributes["gen_ai.request.id"].startswith(request_id)


def test_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
    with pytest.raises(ConfigError, match="'grpc' or 'http/protobuf', got 'pigeon'"):
        tracing.make_exporter(ENDPOINT)


@pytest.mark.parametrize(
    "name", ["trace", "sdk.trace", "exporter.otlp.proto.grpc.trace_exporter"]
)
def test_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    # Makes its import fail.
    monkeypatch.setitem(sys.modules, f"opentelemetry.{name}", None)
    with pytest.raises(ConfigError, match=r"decoding\[otel\]") as caught:
        RequestTracer(ENDPOINT, "m")
    assert caught.value.parameter == "otlp_traces_endpoint"


def test_no_spans_by_default():
    engine, _ = make_fake_engine()
    assert engine.output_processor.tracer is None
