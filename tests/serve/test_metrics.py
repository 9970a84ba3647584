"""The contents of /metrics, parsed in the way Prometheus does."""

from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from jaxspec.metrics import Counter, Gauge, Histogram, Vector
from tests.support.fake_engines import make_fake_engine
from tests.support.serving import COMPLETIONS, PROMPT, Client, server

LABELS = {"model_name": "target", "engine": "0"}
PLAIN = frozenset(LABELS.items())


def read(http: Client) -> dict[tuple[str, frozenset], float]:
    response = http.get("/metrics").raise_for_status()
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_serves_all_engine_metrics():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    with server() as http:
        http.ask(COMPLETIONS, prompt=PROMPT, max_tokens=12)
        found = read(http)
    for one in engine.get_metrics():
        labels = frozenset(one.labels.items())
        match one:
            case Gauge():
                expected = [(one.name, labels)]
            case Counter():
                expected = [(f"{one.name}_total", labels)]
            case Histogram():
                bounds = [labels | {("le", bound)} for bound in one.buckets]
                expected = [(f"{one.name}_bucket", bound) for bound in bounds]
                expected.append((f"{one.name}_count", labels))
            case Vector():
                places = [labels | {("position", str(place))} for place in range(3)]
                expected = [(f"{one.name}_total", place) for place in places]
            case _:
                raise AssertionError(one)
        assert found.keys() >= set(expected)
    assert found["vllm:prompt_tokens_total", PLAIN] == 3
    assert found["vllm:generation_tokens_total", PLAIN] == 12
    ended = PLAIN | {("finished_reason", "length")}
    assert found["vllm:request_success_total", ended] == 1
    assert found["vllm:e2e_request_latency_seconds_count", PLAIN] == 1
    least = PLAIN | {("le", "+Inf")}
    assert found["vllm:request_generation_tokens_bucket", least] == 1
    drafts = "vllm:spec_decode_"
    accepted = found[f"{drafts}num_accepted_tokens_total", PLAIN]
    drafted = found[f"{drafts}num_draft_tokens_total", PLAIN]
    assert found[f"{drafts}acceptance_rate", PLAIN] == accepted / drafted > 0
    name = f"{drafts}num_accepted_tokens_per_pos_total"
    assert sum(value for key, value in found.items() if key[0] == name) == accepted


# For each reader of metrics: the names that it reads, and whether it needs exactly one
# series per name, because it compares servers.
_GATEWAYS: dict[str, tuple[str, set[str]]] = {
    # The Inference Extension's endpoint picker and llm-d choose a server by these.
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:cache_config_info": ("gauge", {"block_size", "num_gpu_blocks"}),
    # KEDA and dashboards of vLLM's production stack read these.
    "vllm:time_to_first_token_seconds": ("histogram", set()),
    "vllm:inter_token_latency_seconds": ("histogram", set()),
    "vllm:e2e_request_latency_seconds": ("histogram", set()),
    "vllm:request_queue_time_seconds": ("histogram", set()),
    "vllm:prompt_tokens": ("counter", set()),
    "vllm:generation_tokens": ("counter", set()),
    "vllm:prefix_cache_queries": ("counter", set()),
    "vllm:prefix_cache_hits": ("counter", set()),
    "vllm:request_success": ("counter", {"finished_reason"}),
}


def test_metrics_used_by_gateways():
    waiting, running = "vllm:num_requests_waiting", "vllm:num_requests_running"
    with (
        server({"max_num_seqs": 2}, delay_s=0.02) as http,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": PROMPT, "max_tokens": 60}
        asked = [pool.submit(http.ask, COMPLETIONS, **body) for _ in range(5)]
        busy: dict = {}
        while (busy.get((waiting, PLAIN)), busy.get((running, PLAIN))) != (3, 2):
            assert not all(one.done() for one in asked)
            busy = read(http)
        assert 0 < busy["vllm:kv_cache_usage_perc", PLAIN] <= 1
        for one in asked:
            one.result()
        families = text_string_to_metric_families(http.get("/metrics").text)
        found = {one.name: one for one in families}
    for name, (kind, labels) in _GATEWAYS.items():
        family = found[name]
        assert family.type == kind, name
        names = [
            frozenset(one.labels.items())
            for one in family.samples
            if not {"le", *labels} & one.labels.keys()
        ]
        # Counters and histograms also have a series whose name ends in "_created".
        assert set(names) == (set() if labels else {PLAIN}), name
        assert all(labels <= one.labels.keys() for one in family.samples), name
    (cache,) = found["vllm:cache_config_info"].samples
    assert cache.value == 1
    sizes = [int(cache.labels[name]) for name in ("block_size", "num_gpu_blocks")]
    assert sizes[0] * sizes[1] > 96
    idle = [found[name].samples[0].value for name in (waiting, running)]
    assert idle == [0, 0]


def test_counts_requests_by_route():
    with server(enable_request_id_headers=True) as http:
        for _ in range(2):
            http.ask(COMPLETIONS, prompt=PROMPT)
        for path in ("/v1/models/a", "/v1/models/b", "/nowhere", "/elsewhere"):
            http.get(path)
        found = {
            tuple(sorted(dict(labels).values())): value
            for (name, labels), value in read(http).items()
            if name == "http_requests_total"
        }
    assert found == {
        ("/v1/completions", "2xx", "POST"): 2,
        ("/v1/models/{name:path}", "4xx", "GET"): 2,
        ("4xx", "GET", "none"): 2,
    }


def test_engine_without_stats_has_no_engine_metrics():
    with server({"disable_log_stats": True}) as http:
        http.get("/health")
        names = {name for name, _ in read(http)}
    assert "http_requests_total" in names
    assert "vllm:prompt_tokens_total" not in names
