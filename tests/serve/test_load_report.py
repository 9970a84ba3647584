"""A response header reports the engine's load to a proxy."""

import json
from typing import Any

from jaxspec.engine.metrics import Load
from jaxspec.serve.load_report import load_header
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, Client

HEADER = "endpoint-load-metrics"
VALUES = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}


def test_load_is_written_in_each_format():
    load = Load(kv_usage=0.25, num_waiting=3)
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, "
    text += "named_metrics.num_requests_waiting=3.0"
    assert load_header(load, "TEXT") == load_header(load, "text") == {HEADER: text}
    kind, _, content = load_header(load, "json")[HEADER].partition(" ")
    assert (kind, json.loads(content)) == ("JSON", {"named_metrics": VALUES})
    assert load_header(load, "xml") == {}


def test_header_is_sent_on_request(http: Client):
    requests: dict[str, Any] = {COMPLETIONS: {"prompt": PROMPT}}
    requests[CHAT] = {"messages": MESSAGES}
    for path, body in requests.items():
        for is_stream in (False, True):
            body["stream"] = is_stream
            headers = {f"{HEADER}-format": "TEXT"}
            response = http.post(path, json=body, headers=headers).raise_for_status()
            assert response.headers[HEADER].startswith("TEXT named_metrics.kv_cache")
            assert HEADER not in http.post(path, json=body).headers
