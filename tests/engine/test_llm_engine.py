"""Stopping, texts, seeds and the order of launches, with a fake device in Python.

What the device itself decides (stop ids, lengths) is tested on the real program in
`tests/e2e/test_stopping.py`. A fake device is fast, so these tests cover every offset
and every division of a text into rounds; `make test` runs some of them.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import ADAPTIVE
from jaxspec.engine import llm_engine
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduling.programs import GREEDY
from jaxspec.engine.speculation.step_times import RoundKind
from jaxspec.errors import ConfigError, RequestError
from jaxspec.outputs import RequestOutput
from jaxspec.program.plan import Features, StepShape
from jaxspec.sampling_params import SamplingParams
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.engines import StubTokenizer
from tests.support.fake_engines import (
    EOS,
    PROMPT,
    TEXT,
    assert_idle,
    letters,
    make_fake_engine,
    run_all,
    run_one,
    said,
)

# Lengths of stop strings, and whether the text includes them.
QUICK = [(1, False), (4, True)]


def test_programs_are_timed_while_no_launch_is_in_flight(monkeypatch):
    """Otherwise calibration delays a launch in flight and measures its time too.

    K is chosen anew with every time that becomes known. Programs of draft prefill, the
    longest rounds, do not keep requests waiting.
    """
    engine, runner = make_fake_engine(
        num_draft_tokens=3, controller=ADAPTIVE, num_pages=200, max_model_len=512
    )
    timed: list[RoundKind] = []

    def time_round(round_kind: RoundKind, pages: Any, context: int) -> float:
        names = [name for name, _ in runner.events]
        assert names.count("launch") == names.count("fetch")
        timed.append(round_kind)
        return 0.01

    monkeypatch.setattr(runner, "time_round", time_round)
    reconsidered = list[int]()
    monkeypatch.setattr(
        engine.policy, "reconsider", lambda: reconsidered.append(len(timed))
    )
    shapes = [
        StepShape(num_seqs=n, num_levels=3, max_prompt_tokens=0, features=GREEDY)
        for n in (1, 2)
    ]
    draft_prefill = engine.scheduler.shapes.draft_prefills[0]
    runner.compiler.get(draft_prefill)
    engine.add_request("0", PROMPT, SamplingParams(temperature=0, max_tokens=60))
    said = list[int]()
    while engine.has_unfinished_requests():
        said += [len(one.outputs[0].token_ids) for one in engine.step()]
        if len(said) in (2, 12):
            runner.compiler.get(shapes[len(said) > 2])
    assert timed == [RoundKind(shape, k) for shape in shapes for k in (0, 1, 3)]
    assert engine.calibrator.timed == set(timed)
    assert reconsidered == list(range(1, len(timed) + 1))
    assert said[-1] == 60
    assert_idle(engine)
    engine.calibrator.run_all(engine.scheduler)
    assert timed[-1] == RoundKind(draft_prefill)


def test_programs_compiled_with_a_fixed_k_are_timed_before_k_is_chosen(monkeypatch):
    """Otherwise most times are unknown, and every round drafts the largest K."""
    engine, runner = make_fake_engine(
        num_draft_tokens=3, controller=ADAPTIVE, num_pages=200, max_model_len=512
    )
    timed = set[RoundKind]()
    monkeypatch.setattr(runner, "time_round", lambda kind, *_: timed.add(kind) or 0.01)
    shape = StepShape(num_seqs=1, num_levels=3, max_prompt_tokens=0, features=GREEDY)
    runner.compiler.get(shape)
    for number, is_adaptive in enumerate((False, True)):
        engine.policy.set_adaptive(is_adaptive)
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=9))
        while engine.has_unfinished_requests():
            engine.step()
        assert bool(timed) == is_adaptive
    assert timed >= {RoundKind(shape, k) for k in (0, 1, 3)}


def test_loss_budget_earns_while_the_device_works(monkeypatch):
    """Only time in which the device works pays for explorations, not idle time."""
    engine, _ = make_fake_engine(num_draft_tokens=3, controller=ADAPTIVE)
    policy, earned = engine.policy, list[float]()
    record = policy.record_time
    monkeypatch.setattr(
        policy, "record_time", lambda one: (earned.append(one), record(one))
    )
    begin = time.monotonic()
    run_one(engine, SamplingParams(temperature=0, max_tokens=40))
    assert 0 < sum(earned) < time.monotonic() - begin
    assert sum(earned) == pytest.approx(engine.stats.busy_s)


def some(values: Iterable[int], quick: set[int]) -> list[Any]:
    """Return parameters of which only some are quick tests."""
    return [
        pytest.param(one, marks=() if one in quick else pytest.mark.slow)
        for one in values
    ]


def expect(completion: Any, tokens: list[int], text: str, why: tuple) -> None:
    assert list(completion.token_ids) == tokens
    assert completion.text == text
    assert (completion.finish_reason, completion.stop_reason) == why


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
@pytest.mark.parametrize("offset", some(range(8), {0, 4, 7}))
def test_text_ends_at_every_offset_of_a_round(num_draft_tokens, offset):
    text = TEXT.copy()
    text[3 + offset] = EOS
    tokens = said(offset + 1, text)
    for seed in range(4):
        engine, _ = make_fake_engine(text, seed=seed, num_draft_tokens=num_draft_tokens)
        completion = run_one(engine, SamplingParams(max_tokens=20))
        expect(completion, tokens, letters(tokens[:-1]), ("stop", None))
        params = SamplingParams(max_tokens=20, include_stop_str_in_output=True)
        expect(run_one(engine, params), tokens, letters(tokens), ("stop", None))


@pytest.mark.parametrize("count", some(range(1, 13), {1, 2, 6, 12}))
def test_length_and_stop_token_end_text_at_every_offset(count):
    tokens = said(count)
    for seed in range(4):
        engine, _ = make_fake_engine(seed=seed, num_draft_tokens=5)
        completion = run_one(engine, SamplingParams(max_tokens=count))
        expect(completion, tokens, letters(tokens), ("length", None))
        for most in (20, count):
            stops = SamplingParams(max_tokens=most, stop_token_ids=[tokens[-1]])
            completion = run_one(engine, stops)
            expect(completion, tokens, letters(tokens[:-1]), ("stop", tokens[-1]))


def test_ignored_eos_can_be_a_stop_token():
    text = TEXT.copy()
    text[6] = EOS
    engine, _ = make_fake_engine(text)
    completion = run_one(engine, SamplingParams(max_tokens=6, ignore_eos=True))
    expect(completion, said(6, text), letters(said(6, text)), ("length", None))
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[EOS])
    tokens = said(4, text)
    expect(run_one(engine, params), tokens, letters(tokens[:-1]), ("stop", EOS))


@pytest.mark.parametrize(
    ("length", "include"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow)
        for one in itertools.product((1, 2, 4), (False, True))
    ],
)
def test_stop_strings_across_tokens_and_rounds(length, include):
    engines = [make_fake_engine(seed=seed, num_draft_tokens=5)[0] for seed in range(4)]
    for offset in range(6):
        tokens = said(offset + length)
        stop = letters(tokens[offset:])
        shown = letters(tokens if include else tokens[:offset])
        for most, engine in itertools.product((30, len(tokens)), engines):
            params = SamplingParams(
                max_tokens=most, stop=["zz", stop], include_stop_str_in_output=include
            )
            completion = run_one(engine, params)
            expect(completion, tokens, shown, ("stop", stop))


def test_first_of_stop_string_and_eos_in_a_round_wins():
    text = TEXT.copy()
    text[8] = EOS  # the sixth generated token is the stop token
    for seed in range(8):
        engine, _ = make_fake_engine(text, seed=seed, num_draft_tokens=8)
        before = letters(said(5, text)[3:])
        completion = run_one(engine, SamplingParams(max_tokens=20, stop=before))
        expect(completion, said(5, text), letters(said(3)), ("stop", before))
        after = letters(said(8, text)[4:])
        completion = run_one(engine, SamplingParams(max_tokens=20, stop=after))
        expect(completion, said(6, text), letters(said(5)), ("stop", None))


def test_counts_in_the_metrics_match_the_tokens():
    engine, runner = make_fake_engine(num_draft_tokens=3)
    stop = letters(said(7)[5:])
    engine.add_request("only", PROMPT, SamplingParams(max_tokens=30, stop=stop))
    (output,) = run_all(engine)["only"][-1:]
    metrics, completion = output.metrics, output.outputs[0]
    assert metrics is not None
    assert metrics.num_generation_tokens == len(completion.token_ids) == 7
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts
    assert output.prompt_token_ids == PROMPT
    assert completion.spec_decode_metrics is not None
    assert completion.spec_decode_metrics.num_draft_tokens > 0
    assert engine.stats.num_rounds == runner.num_launches


def test_acceptance_equals_the_devices_results():
    engine, runner = make_fake_engine(num_draft_tokens=5, max_num_seqs=3)
    for number in range(6):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=30))
    outputs = run_all(engine)
    stats, device = engine.stats, runner.device
    assert stats.num_accepted_tokens == device.num_accepted
    assert stats.num_draft_tokens == device.num_proposed
    found = [o[-1].outputs[0].spec_decode_metrics for o in outputs.values()]
    parts = [part for part in found if part is not None]
    assert len(parts) == 6
    assert sum(part.num_accepted_draft_tokens for part in parts) == device.num_accepted
    assert sum(part.num_draft_tokens for part in parts) == device.num_proposed
    assert stats.num_generated_tokens == 6 * 30


def test_the_next_round_is_launched_before_the_last_is_read():
    engine, runner = make_fake_engine(num_draft_tokens=0)
    run_one(engine, SamplingParams(max_tokens=6))
    events = [("launch", 0)]
    for number in range(1, 6):
        events += [("launch", number), ("fetch", number - 1)]
    assert runner.events == [*events, ("fetch", 5)]


def test_a_step_reads_at_most_one_round():
    engine, runner = make_fake_engine(num_draft_tokens=3)
    for number in range(5):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=9))
    while engine.has_unfinished_requests():
        before = len(runner.events)
        engine.step()
        kinds = [kind for kind, _ in runner.events[before:]]
        assert kinds in (["launch"], ["launch", "fetch"], ["fetch"])


@pytest.mark.parametrize("when", range(12))
def test_aborted_requests_leave_nothing_behind(when):
    engine, _ = make_fake_engine(num_draft_tokens=3, max_num_seqs=2)
    for number in range(4):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=12))
    outputs: list[RequestOutput] = []
    for _ in range(when):
        outputs += engine.step()
    gone = {output.request_id for output in outputs if output.finished}
    engine.abort_request(["0", "3", "unknown"])
    rest = run_all(engine)
    assert not rest.keys() & {"0", "3"}
    assert rest.keys() >= {"1", "2"} - gone
    for name in {"1", "2"} - gone:
        expect(rest[name][-1].outputs[0], said(12), letters(said(12)), ("length", None))
    assert_idle(engine)
    assert engine.get_num_unfinished_requests() == 0
    completion = run_one(engine, SamplingParams(max_tokens=5))
    expect(completion, said(5), letters(said(5)), ("length", None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, PROMPT, SamplingParams()), "request_id must be a string, got int"),
        (
            ("a", {"prompt": "a", "cache_salt": "\ud800"}, SamplingParams()),
            "cache_salt.* must be text that UTF-8 can encode",
        ),
        (("a", PROMPT, {"n": 1}), "params must be SamplingParams, got dict"),
        (("a", [], SamplingParams()), "prompt"),
        (("a", [1] * 96, SamplingParams()), "96 tokens, but must have 1 to 95"),
        (("a", PROMPT, SamplingParams(stop_token_ids=[16])), "stop_token_ids"),
    ],
)
def test_bad_request_is_rejected_before_any_launch(arguments, message):
    engine, runner = make_fake_engine(num_draft_tokens=3)
    with pytest.raises(RequestError, match=message):
        engine.add_request(*arguments)
    assert not engine.has_unfinished_requests()
    assert runner.num_launches == 0


def test_shutdown_reads_launches_in_flight():
    engine, runner = make_fake_engine()
    for number in range(3):
        engine.add_request(str(number), PROMPT, SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.shutdown()
    assert not engine.has_unfinished_requests()
    kinds = [kind for kind, _ in runner.events]
    assert kinds.count("launch") == kinds.count("fetch")
    assert_idle(engine)
    assert kinds[-2:] == ["drop_pages", "drop_weights"]
    with pytest.raises(RequestError, match="is asleep"):
        engine.add_request("late", PROMPT, SamplingParams())


def test_launches_of_aborted_requests_do_not_prevent_sleep():
    engine, runner = make_fake_engine(num_draft_tokens=2)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=9))
    for _ in range(3):
        engine.step()
    slept = []
    engine._sleep.begin = slept.append  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RequestError, match="1 requests are running"):
        engine.sleep()
    engine.abort_request("a")
    engine.sleep()
    assert slept == [1]
    assert not engine.has_unfinished_requests()
    kinds = [kind for kind, _ in runner.events]
    assert kinds.count("launch") == kinds.count("fetch")


def test_served_model_properties():
    engine, _ = make_fake_engine()
    served = engine.model_config
    assert (served.max_model_len, served.dtype) == (96, "float32")
    assert (served.model, served.tokenizer, served.seed) == ("target", "stub", 0)
    assert served.get_vocab_size() == 16
    assert (served.get_hidden_size(), served.get_head_size()) == (16, 8)
    assert served.get_sliding_window() == 8


class OtherTokenizer(StubTokenizer):
    """A tokenizer with other pieces than the engine's."""

    @property
    def digest(self) -> bytes | None:
        return None

    def id_to_piece(self, token_id: int) -> str:
        return f"piece {token_id}"


def test_tokenizer_can_be_replaced_if_pieces_are_equal():
    folder = bundled_target()
    first, second = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder)
    engine, _ = make_fake_engine()
    engine.tokenizer = first
    engine.set_tokenizer(second)
    assert engine.tokenizer is engine.output_processor.tokenizer is second
    params = SamplingParams(max_tokens=3)
    text = run_one(engine, params).text
    engine.add_request("waits", PROMPT, params)
    with pytest.raises(RequestError, match="while requests are running"):
        engine.set_tokenizer(first)
    run_all(engine)
    for wrong in (OtherTokenizer(16), "folder"):
        with pytest.raises(ConfigError, match="tokenizer must"):
            engine.set_tokenizer(wrong)  # pyright: ignore[reportArgumentType]
    assert engine.tokenizer is second
    assert text == second.decode(said(3))


def test_rejects_unsupported_options():
    engine, _ = make_fake_engine()
    options: dict[str, Any] = {
        "lora_request": "adapter",
        "tokenization_kwargs": {"truncate_prompt_tokens": 3},
        "trace_headers": {"traceparent": "00-1-2-00"},
    }
    for name, value in options.items():
        with pytest.raises(NotImplementedError, match=name):
            engine.add_request("0", PROMPT, SamplingParams(), **{name: value})
        assert not engine.has_unfinished_requests()
    nothing: dict[str, Any] = dict.fromkeys(options)
    engine.add_request("0", PROMPT, SamplingParams(max_tokens=1), **nothing)
    run_all(engine)


def test_busy_engine_logs_periodically_unless_metrics_are_disabled(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "jaxspec")
    engine, _ = make_fake_engine()
    run_one(engine, SamplingParams(max_tokens=3))
    assert not caplog.messages
    monkeypatch.setattr(llm_engine, "LOG_INTERVAL_S", 0.0)
    run_one(engine, SamplingParams(max_tokens=3))
    assert caplog.messages[0].startswith("Avg prompt throughput: ")
    caplog.clear()
    engine, _ = make_fake_engine(disable_log_stats=True)
    run_one(engine, SamplingParams(max_tokens=3))
    with pytest.raises(ConfigError, match=r"Stat logging is disabled: .*=False"):
        engine.get_metrics()
    engine.do_log_stats()
    assert not caplog.messages


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


def test_warm_up_compiles_every_program_once():
    engine, runner = make_fake_engine(num_draft_tokens=2)
    asked = []
    runner.executable = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    engine.warm_up()
    assert set(asked) == set(engine.scheduler.shapes.all(with_on_demand=True))
    assert len(set(asked)) == len(asked)


def test_warm_up_compiles_programs_of_special_requests():
    engine, runner = make_fake_engine(num_draft_tokens=2)
    asked = []
    runner.executable = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    special = SamplingParams(presence_penalty=1.0, max_tokens=3)
    with pytest.raises(RequestError, match="max_logprobs"):
        engine.warm_up(10, [SamplingParams(logprobs=1000)])
    engine.warm_up(10, [special])
    most = engine.config.num_logprobs
    plain = {Features(), Features(all_greedy=True)}
    # Requests with controls and with logprobs share programs.
    form = Features(has_controls=True, num_logprobs=most)
    assert {shape.features for shape in asked} == {*plain, form}
    assert len(set(asked)) == len(asked)
    # Short prompts that arrive together need a program with a large chunk.
    for number in range(7):
        params = special if number == 3 else SamplingParams(max_tokens=3)
        engine.add_request(str(number), [2] * 9, params)
    run_all(engine)
    assert {shape for _, shape in runner.plans} <= set(asked)
    assert form in {shape.features for _, shape in runner.plans}
    asked.clear()
    engine.warm_up(10, [SamplingParams(logprobs=1, prompt_logprobs=0)])
    decoding = dataclasses.replace(form, num_prompt_logprobs=most)
    assert {shape.features for shape in asked} == {*plain, form, decoding}


def test_compiled_programs_are_announced():
    engine, runner = make_fake_engine()
    announced: list[str] = []
    engine.announce_compiles(announced.append)
    (shape, *_) = engine.scheduler.shapes.all()
    runner.compiler.get(shape)
    assert announced == [f"Compiling {shape.name}", ""]


def test_lower_priorities_run_first():
    engine, _ = make_fake_engine(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(max_tokens=3)
    for name, priority in [("late", 5), ("first", -1), ("second", 0)]:
        engine.add_request(name, PROMPT, params, priority=priority)
    assert list(run_all(engine)) == ["first", "second", "late"]
