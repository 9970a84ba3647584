"""What comes in is a whole request or an error, before anything else happens."""

from typing import Any

import pytest

from jaxspec.engine.intake import Intake, check_supported
from jaxspec.engine.request import Request
from jaxspec.errors import ConfigError, RequestError, UnsupportedError
from jaxspec.program.plan import COUPLED, STANDARD, Features, TokenControls
from jaxspec.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.engines import StubTokenizer
from tests.loops import make_config

EOS = 1


def make(prompt: Any = (2, 3, 4), *, config: dict[str, Any] | None = None, **fields):
    """A request, its parameters given by name."""
    made = make_config(**(config or {}))
    intake = Intake(made, StubTokenizer(made.model_config.vocab_size))
    return intake.prepare("0", list(prompt), SamplingParams(**fields)).requests[0]


def test_what_is_asked_arrives():
    request = make(max_tokens=5, stop_token_ids=[7], seed=2**32 + 3)
    assert request.prompt_token_ids == [2, 3, 4]
    assert request.max_total == 8
    assert request.stop_ids == (EOS, 7)
    assert (request.seed, request.rule) == ((1, 3), COUPLED)
    assert request.controls is None
    assert request.features == Features()
    assert request.can_read_prefix_cache
    assert make(max_tokens=None).max_total == 96
    assert make(stop_token_ids=[7], ignore_eos=True).stop_ids == (7,)


def test_requests_without_a_seed_get_their_own():
    def seeds(engine_seed: int) -> list[tuple[int, int]]:
        config = make_config(seed=engine_seed)
        intake = Intake(config, StubTokenizer(config.model_config.vocab_size))
        prepared = [intake.prepare(str(i), [2], SamplingParams()) for i in range(3)]
        requests = [one.requests[0] for one in prepared]
        assert {request.rule for request in requests} == {STANDARD}
        return [request.seed for request in requests]

    assert len({*seeds(0), *seeds(1)}) == 6
    assert seeds(0) == seeds(0)


@pytest.mark.parametrize(("asked", "drafts"), [(None, 3), (0, 0), (2, 2)])
def test_drafts_of_one_request(asked: int | None, drafts: int):
    extra = None if asked is None else {"num_speculative_tokens": asked}
    request = make(extra_args=extra)
    assert request.num_draft_tokens == drafts
    assert (request.spec_metrics is None) == (drafts == 0)
    with pytest.raises(RequestError, match="from 0 to 3, got 4"):
        make(extra_args={"num_speculative_tokens": 4})


def test_controls_name_their_feature():
    request = make(presence_penalty=0.5)
    assert request.controls == TokenControls(presence_penalty=0.5)
    assert request.features == Features(has_controls=True)


def test_logprobs_come_in_one_size():
    # Of at most 20, and of a vocabulary of sixteen.
    for asked in (0, 3, 16, -1):
        assert make(logprobs=asked).features == Features(num_logprobs=16)
    config = {"max_logprobs": 5}
    request = make(prompt_logprobs=1, config=config)
    assert request.features == Features(num_prompt_logprobs=5)
    assert not request.can_read_prefix_cache
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name} must be at most 5, got 6"):
            make(config=config, **{name: 6})


def test_the_prefix_cache_can_be_left_alone():
    assert not make(skip_reading_prefix_cache=True).can_read_prefix_cache
    config = make_config()
    intake = Intake(config, StubTokenizer(config.model_config.vocab_size))
    prompt = {"prompt_token_ids": [2], "cache_salt": "mine"}
    (request,) = intake.prepare("0", prompt, SamplingParams()).requests
    assert request.cache_salt == "mine"
    with pytest.raises(RequestError, match="cache_salt.* must be a non-empty string"):
        intake.prepare("0", prompt | {"cache_salt": ""}, SamplingParams())


def test_priorities_need_their_policy():
    def ask(policy: str, priority: Any) -> Request:
        config = make_config(scheduling_policy=policy)
        intake = Intake(config, StubTokenizer(config.model_config.vocab_size))
        prepared = intake.prepare("0", [2], SamplingParams(), priority=priority)
        return prepared.requests[0]

    assert ask("priority", -5).priority == -5
    assert ask("fcfs", 0).priority == 0
    with pytest.raises(RequestError, match="scheduling_policy='priority'"):
        ask("fcfs", 1)
    with pytest.raises(RequestError, match="priority must be an integer"):
        ask("priority", 0.5)


def test_a_prompt_for_several_texts_is_encoded_once(monkeypatch):
    config, encoded = make_config(), []
    tokenizer = StubTokenizer(config.model_config.vocab_size)
    encode = tokenizer.encode

    def count(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", count)
    prepared = Intake(config, tokenizer).prepare("0", "abc", SamplingParams(n=3))
    assert encoded == ["abc"]
    assert [one.request_id for one in prepared.requests] == ["0_0", "1_0", "2_0"]
    prompts = [one.prompt_token_ids for one in prepared.requests]
    assert prompts == [prompts[0]] * 3


def test_parameters_are_checked_again_and_copied():
    given = SamplingParams(stop_token_ids=[5])
    config = make_config()
    intake = Intake(config, StubTokenizer(config.model_config.vocab_size))
    request = intake.prepare("0", [2], given).requests[0]
    assert request.params is not given
    given.top_p = 3.0
    with pytest.raises(RequestError, match="top_p"):
        intake.prepare("0", [2], given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("watermarking", {"key": 1}),
        ("prompt_logprob_token_ids", [3]),
        ("prompt_logprob_start", 1),
        ("logprob_token_ids", [3]),
        ("stream_interval", 4),
        ("thinking_token_budget", 4),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("routed_experts_prompt_start", 1),
        ("trace_decode_token_ids", [3]),
    ],
)
def test_what_the_engine_does_not_do_is_refused(name: str, value: Any):
    with pytest.raises(UnsupportedError) as caught:
        make(**{name: value})
    assert f"{name}={value!r} is not supported: " in str(caught.value)
    assert (caught.value.parameter, caught.value.value) == (name, value)


def test_a_form_names_its_feature_and_outranks_min_tokens():
    form = StructuredOutputsParams(regex="[A-F]+")
    request = make(structured_outputs=form, min_tokens=4, stop_token_ids=[7])
    assert request.features == Features(has_grammar=True)
    reading = request.reading
    assert reading is not None
    assert (reading.num_prompt, reading.min_tokens) == (3, 4)
    assert reading.stop_ids == (EOS, 7)
    # The device knows of no least length, and stop strings do.
    assert (request.min_total, request.params.min_tokens) == (3, 4)
    assert make(min_tokens=4).min_total == 3 + 4


@pytest.mark.parametrize("wrong", [{"regex": "(a"}, {"json": {"type": "strin"}}])
def test_a_wrong_form_is_refused(wrong: dict[str, Any]):
    with pytest.raises(RequestError, match="structured_outputs.* cannot be used"):
        make(structured_outputs=StructuredOutputsParams(**wrong))


def test_what_the_engine_does_is_not_refused():
    check_supported(SamplingParams())
    check_supported(SamplingParams(temperature=0, bad_words=[]))
    check_supported(
        SamplingParams(
            n=3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            seed=3,
            stop=["a"],
            stop_token_ids=[5],
            ignore_eos=True,
            max_tokens=None,
            min_tokens=3,
            logprobs=2,
            prompt_logprobs=0,
            flat_logprobs=True,
            logit_bias={3: 1.0},
            allowed_token_ids=[3],
            bad_words=["no"],
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"num_speculative_tokens": 2},
        )
    )


def test_a_model_with_more_ends_than_there_is_room_for(monkeypatch):
    config = make_config()
    ends = StubTokenizer(config.model_config.vocab_size)
    monkeypatch.setattr(type(ends), "turn_end_ids", tuple(range(2, 11)))
    with pytest.raises(ConfigError, match="ends texts with 10 token ids.*room for 8"):
        Intake(config, ends)


def test_texts_of_one_request_are_counted_before_any_is_made():
    with pytest.raises(RequestError, match="n must be .*16384, got 1000000000"):
        make(n=10**9)
