"""Token counts, acceptance and times that responses return."""

from typing import Any

import pytest

from jaxspec.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestSpecDecodeMetrics,
    RequestStateStats,
)
from jaxspec.serve.responses.usage import Usage, request_metrics
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, PROMPT, Client, server

TIMES = {
    "time_to_first_token_ms": 1000.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": 200.0,
    "tokens_per_second": 4.4,
}
REQUESTS: dict[str, Any] = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": MESSAGES},
}


def metrics_of(num_texts: int = 1, *, is_synthetic: bool = False, **has: bool) -> Any:
    """Return the metrics of a finished request."""
    drafts = RequestSpecDecodeMetrics(
        histogram=[1, 0, 2, 1], num_draft_tokens=12, proposals=[0, 0, 0, 4]
    )
    drafts.is_synthetic = is_synthetic
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
    output = RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[],
        outputs=texts,
        finished=True,
        metrics=stats,
    )
    return request_metrics(output, **dict(has_drafts=True, has_times=False) | has)


def test_times_and_acceptance_are_reported():
    drafts = {
        "mean_acceptance_length": 1 + 7 / 4,
        "draft_acceptance_rate": 7 / 12,
        "acceptance_histogram": [1, 0, 2, 1],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 12,
        "num_proposed_per_position": [4, 4, 4],
        "num_spec_tokens": 3,
    }
    assert metrics_of(has_times=True) == TIMES | {"speculative_decoding": drafts}
    forced = drafts | {"is_synthetic": True}
    assert metrics_of(is_synthetic=True) == {"speculative_decoding": forced}
    assert metrics_of(2, has_times=True) is None, "several texts"
    assert metrics_of(has_drafts=False) is None


USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, USAGE])
def test_metrics_are_returned_last_by_request_or_setting(fields: dict[str, Any]):
    with server(per_request_spec_decode_metrics="summary") as http:

        def ask(path: str, **more: Any) -> list[Any]:
            found = http.ask(path, **REQUESTS[path], **fields, **more)
            return found if fields else [found]

        for path in REQUESTS:
            *chunks, last = ask(path, max_tokens=12)
            if fields == {"stream": True}:
                assert last["choices"], "no chunk only for metrics"
                chunks.append(last)
            else:
                assert set(last["metrics"]) == {"speculative_decoding"}
                counts = last["metrics"]["speculative_decoding"]
                assert counts["num_spec_tokens"] == 3
                assert counts["num_spec_steps"] == sum(counts["acceptance_histogram"])
            *more, last = ask(path, max_tokens=12, include_metrics=True)
            assert set(last["metrics"]) == TIMES.keys() | {"speculative_decoding"}
            assert not any("metrics" in chunk for chunk in chunks + more)
            several = ask(path, max_tokens=12, n=2)[-1]
            assert several.get("metrics") is None
            assert ("metrics" in several) == (not fields)
            *chunks, last = ask(path, max_tokens=1, include_metrics=True)
            if not fields:
                continue
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert last["choices"] == []
            assert ("usage" in last) == (fields is USAGE)
            # There is no time between tokens, so the field is left out instead of being
            # null.
            assert last["metrics"]["tokens_per_second"] > 0
            assert "mean_itl_ms" not in last["metrics"]
            assert None not in last["metrics"].values()
            assert last["metrics"]["time_to_first_token_ms"] >= 0


def test_usage_follows_the_settings():
    settings: dict[str, Any] = {"enable_prompt_tokens_details": True}
    with server(**settings, enable_force_include_usage=True) as http:
        given: dict[str, Any] = {"prompt": [2, 3, 4] * 6, "max_tokens": 3}
        usages = [http.ask(COMPLETIONS, **given)["usage"] for _ in range(2)]
        cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
        assert cached == [0, 16]
        timings = http.ask(COMPLETIONS, **given)["timings"]
        assert (timings["cache_n"], timings["prompt_n"]) == (16, 2)
        asked: dict[str, Any] = {"max_tokens": 16, "stream": True}
        options = {"stream_options": {"include_usage": False}}
        for path, more in ((COMPLETIONS, {}), (CHAT, options)):
            chunks = http.ask(path, **asked, **REQUESTS[path], **more)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-2:] == [16, 16]
            assert chunks[-1]["choices"] == []
            assert (counts[0] == 0) == (path == CHAT)


def test_timings_have_llama_cpps_fields():
    usage = Usage(has_details=True)
    output = RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[2] * 20,
        num_cached_tokens=16,
    )
    usage.add_prompt(0, output)
    usage.add_text(0, 5)
    stats = RequestStateStats(
        scheduled_ts=100.0, first_token_ts=100.5, last_token_ts=102.5
    )
    expected = {
        "cache_n": 16,
        "prompt_n": 4,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 125.0,
        "prompt_per_second": 8.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }
    assert usage.timings(stats) == expected
    drafts = RequestSpecDecodeMetrics(histogram=[1, 0, 2], num_draft_tokens=6)
    usage.add_drafts(0, drafts)
    assert usage.timings(stats) == expected | {"draft_n": 6, "draft_n_accepted": 4}
    assert "completion_tokens_details" not in usage.total(), "was not requested"
    usage = Usage(has_details=False)
    usage.add_prompt(0, output)
    found = usage.timings(stats)
    assert "cache_n" not in found, "shows what other requests have asked"
    assert (found["prompt_n"], found["prompt_per_second"]) == (20, 40.0)
    empty = Usage(has_details=False).timings(RequestStateStats(scheduled_ts=100.0))
    assert set(empty.values()) == {0}, "aborted before the first token"


@pytest.mark.parametrize("path", REQUESTS)
def test_timings_come_last(http: Client, path: str):
    asked = REQUESTS[path] | {"max_tokens": 12}
    answer = http.ask(path, **asked, include_metrics=True)
    counts = answer["metrics"]["speculative_decoding"]
    num_drafts, num_accepted = (
        counts[name] for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert num_drafts >= num_accepted > 0
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_drafts - num_accepted,
    }
    for more in ({"stream": True}, USAGE, USAGE | {"include_metrics": True}):
        *chunks, last = http.ask(path, **asked, **more)
        assert not any("timings" in chunk for chunk in chunks)
        is_text = "stream_options" not in more
        assert bool(last["choices"]) == is_text, "no chunk only for timings"
        has_details = "completion_tokens_details" in last.get("usage", {})
        assert has_details == ("include_metrics" in more)
        for timings in (answer["timings"], last["timings"]):
            assert "cache_n" not in timings
            assert timings["prompt_n"] == len(PROMPT)
            assert timings["predicted_n"] == 12
            assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    plain = http.ask(path, **asked, num_speculative_tokens=0)["timings"]
    assert not {"draft_n", "draft_n_accepted"} & plain.keys()
    several = http.ask(path, **asked, n=2, include_metrics=True)
    assert "timings" not in several, "texts have different times"
    assert "completion_tokens_details" in several["usage"]
    for chunk in http.ask(path, **asked, n=2, stream=True):
        assert "timings" not in chunk
