"""Further methods of `LLMEngine`, with a fake device."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec.engine.llm_engine
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.program_cache import Built
from jaxspec.engine.runner import Runner
from jaxspec.errors import ConfigError, RequestError
from jaxspec.metrics import Counter, Gauge
from jaxspec.program.plan import TokenControls
from jaxspec.sampling_params import SamplingParams
from tests.support.fake_engines import PROMPT, make_fake_engine, run_all, run_one
from tests.support.tiny_programs import as_state


def metrics_of(engine: Any) -> dict[str, float]:
    return {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if isinstance(metric, Counter | Gauge)
        and "finished_reason" not in metric.labels
    }


@pytest.mark.parametrize(
    "option",
    [
        {"lora_request": "adapter"},
        {"tokenization_kwargs": {"truncate_prompt_tokens": 3}},
        {"trace_headers": {"traceparent": "00-1-2-00"}},
    ],
)
def test_rejects_unsupported_options(option: dict[str, Any]):
    engine, _ = make_fake_engine()
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        engine.add_request("0", PROMPT, SamplingParams(), **option)
    assert not engine.has_unfinished_requests()
    nothing: dict[str, Any] = dict.fromkeys(option)
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=1), **nothing)
    run_all(engine)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"n": 0}, "at least 1"),
        ({"temperature": 0, "n": 2}, "1 at temperature 0"),
        ({"logprobs": 21}, "at most 20"),
    ],
)
def test_several_texts_are_checked_as_one_request(
    changes: dict[str, Any], allowed: str
):
    engine, _ = make_fake_engine()
    params = SamplingParams(n=2)
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises(RequestError, match=allowed):
        engine.add_request("0", PROMPT, params)
    assert not engine.has_unfinished_requests()


def test_callers_params_are_not_changed():
    engine, _ = make_fake_engine()
    params = SamplingParams(n=2, max_tokens=2)
    params.top_k = -1
    engine.add_request("0", PROMPT, params)
    run_all(engine)
    assert (params.n, params.top_k) == (2, -1)


def test_controls_are_sent_to_the_device():
    engine, runner = make_fake_engine()
    params = SamplingParams(max_tokens=2, presence_penalty=0.5, logit_bias={3: 1})
    run_one(engine, params)
    expected = TokenControls(presence_penalty=0.5, bias=((3, 1.0),))
    admitted = [one for plan, _ in runner.plans for one in plan.admissions]
    assert [one.controls for one in admitted] == [expected]
    features = [shape.features for _, shape in runner.plans]
    assert features[0].has_controls


def test_lower_priorities_run_first():
    engine, _ = make_fake_engine(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(max_tokens=3)
    for name, priority in [("late", 5), ("first", -1), ("second", 0)]:
        engine.add_request(name, PROMPT, params, priority=priority)
    assert list(run_all(engine)) == ["first", "second", "late"]


def test_metrics_count_requests_tokens_and_drafts():
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=9))
    engine.step()
    assert metrics_of(engine)["vllm:num_requests_running"] == 1
    assert metrics_of(engine)["vllm:kv_cache_usage_perc"] > 0
    run_all(engine)
    found = metrics_of(engine)
    assert found["vllm:num_requests_running"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:prompt_tokens"] == len(PROMPT)
    assert found["vllm:generation_tokens"] == found["jaxspec:generation_tokens"] == 9
    assert found["vllm:spec_decode_num_drafts"] == engine.stats.num_draft_rounds > 0


def test_metrics_can_be_disabled(caplog: pytest.LogCaptureFixture):
    engine, _ = make_fake_engine(disable_log_stats=True)
    caplog.set_level(logging.INFO, "jaxspec")
    run_one(engine, SamplingParams(max_tokens=3))
    with pytest.raises(ConfigError, match=r"Stat logging is disabled: .*=False"):
        engine.get_metrics()
    engine.do_log_stats()
    assert not caplog.messages


def test_busy_engine_logs_periodically(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    engine, _ = make_fake_engine()
    caplog.set_level(logging.INFO, "jaxspec")
    run_one(engine, SamplingParams(max_tokens=3))
    assert not caplog.messages
    monkeypatch.setattr(jaxspec.engine.llm_engine, "LOG_INTERVAL_S", 0.0)
    run_one(engine, SamplingParams(max_tokens=3))
    assert caplog.messages[0].startswith("Avg prompt throughput: ")


def test_listeners_are_called_for_compiled_programs():
    engine, fake = make_fake_engine()
    runner: Any = object.__new__(Runner)
    runner.compiler = Compiler(runner._make)
    runner.program = ()
    runner._arrays = SimpleNamespace(params=({}, ()), state=as_state(()))
    runner.pool = fake.device.pool
    runner.compiler_options = runner.memory = runner.followers = None

    class Cache:
        def build(self, *_: Any) -> Any:
            time.sleep(0.01)
            return Built(
                executable=print, was_loaded=False, lower_s=0.0, compile_s=0.01
            )

    runner.cache = Cache()
    engine.runner, announced = runner, []
    engine.announce_compiles(announced.append)
    (shape, *_) = engine.scheduler.shapes.all()
    for _ in range(2):
        assert runner.executable(shape) is print
    assert announced == [f"Compiling {shape.name}", ""]
    assert runner.num_compiles == 1
    assert runner.compile_s >= 0.01
    engine.announce_compiles(None)


@pytest.mark.slow
def test_a_profile_is_written(tmp_path: Path):
    runner = object.__new__(Runner)
    runner.start_profile(str(tmp_path))
    jax.block_until_ready(jnp.arange(4) + 1)
    runner.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_prompt_continues_when_no_stream_gets_a_page():
    """Stream B has no page left for its drafts, because A's prompt holds the others."""
    engine, runner = make_fake_engine(
        list(range(2, 16)),
        num_pages=27,
        num_draft_tokens=8,
        max_num_batched_tokens=64,
        scheduling_policy="priority",
    )
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 16, count).tolist() for count in (67, 33)]
    engine.add_request("B", prompts[0], SamplingParams(max_tokens=29), priority=1)
    engine.step()
    engine.add_request("A", prompts[1], SamplingParams(max_tokens=20), priority=0)
    for _ in range(300):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert engine.stats.num_preemptions


def test_running_requests_continue_after_cache_reset():
    found: list[dict[str, str]] = []
    for resets in ((), (1, 2, 5)):
        engine, _ = make_fake_engine(num_draft_tokens=3)
        for name in "ab":
            engine.add_request(name, PROMPT, SamplingParams(max_tokens=40))
        texts: dict[str, str] = {}
        step = 0
        while engine.has_unfinished_requests():
            texts |= {one.request_id: one.outputs[0].text for one in engine.step()}
            if step in resets:
                assert not engine.reset_prefix_cache()
                assert engine.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                )
            step += 1
        assert engine.stats.num_preemptions == 2 * len(resets)
        found.append(texts)
    assert found[0] == found[1]
    assert found[0].keys() == {"a", "b"}


def test_id_of_a_finished_text_can_be_reused():
    engine, _ = make_fake_engine(num_draft_tokens=0)
    stops = SamplingParams(n=2, max_tokens=30, seed=3)
    engine.add_request("x", PROMPT, stops)
    engine.step()
    # Text 0 has already ended, for example by a stop string.
    stream = engine.output_processor.streams["0_x"]
    engine.scheduler.finish(stream.request, "stop", None)
    engine.output_processor.close(stream.request)
    engine.add_request("0_x", PROMPT, SamplingParams(max_tokens=4))
    engine.abort_request("x")
    assert list(run_all(engine)) == ["0_x"]


def test_limits_beyond_32_bits_act_like_no_limit():
    engine, _ = make_fake_engine()
    engine.add_request("other", PROMPT, SamplingParams(max_tokens=20))
    engine.step()
    huge = SamplingParams(
        top_k=2**40, min_tokens=2**40, max_tokens=None, temperature=0.5
    )
    engine.add_request("huge", PROMPT, huge)
    ended = {name: one[-1].outputs[0] for name, one in run_all(engine).items()}
    assert {one.finish_reason for one in ended.values()} == {"length"}
    count = engine.config.max_model_len - len(PROMPT)
    assert len(ended["huge"].token_ids) == count


@pytest.mark.parametrize("wrong", [0, -5, "9"])
def test_rejects_warm_up_for_empty_prompts(wrong: Any):
    engine, runner = make_fake_engine()
    with pytest.raises(RequestError, match="prompt_tokens"):
        engine.warm_up(wrong)
    assert not runner.num_compiles


def test_levels_and_parts_of_a_sleep_are_checked_first():
    engine, runner = make_fake_engine()
    run_one(engine, SamplingParams(max_tokens=9))
    with pytest.raises(RequestError, match="level"):
        engine.sleep(0)
    # The rejected calls changed nothing: the prompt's pages are still prefix hits.
    engine.add_request("again", PROMPT * 4, SamplingParams(max_tokens=9))
    run_all(engine)
    wrong: Any = "weights"
    with pytest.raises(RequestError, match="tags must be a list.*'weights'"):
        engine.wake_up(wrong)
