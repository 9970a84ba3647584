"""A response header reports the engine's load to a proxy."""

import json

import httpx
import pytest

from jaxspec.engine.metrics import Load
from jaxspec.serve.load_report import load_header
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, serve_http

HEADER = "endpoint-load-metrics"
VALUES = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


def test_formats():
    load = Load(kv_usage=0.25, num_waiting=3)
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, "
    text += "named_metrics.num_requests_waiting=3.0"
    assert load_header(load, "TEXT") == load_header(load, "text") == {HEADER: text}
    kind, _, content = load_header(load, "json")[HEADER].partition(" ")
    assert (kind, json.loads(content)) == ("JSON", {"named_metrics": VALUES})
    assert load_header(load, "xml") == {}


@pytest.mark.parametrize("is_stream", [False, True])
def test_header_is_sent_on_request(is_stream: bool):
    async def ask(http: httpx.AsyncClient) -> None:
        for path, given in (
            (COMPLETIONS, {"prompt": PROMPT}),
            (CHAT, {"messages": MESSAGES}),
        ):
            body = given | {"stream": is_stream}
            headers = {f"{HEADER}-format": "TEXT"}
            response = await http.post(path, json=body, headers=headers)
            assert response.status_code == 200
            assert response.headers[HEADER].startswith("TEXT named_metrics.kv_cache")
            response = await http.post(path, json=body)
            assert HEADER not in response.headers

    serve_http(ask)
