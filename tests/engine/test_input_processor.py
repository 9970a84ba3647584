"""Input becomes a complete request, or an error before it has any effect."""

from typing import Any
from unittest.mock import patch

import pytest

import jaxspec_checkpoints
from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.engine.input_processor import InputProcessor, make_controls
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
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams
from jaxspec.text.tokenizer import Tokenizer
from tests.support.engines import StubTokenizer
from tests.support.loops import make_config
from tests.support.requests import make

EOS = 1
TOKENIZER = Tokenizer.from_folder(jaxspec_checkpoints.bundled_target())


def intake(**settings: Any) -> InputProcessor:
    config = make_config(**settings)
    return InputProcessor(config, StubTokenizer(config.model_config.vocab_size))


def test_parameters_are_in_the_request():
    request = make(max_tokens=5, stop_token_ids=[7], seed=2**32 + 3)
    assert request.prompt_token_ids == [2, 3, 4]
    assert request.max_total == 8
    assert request.stop_ids == (EOS, 7)
    assert (request.seed, request.rule) == ((1, 3), COUPLED)
    assert make(seed=-1 - 2**40).seed == (2**32 - 1 - 2**8, 2**32 - 1)
    assert request.controls is None
    assert request.features == Features()
    assert request.can_read_prefix_cache
    assert make(stop_token_ids=[7], ignore_eos=True).stop_ids == (7,)


@pytest.mark.parametrize(
    ("max_tokens", "max_total"), [(1, 4), (92, 95), (93, 96), (94, 96), (None, 96)]
)
def test_text_ends_at_the_models_length(max_tokens: int | None, max_total: int):
    assert make(max_tokens=max_tokens).max_total == max_total


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({}, BLOCK),
        ({"rejection_sample_method": "block"}, BLOCK),
        ({"rejection_sample_method": "standard"}, STANDARD),
        ({"rejection_sample_method": "coupled"}, COUPLED),
    ],
)
def test_unseeded_requests_use_the_configured_rule(keys, rule):
    config = {"speculative_keys": keys}
    assert make(config=config).rule == rule
    assert make(config=config, seed=1).rule == COUPLED
    assert make(config={"num_draft_tokens": 0}).rule == STANDARD


@pytest.mark.parametrize(("asked", "drafts"), [(None, 3), (0, 0), (2, 2)])
def test_request_sets_its_number_of_drafts(asked: int | None, drafts: int):
    extra = None if asked is None else {"num_speculative_tokens": asked}
    request = make(extra_args=extra)
    assert request.max_draft_tokens == drafts
    assert (request.spec_metrics is None) == (drafts == 0)
    with pytest.raises(RequestError, match="from 0 to 3, got 4"):
        make(extra_args={"num_speculative_tokens": 4})


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


def test_controls_and_chosen_ids_name_their_features():
    request = make(presence_penalty=0.5)
    assert request.controls == TokenControls(presence_penalty=0.5)
    assert request.features == Features(has_controls=True)
    # `max_logprobs` does not limit the chosen ids.
    request = make(logprob_token_ids=[3, 9, 3], config={"max_logprobs": 2})
    assert request.features == Features(has_controls=True, num_logprobs=2)
    assert request.controls == TokenControls(logprob_token_ids=(3, 9, 3))
    assert make(logprob_token_ids=[]).features == Features()


def test_prefix_cache_can_be_skipped():
    assert not make(skip_reading_prefix_cache=True).can_read_prefix_cache
    prompt = {"prompt_token_ids": [2], "cache_salt": "mine"}
    (request,) = intake().prepare("0", prompt, SamplingParams()).requests
    assert request.cache_salt == "mine"
    with pytest.raises(RequestError, match="cache_salt.* must be a non-empty string"):
        intake().prepare("0", prompt | {"cache_salt": ""}, SamplingParams())


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_priorities_are_checked_under_every_policy(policy: str):
    prepare = intake(scheduling_policy=policy).prepare
    (request,) = prepare("0", [2], SamplingParams(), priority=-5).requests
    assert request.priority == -5
    with pytest.raises(RequestError, match="priority must be an integer"):
        prepare("0", [2], SamplingParams(), priority=0.5)  # pyright: ignore


def test_prompt_for_several_texts_is_encoded_once():
    encode = StubTokenizer.encode
    with patch.object(StubTokenizer, "encode", autospec=True) as encoded:
        encoded.side_effect = encode
        requests = intake().prepare("0", "abc", SamplingParams(n=3)).requests
    encoded.assert_called_once()
    assert [one.request_id for one in requests] == ["0_0", "1_0", "2_0"]
    assert [one.prompt_token_ids for one in requests] == [[64, 65, 66]] * 3


def test_parameters_are_checked_again_and_copied():
    given = SamplingParams(stop_token_ids=[5])
    given.top_k = -1
    assert intake().prepare("0", [2], given).requests[0].params is not given
    assert given.top_k == -1
    given.top_p = 3.0
    with pytest.raises(RequestError, match="top_p"):
        intake().prepare("0", [2], given)


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


def test_rejects_too_many_end_tokens(monkeypatch):
    monkeypatch.setattr(StubTokenizer, "turn_end_ids", tuple(range(2, 11)))
    with pytest.raises(ConfigError, match="10 end token ids; at most 8"):
        intake()


def test_rejects_bad_structured_output_and_too_many_texts():
    wrong: dict[str, Any]
    for wrong in ({"regex": "(a"}, {"json": {"type": "strin"}}):
        with pytest.raises(RequestError, match="structured_outputs.* cannot be used"):
            make(structured_outputs=StructuredOutputsParams(**wrong))
    whitespace = StructuredOutputsConfig(whitespace_pattern="(")
    with pytest.raises(ConfigError, match="not a regular expression"):
        make(config={"structured_outputs": whitespace})
    # Texts are counted before any is made.
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


def test_every_control_field_is_passed_on_and_there_are_none_by_default():
    assert controls_of() is None
    assert controls_of(bad_words=[], logit_bias={}) is None
    assert controls_of(temperature=0.5, top_k=3, stop=["a"], min_tokens=2) is None
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


def test_bad_words_are_forbidden_in_all_spellings():
    first, second = ids_of("the"), ids_of(" the")
    assert first != second
    # A word is forbidden with and without a space.
    assert words_of("the") == words_of(" the") == {first, second}
    # "\n the" has one more spelling, which ends in the token of " the" and is left out.
    assert words_of("the", "\n the") == words_of("the")
    # A longer spelling is allowed if the forbidden one is only its start.
    assert any(word[: len(first)] == first for word in words_of("the fox"))
    # Spaces alone and line breaks are words.
    assert words_of("\n") >= {ids_of("\n")}
    assert words_of("  ") == {ids_of("  ")}
    # Special pieces in a word are text.
    assert (TOKENIZER.eos_token_id,) not in words_of("<eos>")


def test_rejects_too_long_and_too_many_controls():
    text = "\u2603" * MAX_BAD_WORD_LEN  # each character is three byte tokens
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORD_LEN} tokens"):
        controls_of(bad_words=[text])
    words = [TOKENIZER.id_to_piece(token) for token in range(300, 700)]
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORDS} spellings"):
        controls_of(bad_words=[word for word in words if word.isalpha()])
    bias = dict.fromkeys(range(MAX_BIAS), 1.0)
    assert controls_of(logit_bias=bias) is not None
    message = rf"at most {MAX_BIAS} .* got {MAX_BIAS + 1}"
    with pytest.raises(RequestError, match=message):
        controls_of(logit_bias=bias | {MAX_BIAS: 1.0})


def test_rejects_controls_that_allow_no_token():
    (word,) = ids_of("the")
    assert controls_of(allowed_token_ids=[word, 5], bad_words=["the"])
    with pytest.raises(RequestError, match="bad_words does not forbid"):
        controls_of(allowed_token_ids=[word], bad_words=["the"])
    assert controls_of(allowed_token_ids=[TOKENIZER.eos_token_id])
    with pytest.raises(RequestError, match="min_tokens"):
        controls_of(allowed_token_ids=[TOKENIZER.eos_token_id], min_tokens=1)
