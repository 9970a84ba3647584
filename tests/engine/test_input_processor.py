"""Input becomes a complete request, or an error before it has any effect."""

import dataclasses
from typing import Any

import pytest

import jaxspec_checkpoints
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.engine.input_processor import (
    InputProcessor,
    check_supported,
    make_controls,
)
from jaxspec.engine.scheduling.request import Request
from jaxspec.errors import ConfigError, RequestError, UnsupportedError
from jaxspec.program.plan import (
    BLOCK,
    COUPLED,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS,
    STANDARD,
    Features,
    TokenControls,
)
from jaxspec.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxspec.text.tokenizer import Tokenizer
from tests.support.engines import StubTokenizer
from tests.support.loops import make_config
from tests.support.requests import make

EOS = 1
TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


def test_parameters_are_in_the_request():
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


def test_unseeded_requests_get_different_seeds():
    def seeds(engine_seed: int) -> list[tuple[int, int]]:
        config = make_config(seed=engine_seed)
        intake = InputProcessor(config, StubTokenizer(config.model_config.vocab_size))
        prepared = [intake.prepare(str(i), [2], SamplingParams()) for i in range(3)]
        requests = [one.requests[0] for one in prepared]
        assert {request.rule for request in requests} == {BLOCK}
        return [request.seed for request in requests]

    assert len({*seeds(0), *seeds(1)}) == 6
    assert seeds(0) == seeds(0)


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        (None, BLOCK),
        ("block", BLOCK),
        ("standard", STANDARD),
        ("coupled", COUPLED),
    ],
)
def test_unseeded_requests_use_the_configured_rule(named, rule):
    speculative = make_config().speculative
    assert speculative is not None
    if named is not None:
        speculative = dataclasses.replace(speculative, rejection_sample_method=named)
    config = {"speculative": speculative}
    assert make(config=config).rule == rule
    assert make(config=config, seed=1).rule == COUPLED
    assert make(config={"num_draft_tokens": 0}).rule == STANDARD


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


def test_logprobs_have_one_compiled_size():
    # At most 20 logprobs can be requested, but the vocabulary has 16 tokens.
    for asked in (0, 3, 16, -1):
        assert make(logprobs=asked).features == Features(num_logprobs=16)
    config = {"max_logprobs": 5}
    request = make(prompt_logprobs=1, config=config)
    assert request.features == Features(num_prompt_logprobs=5)
    assert not request.can_read_prefix_cache
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name} must be at most 5, got 6"):
            make(config=config, **{name: 6})


def test_chosen_ids_need_logprobs_and_controls():
    # `max_logprobs` does not limit the chosen ids.
    request = make(logprob_token_ids=[3, 9, 3], config={"max_logprobs": 2})
    assert request.features == Features(has_controls=True, num_logprobs=2)
    assert request.controls == TokenControls(logprob_token_ids=(3, 9, 3))
    assert make(logprob_token_ids=[]).features == Features()


def test_prefix_cache_can_be_skipped():
    assert not make(skip_reading_prefix_cache=True).can_read_prefix_cache
    config = make_config()
    intake = InputProcessor(config, StubTokenizer(config.model_config.vocab_size))
    prompt = {"prompt_token_ids": [2], "cache_salt": "mine"}
    (request,) = intake.prepare("0", prompt, SamplingParams()).requests
    assert request.cache_salt == "mine"
    with pytest.raises(RequestError, match="cache_salt.* must be a non-empty string"):
        intake.prepare("0", prompt | {"cache_salt": ""}, SamplingParams())


def test_priorities_are_checked_under_every_policy():
    def ask(policy: str, priority: Any) -> Request:
        config = make_config(scheduling_policy=policy)
        intake = InputProcessor(config, StubTokenizer(config.model_config.vocab_size))
        prepared = intake.prepare("0", [2], SamplingParams(), priority=priority)
        return prepared.requests[0]

    assert ask("priority", -5).priority == -5
    assert ask("fcfs", 5).priority == 5
    for policy in ("priority", "fcfs"):
        with pytest.raises(RequestError, match="priority must be an integer"):
            ask(policy, 0.5)


def test_a_prompt_for_several_texts_is_encoded_once(monkeypatch):
    config, encoded = make_config(), []
    tokenizer = StubTokenizer(config.model_config.vocab_size)
    encode = tokenizer.encode

    def count(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", count)
    prepared = InputProcessor(config, tokenizer).prepare(
        "0", "abc", SamplingParams(n=3)
    )
    assert encoded == ["abc"]
    assert [one.request_id for one in prepared.requests] == ["0_0", "1_0", "2_0"]
    prompts = [one.prompt_token_ids for one in prepared.requests]
    assert prompts == [prompts[0]] * 3


def test_parameters_are_checked_again_and_copied():
    given = SamplingParams(stop_token_ids=[5])
    config = make_config()
    intake = InputProcessor(config, StubTokenizer(config.model_config.vocab_size))
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
        ("stream_interval", 4),
        ("thinking_token_budget", 4),
        ("repetition_detection", {"max_pattern_size": 2}),
        ("routed_experts_prompt_start", 1),
        ("trace_decode_token_ids", [3]),
    ],
)
def test_rejects_unsupported_fields(name: str, value: Any):
    with pytest.raises(UnsupportedError) as caught:
        make(**{name: value})
    assert f"{name}={value!r} is not supported: " in str(caught.value)
    assert (caught.value.parameter, caught.value.value) == (name, value)


def test_structured_output_has_its_feature_and_masks_min_tokens():
    form = StructuredOutputsParams(regex="[0-9]+")
    request = make(structured_outputs=form, min_tokens=4, stop_token_ids=[7])
    assert request.features == Features(has_grammar=True)
    state = request.grammar
    assert state is not None
    assert (state.num_prompt, state.min_tokens) == (3, 4)
    assert state.stop_ids == (EOS, 7)
    # With a grammar, the masks enforce the minimum length, so the device has none; stop
    # strings still use it.
    assert (request.min_total, request.params.min_tokens) == (3, 4)
    assert make(min_tokens=4).min_total == 3 + 4


@pytest.mark.parametrize("wrong", [{"regex": "(a"}, {"json": {"type": "strin"}}])
def test_rejects_bad_structured_output(wrong: dict[str, Any]):
    with pytest.raises(RequestError, match="structured_outputs.* cannot be used"):
        make(structured_outputs=StructuredOutputsParams(**wrong))


def test_engine_defaults_of_structured_outputs():
    wrong = StructuredOutputsConfig(whitespace_pattern="(")
    with pytest.raises(ConfigError, match="not a regular expression"):
        make(config={"structured_outputs": wrong})


def test_accepts_supported_fields():
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


def test_rejects_too_many_end_tokens(monkeypatch):
    config = make_config()
    ends = StubTokenizer(config.model_config.vocab_size)
    monkeypatch.setattr(type(ends), "turn_end_ids", tuple(range(2, 11)))
    with pytest.raises(ConfigError, match="10 end token ids; at most 8"):
        InputProcessor(config, ends)


def test_texts_of_one_request_are_counted_before_any_is_made():
    with pytest.raises(RequestError, match="n must be .*16384, got 1000000000"):
        make(n=10**9)


def controls_of(**fields) -> TokenControls | None:
    return make_controls(SamplingParams(**fields), TOKENIZER, (TOKENIZER.eos_token_id,))


def words_of(*words: str) -> set[tuple[int, ...]]:
    controls = controls_of(bad_words=list(words))
    assert controls is not None
    return set(controls.bad_words)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_no_controls_by_default():
    assert controls_of() is None
    assert controls_of(bad_words=[], logit_bias={}) is None
    assert controls_of(temperature=0.5, top_k=3, stop=["a"], min_tokens=2) is None


def test_every_control_field_is_passed_on():
    given: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    assert controls_of(**given) == TokenControls(**given)
    bias = {7: -100, 5: 1.5}
    assert controls_of(logit_bias=bias) == TokenControls(bias=((5, 1.5), (7, -100.0)))
    allowed = TokenControls(allowed=(2, 5))
    assert controls_of(allowed_token_ids=[5, 2, 5]) == allowed


def test_a_word_is_forbidden_with_and_without_a_space():
    first, second = ids_of("the"), ids_of(" the")
    assert first != second
    assert words_of("the") == words_of(" the") == {first, second}


def test_a_spelling_that_ends_in_a_forbidden_one_is_left_out():
    # "\n the" has one more spelling, which ends in the token of " the" and is left out.
    assert words_of("the", "\n the") == words_of("the")
    # A longer spelling is allowed if the forbidden one is only its start.
    longer = "the fox"
    assert any(word[: len(ids_of("the"))] == ids_of("the") for word in words_of(longer))


def test_spaces_alone_and_line_breaks_are_words():
    assert words_of("\n") >= {ids_of("\n")}
    assert words_of("  ") == {ids_of("  ")}


def test_special_pieces_in_a_word_are_text():
    assert (TOKENIZER.eos_token_id,) not in words_of("<eos>")


def test_a_word_of_too_many_tokens():
    text = "\u2603" * MAX_BAD_WORD_LEN  # each character is three byte tokens
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORD_LEN} tokens"):
        controls_of(bad_words=[text])


def test_too_many_words_and_too_long_a_bias():
    words = [TOKENIZER.id_to_piece(token) for token in range(300, 700)]
    plain = [word for word in words if word.isalpha()]
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORDS} spellings"):
        controls_of(bad_words=plain)
    bias = dict.fromkeys(range(MAX_BIAS), 1.0)
    assert controls_of(logit_bias=bias) is not None
    with pytest.raises(
        RequestError, match=rf"at most {MAX_BIAS} .* got {MAX_BIAS + 1}"
    ):
        controls_of(logit_bias=bias | {MAX_BIAS: 1.0})


def test_rejects_controls_that_allow_no_token():
    (word,) = ids_of("the")
    assert controls_of(allowed_token_ids=[word, 5], bad_words=["the"])
    with pytest.raises(RequestError, match="bad_words does not forbid"):
        controls_of(allowed_token_ids=[word], bad_words=["the"])
    assert controls_of(allowed_token_ids=[TOKENIZER.eos_token_id])
    with pytest.raises(RequestError, match="min_tokens"):
        controls_of(allowed_token_ids=[TOKENIZER.eos_token_id], min_tokens=1)
