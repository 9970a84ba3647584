import dataclasses
from typing import Any

import pytest

from jaxspec.logprobs import Logprob
from jaxspec.metrics import Counter, Gauge, Histogram, Vector
from jaxspec.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestSpecDecodeMetrics,
    RequestStateStats,
)


def output(text: str, token_ids: list[int], **fields: Any) -> RequestOutput:
    """Return an output of one completion with the given fields."""
    values: dict[str, Any] = dict(index=0, text=text, token_ids=token_ids) | fields
    completion = CompletionOutput(**values)
    return RequestOutput(
        request_id="7",
        prompt="p",
        prompt_token_ids=[2, 5],
        outputs=[completion],
        finished=completion.finished(),
    )


def test_metrics_agree_with_counting_by_hand():
    metrics = RequestSpecDecodeMetrics.empty(3)
    assert metrics.acceptance_rate == 0.0
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.acceptance_rate_per_position == [0.0, 0.0, 0.0]
    # Pairs (proposed, accepted). In the third step there was room for only two drafts.
    for proposed, accepted in [(3, 0), (3, 3), (2, 2), (3, 1), (3, 3)]:
        metrics.record_step(proposed, accepted)
    assert metrics.histogram == [1, 1, 1, 2]
    assert metrics.num_spec_steps == 5
    assert metrics.num_draft_tokens == 14
    assert metrics.num_accepted_draft_tokens == 9
    assert metrics.acceptance_rate == 9 / 14
    assert metrics.mean_acceptance_length == 1 + 9 / 5
    assert metrics.acceptance_rate_per_position == [4 / 5, 3 / 5, 2 / 5]
    assert metrics.num_proposed_per_position == [5, 5, 4]
    copy = metrics.snapshot()
    metrics.record_step(1, 0)
    assert copy.num_proposed_per_position == [5, 5, 4]
    assert metrics.num_proposed_per_position == [6, 5, 4]


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (
            RequestOutput(request_id="7", prompt=None, prompt_token_ids=None),
            "lora_request encoder_prompt encoder_prompt_token_ids "
            "num_cache_creation_tokens prompt_token_id_logprobs kv_transfer_params",
        ),
        (
            CompletionOutput(index=0, text="", token_ids=[]),
            "lora_request routed_experts sampling_mask weight_versions",
        ),
    ],
)
def test_fields_that_only_vllm_fills_are_none(made: object, names: str):
    for name in names.split():
        assert getattr(made, name) is None


@pytest.mark.parametrize(("proposed", "accepted"), [(2, 3), (4, 0), (2, -1)])
def test_impossible_step_fails_an_assertion(proposed: int, accepted: int):
    with pytest.raises(AssertionError):
        RequestSpecDecodeMetrics.empty(3).record_step(proposed, accepted)


def test_older_names_of_timings_are_wall_clock():
    stats = RequestStateStats(
        arrival_time=1_000_000.0,
        queued_ts=50.0,
        scheduled_ts=50.25,
        first_token_ts=51.0,
        last_token_ts=54.0,
        first_token_latency=1.0,
    )
    assert stats.first_scheduled_time == 1_000_000.25
    assert stats.first_token_time == 1_000_001.0
    assert stats.last_token_time == stats.finished_time == 1_000_004.0
    assert stats.time_in_queue == 0.25


def test_timings_of_missing_events_are_none():
    stats = RequestStateStats(arrival_time=5.0, queued_ts=50.0)
    for name in (
        *("first_scheduled_time", "first_token_time", "last_token_time"),
        *("time_in_queue", "model_forward_time"),
    ):
        assert getattr(stats, name) is None


def test_outputs_add_up_or_replace_each_other():
    first = output("Hel", [4], logprobs=[{4: Logprob(-0.5, 1, "Hel")}])
    assert not first.outputs[0].finished()
    last = dict(finish_reason="length", logprobs=[{9: Logprob(-1.0)}])
    first.add(output("lo", [9, 8], **last), True)
    completion = first.outputs[0]
    assert completion.text == "Hello"
    assert completion.token_ids == [4, 9, 8]
    assert completion.finish_reason == "length"
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[4], [9]]
    assert first.finished
    first = output("Hel", [4])
    first.add(output("Hello", [4, 9]), False)
    assert first.outputs[0].text == "Hello"
    assert first.outputs[0].token_ids == [4, 9]
    assert not first.finished
    # Completions are in the order of their indices.
    first = output("b", [4], index=1)
    first.add(output("a", [9]), True)
    assert [text.text for text in first.outputs] == ["a", "b"]


def test_frozen_output_keeps_its_counts():
    counts = RequestSpecDecodeMetrics.empty(3)
    counts.record_step(3, 2)
    frozen = output("", [], spec_decode_metrics=counts)
    frozen.metrics = stats = RequestStateStats(num_generation_tokens=3)
    frozen.freeze()
    counts.record_step(3, 1)
    stats.num_generation_tokens += 2
    kept = frozen.outputs[0].spec_decode_metrics
    assert kept is not None
    assert (kept.histogram, kept.num_draft_tokens) == ([0, 0, 1, 0], 3)
    assert frozen.metrics is not None
    assert frozen.metrics.num_generation_tokens == 3


def test_logprobs_have_vllms_fields():
    entry = Logprob(-0.5)
    assert dataclasses.astuple(entry) == (-0.5, None, None)
    assert Logprob(-0.5, 1, "a") == Logprob(logprob=-0.5, rank=1, decoded_token="a")


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Counter, ["value"]),
        (Gauge, ["value"]),
        (Vector, ["values"]),
        (Histogram, ["count", "sum", "buckets"]),
    ],
)
def test_metrics_have_vllms_fields(kind: type, own: list[str]):
    names = [item.name for item in dataclasses.fields(kind)]
    assert names == ["name", "labels", *own]
    assert issubclass(Counter, kind) == (kind is Counter), "scripts test the class"
