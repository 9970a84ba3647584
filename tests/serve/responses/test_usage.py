"""Token counts, acceptance and times that responses return."""

from typing import Any

import httpx
import pytest

from jaxspec.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestSpecDecodeMetrics,
    RequestStateStats,
)
from jaxspec.serve.response_store import ResponseStore
from jaxspec.serve.responses.usage import request_metrics
from jaxspec.serve.serving import Serving
from jaxspec.serve.settings import ServerSettings
from tests.support.engines import StubTokenizer
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, post, serve_http

TIMES = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}


class StubServing(Serving):
    """A `Serving` without an engine, for tests of response writers."""

    def __init__(self, **settings: Any):
        self.settings, self.tokenizer = ServerSettings(**settings), StubTokenizer(16)
        self.responses = ResponseStore(None, 0)


def finished(num_texts: int = 1) -> RequestOutput:
    drafts = RequestSpecDecodeMetrics(
        histogram=[1, 0, 2, 1], num_draft_tokens=12, proposals=[0, 0, 0, 4]
    )
    texts = [
        CompletionOutput(index=index, text="", token_ids=[], spec_decode_metrics=drafts)
        for index in range(num_texts)
    ]
    stats = RequestStateStats(
        num_generation_tokens=11,
        queued_ts=100.0,
        scheduled_ts=100.5,
        first_token_ts=101.0,
        last_token_ts=103.0,
        first_token_latency=1.0,
    )
    return RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[],
        outputs=texts,
        finished=True,
        metrics=stats,
    )


def test_simulated_acceptance_is_marked():
    output = finished()
    drafts = output.outputs[0].spec_decode_metrics
    assert drafts is not None
    metrics = request_metrics(output, has_drafts=True, has_times=False)
    assert metrics is not None
    assert "is_synthetic" not in metrics["speculative_decoding"]
    drafts.is_synthetic = True
    metrics = request_metrics(output, has_drafts=True, has_times=False)
    assert metrics is not None
    assert metrics["speculative_decoding"]["is_synthetic"] is True


def test_times_and_acceptance():
    metrics = request_metrics(finished(), has_drafts=True, has_times=True)
    assert metrics == {
        "time_to_first_token_ms": 1000.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 200.0,
        "tokens_per_second": 5.0,
        "speculative_decoding": {
            "mean_acceptance_length": 1 + 7 / 4,
            "draft_acceptance_rate": 7 / 12,
            "acceptance_histogram": [1, 0, 2, 1],
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 12,
            "num_proposed_per_position": [4, 4, 4],
            "num_spec_tokens": 3,
        },
    }


def test_no_metrics_for_several_texts():
    assert request_metrics(finished(2), has_drafts=True, has_times=True) is None
    assert request_metrics(finished(), has_drafts=False, has_times=False) is None


@pytest.mark.parametrize("is_stream", [False, True])
def test_metrics_by_request_or_setting(is_stream: bool):
    async def ask(client: httpx.AsyncClient) -> None:
        asked: dict[str, Any] = {"max_tokens": 12, "stream": is_stream}
        if is_stream:
            asked["stream_options"] = {"include_usage": True}
        prompt = {"prompt": PROMPT}
        for path, given in ((COMPLETIONS, prompt), (CHAT, {"messages": MESSAGES})):
            found = await post(client, path, **given, **asked)
            last = found[-1] if is_stream else found
            assert set(last["metrics"]) == {"speculative_decoding"}
            counts = last["metrics"]["speculative_decoding"]
            assert counts["num_spec_tokens"] == 3
            assert counts["num_spec_steps"] == sum(counts["acceptance_histogram"])
            found = await post(client, path, **given, **asked, include_metrics=True)
            last = found[-1] if is_stream else found
            assert set(last["metrics"]) == TIMES | {"speculative_decoding"}
            found = await post(client, path, **given, **asked, n=2)
            last = found[-1] if is_stream else found
            assert last.get("metrics") is None
            assert ("metrics" in last) != is_stream

    serve_http(ask, settings={"per_request_spec_decode_metrics": "summary"})


def test_stream_metrics_come_last():
    async def ask(client: httpx.AsyncClient) -> None:
        asked = {"max_tokens": 1, "stream": True, "include_metrics": True}
        usage = {"stream_options": {"include_usage": True}}
        prompt = {"prompt": PROMPT}
        for path, given in ((COMPLETIONS, prompt), (CHAT, {"messages": MESSAGES})):
            for more in ({}, usage):
                *chunks, last = await post(client, path, **given, **asked, **more)
                assert not any("metrics" in chunk for chunk in chunks)
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
                assert last["choices"] == []
                assert ("usage" in last) == bool(more)
                # A single token has no rate, so the field is left out instead of being
                # null.
                assert "tokens_per_second" not in last["metrics"]
                assert None not in last["metrics"].values()
                assert last["metrics"]["time_to_first_token_ms"] >= 0
            plain = await post(client, path, **given, max_tokens=1, stream=True)
            assert all(chunk["choices"] for chunk in plain)

    serve_http(ask, settings={"per_request_spec_decode_metrics": "summary"})


def test_cached_tokens():
    async def ask(client: httpx.AsyncClient) -> None:
        given = {"prompt": [2, 3, 4] * 6, "max_tokens": 3}
        counts = [
            (await post(client, COMPLETIONS, **given))["usage"]["prompt_tokens_details"]
            for _ in range(2)
        ]
        assert counts == [{"cached_tokens": 0}, {"cached_tokens": 16}]

    serve_http(ask, settings={"enable_prompt_tokens_details": True})


def test_force_include_usage():
    async def ask(client: httpx.AsyncClient) -> None:
        given: dict[str, Any] = {"max_tokens": 16, "stream": True}
        options = {"stream_options": {"include_usage": False}}
        for path, body in (
            (COMPLETIONS, {"prompt": PROMPT}),
            (CHAT, {"messages": MESSAGES} | options),
        ):
            chunks = await post(client, path, **given | body)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-2:] == [16, 16]
            assert chunks[-1]["choices"] == []
            assert (counts[0] == 0) == (path == CHAT)

    serve_http(ask, settings={"enable_force_include_usage": True})
