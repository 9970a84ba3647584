"""The contents of /metrics, parsed in the way Prometheus does."""

import asyncio
import logging
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.metrics import Counter, Gauge, Histogram, Vector
from tests.support.fake_engines import make_fake_engine
from tests.support.serving import COMPLETIONS, PROMPT, post, serve_http

LABELS = {"model_name": "target", "engine": "0"}


async def read(client: httpx.AsyncClient) -> dict[tuple[str, frozenset], float]:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_serves_all_engine_metrics():
    engine, _ = make_fake_engine(num_draft_tokens=3)

    async def ask(client: httpx.AsyncClient) -> None:
        await post(client, COMPLETIONS, prompt=PROMPT, max_tokens=12)
        found = await read(client)
        for one in engine.get_metrics():
            labels = frozenset(one.labels.items())
            match one:
                case Gauge():
                    assert (one.name, labels) in found
                case Counter():
                    assert (f"{one.name}_total", labels) in found
                case Histogram():
                    assert (f"{one.name}_count", labels) in found
                    for bound in one.buckets:
                        bucket = labels | {("le", bound)}
                        assert (f"{one.name}_bucket", bucket) in found
                case Vector():
                    for position in range(3):
                        entry = labels | {("position", str(position))}
                        assert (f"{one.name}_total", entry) in found

    serve_http(ask)


def test_metric_values():
    async def ask(client: httpx.AsyncClient) -> None:
        await post(client, COMPLETIONS, prompt=PROMPT, max_tokens=12)
        found = await read(client)
        plain = frozenset(LABELS.items())
        assert found["vllm:prompt_tokens_total", plain] == 3
        assert found["vllm:generation_tokens_total", plain] == 12
        ended = plain | {("finished_reason", "length")}
        assert found["vllm:request_success_total", ended] == 1
        assert found["vllm:e2e_request_latency_seconds_count", plain] == 1
        least = plain | {("le", "+Inf")}
        assert found["vllm:request_generation_tokens_bucket", least] == 1
        drafted = found["vllm:spec_decode_num_draft_tokens_total", plain]
        accepted = found["vllm:spec_decode_num_accepted_tokens_total", plain]
        rate = found["vllm:spec_decode_acceptance_rate", plain]
        assert rate == accepted / drafted > 0
        by_position = [
            value
            for (name, _), value in found.items()
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        ]
        assert sum(by_position) == accepted

    serve_http(ask)


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
    async def ask(client: httpx.AsyncClient) -> None:
        requests = [{"prompt": PROMPT, "max_tokens": 60}] * 5
        asked = [
            asyncio.ensure_future(post(client, COMPLETIONS, **body))
            for body in requests
        ]
        plain = frozenset(LABELS.items())
        name = "vllm:num_requests_waiting", plain
        running = "vllm:num_requests_running", plain
        while (busy := await read(client))[name] != 3 or busy[running] != 2:
            await asyncio.sleep(0.001)
        assert 0 < busy["vllm:kv_cache_usage_perc", plain] <= 1
        await asyncio.gather(*asked)
        text = (await client.get("/metrics")).text
        families = {one.name: one for one in text_string_to_metric_families(text)}
        for name, (kind, labels) in _GATEWAYS.items():
            family = families[name]
            assert family.type == kind, name
            names = [
                frozenset(one.labels.items())
                for one in family.samples
                if not {"le", *labels} & one.labels.keys()
            ]
            # Counters and histograms also have a series whose name ends in "_created".
            assert set(names) == (set() if labels else {plain}), name
            for one in family.samples:
                assert labels <= one.labels.keys(), name
        (cache,) = families["vllm:cache_config_info"].samples
        assert cache.value == 1
        sizes = [int(cache.labels[name]) for name in ("block_size", "num_gpu_blocks")]
        assert sizes[0] * sizes[1] > 96
        idle = await read(client)
        for name in ("num_requests_waiting", "num_requests_running"):
            assert idle[f"vllm:{name}", plain] == 0

    serve_http(ask, delay_s=0.005, max_num_seqs=2)


def test_counts_requests_by_route():
    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await post(client, COMPLETIONS, prompt=PROMPT)
        for path in ("/v1/models/a", "/v1/models/b", "/nowhere", "/elsewhere"):
            await client.get(path)
        found = {
            tuple(sorted(dict(labels).values())): value
            for (name, labels), value in (await read(client)).items()
            if name == "http_requests_total"
        }
        assert found == {
            ("/v1/completions", "2xx", "POST"): 2,
            ("/v1/models/{name:path}", "4xx", "GET"): 2,
            ("4xx", "GET", "none"): 2,
        }

    serve_http(ask, settings={"enable_request_id_headers": True})


def test_engine_without_stats():
    async def ask(client: httpx.AsyncClient) -> None:
        await client.get("/health")
        names = {name for name, _ in await read(client)}
        assert "http_requests_total" in names
        assert "vllm:prompt_tokens_total" not in names

    serve_http(ask, disable_log_stats=True)


def test_logs_statistics_until_idle(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for module in ("llm_engine", "engine_thread"):
        monkeypatch.setattr(f"jaxspec.engine.{module}.LOG_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, "jaxspec.engine.metrics")
    name = "vllm:spec_decode_num_accepted_tokens_total", frozenset(LABELS.items())

    async def ask(client: httpx.AsyncClient) -> None:
        await asyncio.sleep(0.2)
        assert not caplog.messages
        body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
        await post(client, COMPLETIONS, **body)
        ended = "generation throughput: 0.0 tokens/s, Running: 0 reqs"
        while not (caplog.messages and ended in caplog.messages[-1]):
            await asyncio.sleep(0.01)
        lines = list(caplog.messages)
        engine = [line for line in lines if line.startswith("Avg prompt throughput")]
        drafts = [line for line in lines if line.startswith("SpecDecoding metrics")]
        assert len(engine) > 2
        assert len(engine) + len(drafts) == len(lines)
        pattern = (
            r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: "
            r"[\d.]+ tokens/s, Running: 1 reqs, Waiting: 0 reqs, KV cache usage: "
            r"[\d.]+%, Prefix cache hit rate: [\d.]+%"
        )
        assert re.fullmatch(pattern, engine[0])
        for line in drafts:
            rates = re.findall(r"Per-position acceptance rate: ([\d., ]+),", line)
            assert len(rates[0].split(", ")) == 3
        # Every round is counted, also those after the last log line.
        counts = re.findall(r"Accepted: (\d+) tokens", caplog.text)
        assert sum(map(int, counts)) == (await read(client))[name] > 0
        await asyncio.sleep(0.2)
        assert caplog.messages == lines

    serve_http(ask, delay_s=0.03)
