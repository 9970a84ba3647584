"""The metrics and log lines of an engine equal values counted in the tests."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec.config.engine import GivenSizes
from jaxspec.config.speculation import SpeculativeConfig
from jaxspec.engine.metrics import Distribution, EngineMetrics, Load, lengths_up_to
from jaxspec.engine.scheduling.stats import EngineStats
from jaxspec.engine.speculation.acceptance import AcceptanceRates
from jaxspec.engine.speculation.policy import Choice
from jaxspec.metrics import Counter, Gauge, Histogram, Vector
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_fake_engine, run_all
from tests.support.loops import make_config
from tests.support.memory_plans import make_plan
from tests.support.requests import make

# Names of vLLM's metrics without the prefix `vllm:`, written out as vLLM has them.
COUNTERS = """
prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens
prompt_tokens_cached request_success spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_emitted_tokens
"""
GAUGES = """
num_requests_running num_requests_waiting kv_cache_usage_perc engine_sleep_state
cache_config_info spec_decode_acceptance_rate spec_decode_draft_acceptance_rate
spec_decode_efficiency num_requests_waiting_by_reason
"""
HISTOGRAMS = """
time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
request_time_per_output_token_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
iteration_tokens_total request_prompt_tokens request_generation_tokens
request_max_num_generation_tokens request_params_max_tokens request_params_n
request_prefill_kv_computed_tokens request_num_preemptions
"""
# Metrics that vLLM does not have, only jaxspec.
CHOSEN = "jaxspec:draft_tokens_chosen"
OWN = [
    ("jaxspec:round_time_seconds", Histogram),
    ("jaxspec:round_time_predicted_seconds", Histogram),
    ("jaxspec:round_time_error_seconds", Counter),
    ("jaxspec:host_time_seconds", Histogram),
    *[(CHOSEN, Counter)] * 4,
    *[("jaxspec:grammar_failures", Counter)] * 5,
    ("jaxspec:speculation_num_drafts", Gauge),
    ("jaxspec:speculation_gain", Gauge),
    ("jaxspec:speculation_failed", Gauge),
    ("jaxspec:speculation_saved_seconds", Counter),
    ("jaxspec:speculation_lost_seconds", Counter),
    ("jaxspec:speculation_probes", Counter),
    ("jaxspec:speculation_stops", Counter),
    ("jaxspec:speculation_given_up", Counter),
    ("jaxspec:speculation_drafts_compared", Counter),
    ("jaxspec:speculation_drafts_agreed", Counter),
    ("jaxspec:num_compiles", Counter),
    ("jaxspec:compile_seconds", Counter),
    ("jaxspec:warming", Gauge),
]


def make_metrics(**changes: Any) -> tuple[EngineMetrics, EngineStats]:
    stats = EngineStats()
    return EngineMetrics(make_config(**changes), stats), stats


def values(metrics: list[Any]) -> dict[str, Any]:
    """Return values by name and labels, such as "request_success length".

    Names have no prefix "vllm:"; a histogram is its count and sum.
    """
    found: dict[str, Any] = {}
    for one in metrics:
        labels = dict(one.labels)
        assert (labels.pop("model_name"), labels.pop("engine")) == ("target", "0")
        name = " ".join([one.name.removeprefix("vllm:"), *labels.values()])
        if isinstance(one, Histogram):
            found[name] = one.count, one.sum
        else:
            found[name] = one.values if isinstance(one, Vector) else one.value
    return found


def read(metrics: EngineMetrics, **load: Any) -> dict[str, Any]:
    return values(metrics.read(Load(**load)))


def subset(found: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries with a prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in found.items()
        if name.startswith(prefix)
    }


def test_names_and_kinds_are_those_of_vllm():
    found = [(one.name, type(one)) for one in make_metrics()[0].read(Load())]
    theirs = [(name, kind) for name, kind in found if name.startswith("vllm:")]
    kinds: dict[str, Any] = dict.fromkeys(COUNTERS.split(), Counter)
    kinds |= dict.fromkeys(GAUGES.split(), Gauge)
    kinds |= dict.fromkeys(HISTOGRAMS.split(), Histogram)
    kinds["spec_decode_num_accepted_tokens_per_pos"] = Vector
    assert {name.removeprefix("vllm:"): kind for name, kind in theirs} == kinds
    ours = [(name.replace("vllm:", "jaxspec:"), kind) for name, kind in theirs]
    assert found == theirs + ours + OWN
    without_drafts = read(make_metrics(num_draft_tokens=0)[0])
    assert "jaxspec:generation_tokens" in without_drafts
    assert not [one for one in without_drafts if "spec" in one.rpartition(":")[2]]


def add_rounds(
    stats: EngineStats, *, rounds: int, drafts: int, kept: list[int], tokens: int
) -> None:
    stats.num_draft_rounds += rounds
    stats.num_draft_tokens += drafts
    stats.num_accepted_tokens += sum(kept)
    stats.num_generated_tokens += tokens
    before = [*stats.accepted_per_position, *[0] * len(kept)]
    stats.accepted_per_position[:] = [
        old + new for old, new in zip(before, kept, strict=False)
    ]


def test_memory_plan_is_reported():
    planned = make_plan(dict(max_num_seqs=64, max_num_batched_tokens=2048))
    metrics = EngineMetrics(make_config(), EngineStats(), planned)
    found = subset(read(metrics, program_bytes=123), "jaxspec:")
    parts = {
        "target_weights": 18_483_411_968,
        "draft_weights": 5_228_683_776,
        "programs": 2_824_339_456,
        "KV": planned.kv_bytes,
        "left": planned.left_bytes,
    }
    assert subset(found, "memory_bytes ") == parts
    assert found["memory_limit_bytes"] == sum(parts.values())
    pages = {"target": 16 * 344_064, "draft": 16 * 106_496}
    assert subset(found, "memory_page_bytes ") == pages
    assert found["memory_draft_bytes"] == planned.draft_bytes
    assert found["memory_programs_found_bytes"] == 123
    assert found["max_concurrency"] == planned.num_pages / 512
    assert found["sequences_lost"] == planned.sequences_lost > 0


def test_drafts_and_accepted_tokens_are_counted():
    metrics, stats = make_metrics(num_draft_tokens=3)
    # Rounds of 3, 3 and 2 drafts, of which 2, 0 and 2 were accepted, and a round
    # without drafts.
    add_rounds(stats, rounds=3, drafts=8, kept=[2, 2], tokens=8)
    found = read(metrics)
    assert found["generation_tokens"] == 8
    assert subset(found, "spec_decode_") == {
        "num_drafts": 3,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 4,
        "num_emitted_tokens": 4 + 3,
        "num_accepted_tokens_per_pos": [2, 2, 0],
        "acceptance_rate": 0.5,
        "draft_acceptance_rate": 0.5,
        "efficiency": 7 / (3 * 4),
    }


def test_load_is_reported():
    sizes = GivenSizes(num_pages=48, gpu_memory_utilization=0.5)
    metrics, stats = make_metrics(given=sizes)
    stats.num_preemptions, stats.num_prefix_queries, stats.num_prefix_hits = 1, 9, 4
    load = Load(num_running=2, num_waiting=5, num_deferred=2, kv_usage=0.25)
    found = read(metrics, **vars(load) | {"sleep_level": 1})
    assert subset(found, "num_requests_") == {
        "running": 2,
        "waiting": 5,
        "waiting_by_reason capacity": 3,
        "waiting_by_reason deferred": 2,
    }
    assert (found["kv_cache_usage_perc"], found["num_preemptions"]) == (0.25, 1)
    assert subset(found, "prefix_cache_") == {"queries": 9, "hits": 4}
    states = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    assert subset(found, "engine_sleep_state ") == states
    (info,) = (one for one in metrics.read(load) if "vllm:cache_config" in one.name)
    assert info.labels == {
        "model_name": "target",
        "engine": "0",
        "block_size": "4",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.5",
        "is_attention_free": "False",
        "kv_cache_max_concurrency": str(48 * 4 / 96),
        "kv_cache_memory_bytes": "None",
        "kv_cache_size_tokens": str(48 * 4),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": "48",
        "num_gpu_blocks_override": "48",
        "sliding_window": "8",
    }


def test_cache_info_counts_blocks_of_the_pool_with_windows():
    """With five local layers per global one, tokens are not blocks times their size."""
    config = make_config(
        window=8, num_local=5, num_pages=100, given=GivenSizes(num_pages=100)
    )
    (info,) = (
        one
        for one in EngineMetrics(config, EngineStats()).read(Load())
        if one.name == "vllm:cache_config_info"
    )
    assert info.labels["num_gpu_blocks"] == info.labels["num_gpu_blocks_override"]
    # A sequence of 96 tokens has 24 global pages in 5 units, and local pages of its
    # window and of two launches with 3 drafts: (8 + 8) / 4 + 2.
    fitting = 100 * 96 // (5 + 6)
    assert info.labels["kv_cache_size_tokens"] == str(fitting)
    assert fitting > 100 * 4


def test_requests_that_wait_for_a_program_are_counted_separately(monkeypatch):
    engine, _ = make_fake_engine(max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, [2, 3], SamplingParams(max_tokens=3))
    assert (engine.load().num_waiting, engine.load().num_deferred) == (2, 0)
    engine.step()
    # The batch is full: the other requests are waiting for a row.
    assert (engine.load().num_waiting, engine.load().num_deferred) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.shapes, "with_prompts", lambda *_: [])
        assert (engine.load().num_waiting, engine.load().num_deferred) == (1, 1)
    run_all(engine)
    assert (engine.load().num_waiting, engine.load().num_deferred) == (0, 0)


def test_times_and_lengths_of_a_request():
    metrics, _ = make_metrics()
    request = make([2] * 10, max_tokens=7)
    stats, request.num_cached_tokens = request.stats, 4
    stats.queued_ts, stats.scheduled_ts = 100.0, 101.0
    stats.num_preemptions = 2
    for now, count in [(103.0, 1), (104.0, 2), (106.0, 2)]:
        metrics.add_tokens([request], now)
        stats.first_token_ts = stats.first_token_ts or now
        stats.last_token_ts = now
        stats.num_generation_tokens += count
        request.output_token_ids += [3] * count
    request.finish_reason = "length"
    metrics.add_finished(request)
    metrics.add_answered(1, 5)
    found = read(metrics)
    expected = {
        "time_to_first_token_seconds": 3.0,
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 3.0,
        "request_inference_time_seconds": 5.0,
        "request_time_per_output_token_seconds": 3 / 4,
        "request_prompt_tokens": 10,
        "request_prefill_kv_computed_tokens": 6,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 7,
        "request_params_n": 1,
        "request_num_preemptions": 2,
    }
    for name, value in expected.items():
        assert found[name] == (1, value), name
    assert found["inter_token_latency_seconds"] == (2, 3.0)
    assert (found["prompt_tokens"], found["prompt_tokens_cached"]) == (10, 4)
    assert found["request_success length"] == 1
    assert found["request_success stop"] == 0


def test_request_aborted_before_it_ran_is_counted_without_times():
    metrics, _ = make_metrics()
    request = make(max_tokens=None)
    request.finish_reason = "abort"
    metrics.add_finished(request)
    found = read(metrics)
    assert found["request_success abort"] == 1
    assert found["e2e_request_latency_seconds"] == (0, 0)
    assert found["request_params_max_tokens"] == (0, 0)


def test_buckets_include_their_bound():
    seen = Distribution((1, 2.5, 10))
    values = [0.5, 1, 2, 2.5, 3, 10, 11, 1000]
    for value in values:
        seen.add(value)
    made = seen.read("x", {"engine": "0"})
    assert made.buckets == {"1.0": 2, "2.5": 4, "10.0": 6, "+Inf": 8}
    assert (made.count, made.sum) == (8, sum(values))
    assert lengths_up_to(96) == (1, 2, 5, 10, 20, 50)
    assert lengths_up_to(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def test_round_and_host_times_are_measured_separately(monkeypatch: pytest.MonkeyPatch):
    engine, fake = make_fake_engine(num_draft_tokens=3)
    runner: Any = fake
    clock, launch, fetch = SimpleNamespace(now=50.0), runner.launch, runner.fetch
    engine_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("jaxspec.engine.llm_engine.time", engine_time)

    def slow_launch(*arguments: Any) -> Any:
        if not runner.num_compiles:
            # The function runs in another thread, so the engine does not wait for it.
            runner.compiler.num_made, runner.compiler.made_s = 1, 7.5
        clock.now += 0.002
        return launch(*arguments)

    def slow_fetch(*arguments: Any) -> Any:
        clock.now += 0.02
        return fetch(*arguments)

    runner.launch, runner.fetch = slow_launch, slow_fetch
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=9))
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
    found: dict[str, Any] = {one.name: one for one in engine.get_metrics()}
    host, rounds = (found[f"jaxspec:{one}_time_seconds"] for one in ("host", "round"))
    # The host prepares a round before it reads the result of the previous one.
    assert (rounds.buckets["0.015"], rounds.buckets["0.03"]) == (0, rounds.count)
    assert rounds.count == runner.num_launches > 2
    assert rounds.sum == pytest.approx(0.022 * rounds.count, abs=0.01)
    # Time spent waiting for the device is not host time.
    assert host.count == num_steps
    assert host.sum == pytest.approx(0.002 * runner.num_launches)
    assert host.sum == pytest.approx(engine.stats.host_s)
    assert found["jaxspec:num_compiles"].value == 1
    assert found["jaxspec:compile_seconds"].value == 7.5


def test_metric_uses_the_prediction_made_before_the_round_was_timed(monkeypatch):
    engine, runner = make_fake_engine(num_draft_tokens=3)
    metrics, rounds = engine.metrics, list[tuple[float | None, float]]()
    add_round = metrics.add_round

    def note(launch: Any, num_generated: int, took_s: float) -> None:
        rounds.append((launch.expected_s, took_s))
        add_round(launch, num_generated, took_s)

    record = engine.scheduler.record_time

    def record_time(launch: Any, result: Any, seconds: float) -> None:
        known = engine.step_times.seconds.get(launch.round_kind)
        record(launch, result, seconds)
        assert launch.expected_s == known

    monkeypatch.setattr(metrics, "add_round", note)
    monkeypatch.setattr(engine.scheduler, "record_time", record_time)
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=40))
    run_all(engine)
    both = [(one, took) for one, took in rounds if one is not None]
    assert len(rounds) == runner.num_launches > len(both) > 2
    found = subset(values(engine.get_metrics()), "jaxspec:round_time_")
    assert found["predicted_seconds"] == (len(both), sum(one for one, _ in both))
    error = sum(abs(took - one) for one, took in both)
    assert found["error_seconds"] == pytest.approx(error)


def test_choice_of_k_is_reported():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    policy, acceptance = engine.policy, engine.acceptance

    def choice_values() -> list[Any]:
        found = subset(values(engine.get_metrics()), "jaxspec:speculation_")
        names = "num_drafts gain failed saved_seconds lost_seconds probes stops"
        names += " given_up drafts_compared drafts_agreed"
        assert list(found) == names.split()
        return list(found.values())

    assert choice_values() == [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    policy.choice = Choice(num_draft_tokens=2, gain=0.41)
    policy.saved_s, policy.lost_s, policy.num_probes = 8.5, 1.25, 7
    policy._budgets[1].num_closed, engine.stats.num_given_up = 4, 6
    acceptance.num_compared, acceptance.num_agreed = 30, 20.5
    assert choice_values() == [2, 0.41, 0, 8.5, 1.25, 7, 4, 6, 30, 20.5]
    # Without drafts, the gain metric is 0, even if the previous K had a gain.
    policy.choice = Choice(num_draft_tokens=0, gain=0.41)
    assert choice_values()[:2] == [0, 0]


def test_choice_is_limited_by_the_number_of_requests():
    engine, _ = make_fake_engine(num_draft_tokens=3, disable_by_batch_size=2)
    engine.policy.choice = few = Choice(num_draft_tokens=3, gain=0.41, may_draft=True)
    many = Choice(num_draft_tokens=0, gain=0.0, may_draft=False)
    assert engine.choice == few
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=60))
    while len(engine.scheduler.running) < 3:
        engine.step()
    assert engine.choice == many
    engine.abort_request(["a", "b"])
    assert engine.choice == few
    engine.policy.stop("a test")
    assert engine.choice == many


def make_rates() -> AcceptanceRates:
    return AcceptanceRates(num_rows=1, max_draft_tokens=3)


def compare(acceptance: AcceptanceRates, count: int, *, share: float) -> None:
    """Record `count` first drafts, of which the given share is accepted."""
    accepted = (np.arange(count) < share * count).astype(np.int64)
    acceptance.record(np.zeros(count, np.int64), np.ones(count, np.int64), accepted)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def test_warns_of_low_acceptance_once(caplog: pytest.LogCaptureFixture):
    metrics, _ = make_metrics()
    acceptance = make_rates()

    def new_warnings(k: int = 1) -> list[str]:
        choice = Choice(num_draft_tokens=k)
        metrics.warn_of_low_acceptance(acceptance, lambda: choice)
        return warnings_of(caplog)

    compare(acceptance, 1999, share=0.1)
    assert not new_warnings()
    compare(acceptance, 4000, share=0.6)
    assert not new_warnings(), "0.43 of all"
    # Only the newest rate counts: good earlier rates do not prevent a warning.
    compare(acceptance, 1999, share=0.25)
    assert not new_warnings()
    acceptance.record_probabilities(0, np.full(1, 0.2))
    (warning,) = new_warnings()
    start = "agreed with 25% of the last 2000 draft tokens. K is 1 now. Possible causes"
    assert start in warning
    for cause in ("chat template", "another family", "fine-tune", "high temperature"):
        assert cause in warning
    compare(acceptance, 4000, share=0.1)
    assert new_warnings() == [warning]


def test_warns_of_low_acceptance_unless_it_is_synthetic(caplog):
    lookup = SpeculativeConfig(method="ngram", prompt_lookup_max=4, prompt_lookup_min=2)
    for changes in (
        {},
        {"speculative": lookup, "draft_model_config": None},
        {"forced_acceptance": 0.1},  # no warning
    ):
        metrics, _ = make_metrics(**changes)
        acceptance = make_rates()
        compare(acceptance, 2000, share=0.1)
        metrics.warn_of_low_acceptance(acceptance, Choice)
    model, ngram = warnings_of(caplog)
    text = "10% of the last 2000 draft tokens. K is 0 now: decoding continues without"
    assert text in model
    assert text in ngram
    assert "repetition" in ngram
    assert "chat template" not in ngram


@pytest.mark.parametrize("disable_log_stats", [False, True])
def test_engine_warns_of_low_acceptance(disable_log_stats, monkeypatch, caplog):
    monkeypatch.setattr("jaxspec.engine.metrics._COMPARED", 20)
    monkeypatch.setattr("jaxspec.engine.metrics._LOW_ACCEPTANCE", 1.0)
    engine, _ = make_fake_engine(disable_log_stats=disable_log_stats)
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=80))
    run_all(engine)
    (warning,) = warnings_of(caplog)
    assert "K is 3 now. Possible causes: a chat template" in warning


def test_launches_are_counted_by_their_drafts():
    engine, runner = make_fake_engine(num_draft_tokens=3, disable_by_batch_size=2)
    for name, count in [("a", 30), ("b", 5), ("c", 9)]:
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=count))
    run_all(engine)
    expected = dict.fromkeys("0123", 0)
    for plan, _ in runner.plans:
        most = max((drafts for _, drafts in plan.decode), default=0)
        expected[str(most)] += bool(plan.decode)
    assert expected["0"] > 0 < expected["3"]
    assert subset(values(engine.get_metrics()), f"{CHOSEN} ") == expected


def test_idle_engine_logs_at_debug_level(caplog: pytest.LogCaptureFixture):
    metrics, stats = make_metrics()
    caplog.set_level(logging.INFO, "jaxspec")
    metrics.log(Load())
    assert not caplog.messages
    metrics.log(Load(num_waiting=1))
    stats.num_generated_tokens += 3
    metrics.log(Load())
    assert [" 0.0 tokens/s, Running" in one for one in caplog.messages] == [True, False]
    metrics.log(Load())  # the request has ended, so its result is discarded
    metrics.log(Load())
    assert len(caplog.messages) == 3


def test_log_shows_changes_since_the_last_log(caplog: pytest.LogCaptureFixture):
    metrics, stats = make_metrics(num_draft_tokens=3)
    caplog.set_level(logging.INFO, "jaxspec")
    stats.num_prefix_queries, stats.num_prefix_hits = 8, 2
    add_rounds(stats, rounds=1, drafts=3, kept=[1, 1], tokens=3)
    metrics.log(Load(num_running=1, kv_usage=0.5))
    add_rounds(stats, rounds=2, drafts=6, kept=[2, 1, 1], tokens=6)
    metrics.log(Load())
    metrics.log(Load())
    first, drafts, second, more, third = caplog.messages
    assert "Running: 1 reqs, Waiting: 0 reqs, KV cache usage: 50.0%" in first
    assert first.endswith("Prefix cache hit rate: 25.0%")
    assert drafts.startswith("SpecDecoding metrics: Mean acceptance length: 3.00, ")
    assert "Accepted: 4 tokens, Drafted: 6 tokens" in more
    assert "Per-position acceptance rate: 1.000, 0.500, 0.500" in more
    assert more.endswith("Avg Draft acceptance rate: 66.7%")
    assert "Avg generation throughput: 0.0 tokens/s" in third
    assert second.startswith("Avg prompt throughput: ")


def test_leaves_are_counted_separately():
    """Acceptance by position excludes side leaves, so that it has vLLM's meaning."""
    name = "jaxspec:spec_decode_num_accepted_leaves"
    metrics, stats = make_metrics(speculative_keys={"num_side_leaves": 2})
    ones = np.ones(2, int)
    stats.record_round(3 * ones, np.array([1, 3]), np.array([3, 4]), np.array([1, 0]))
    # A sequence that had already ended on the device does not count.
    stats.record_round(3 * ones, 0 * ones, 0 * ones, ones)
    found = read(metrics)
    assert found[name] == 1
    assert found["spec_decode_num_accepted_tokens"] == 4
    assert found["spec_decode_num_emitted_tokens"] == 4 + 1 + 2
    assert found["spec_decode_num_accepted_tokens_per_pos"] == [2, 1, 1]
    has_leaves = "jaxspec:speculation_has_leaves"
    for has_side in (False, True):
        choice = Choice(num_draft_tokens=2, has_side_branches=has_side)
        assert read(metrics, choice=choice)[has_leaves] == has_side
    plain = read(make_metrics(num_draft_tokens=3)[0])
    assert not plain.keys() & {name, has_leaves}


def test_leaf_acceptance_is_reported_by_depth_and_rank():
    metrics, stats = make_metrics(
        num_draft_tokens=2, speculative_keys={"num_side_leaves": 1}
    )
    stats.record_ends(np.array([2, 2, 2, 1]), np.array([0, 1, 4, 3]))
    found = read(metrics)
    # Rows of the tree: (0,) (0, 0) (1,) (0, 1). Labels: depth, rank, after.
    for label, compared, accepted in (
        ("1 0 chain", 4, 2),
        ("1 1 chain", 4, 1),
        ("2 0 chain", 2, 0),
        ("2 1 chain", 2, 1),
    ):
        name = "jaxspec:spec_decode_num_{}_by_rank " + label
        assert found[name.format("compared")] == compared
        assert found[name.format("accepted")] == accepted
    assert len([name for name in found if "_by_rank" in name]) == 8
