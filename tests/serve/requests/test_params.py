"""Conversion of a request's fields to sampling parameters."""

from typing import Any

import pytest

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.serve.requests.params import MAX_GRAMMAR_CHARACTERS, make_params
from jaxspec.serve.requests.protocol import ChatBody, CompletionBody, ResponseBody
from jaxspec.serve.requests.response_input import as_chat

MESSAGES = [{"role": "user", "content": "x"}]


def completion(defaults: dict[str, Any] | None = None, **body: Any) -> SamplingParams:
    return make_params(CompletionBody(prompt="x", **body), defaults or {})


def chat(defaults: dict[str, Any] | None = None, **body: Any) -> SamplingParams:
    return make_params(ChatBody(messages=MESSAGES, **body), defaults or {})


def respond(**body: Any) -> SamplingParams:
    return make_params(as_chat(ResponseBody(input="x", **body), MESSAGES), {})


PASSED_ON: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.6,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
    "repetition_penalty": 1.5,
    "stop": ["a", "b"],
    "stop_token_ids": [6],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [5],
    "bad_words": ["a"],
    "prompt_logprobs": 4,
}


@pytest.mark.parametrize("make", [completion, chat])
def test_fields_are_passed_on(make: Any):
    params, defaults = make(**PASSED_ON, logit_bias={"5": 1}), SamplingParams()
    for name, value in (PASSED_ON | {"logit_bias": {5: 1.0}}).items():
        assert getattr(params, name) == value != getattr(defaults, name), name


def test_defaults_are_the_models_then_openais():
    plain = completion()
    assert (plain.temperature, plain.top_p, plain.max_tokens) == (1.0, 1.0, 16)
    model = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 40}
    assert completion(model).temperature == 0.7
    assert completion(model).max_tokens == 16
    assert completion(model, max_tokens=None).max_tokens == 40
    assert completion(model, temperature=0.2).temperature == 0.2
    assert completion(model, temperature=None).temperature == 0.7
    assert chat().max_tokens is None
    assert chat(model).max_tokens == 40
    assert chat(model, max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_streams_are_deltas():
    assert completion(stream=True).output_kind is RequestOutputKind.DELTA
    assert completion().output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(
    ("params", "logprobs", "prompt_logprobs"),
    [
        (completion(logprobs=3), 3, None),
        (completion(logprobs=3, echo=True), 3, 3),
        (chat(logprobs=True), 0, None),
        (chat(logprobs=True, top_logprobs=4), 4, None),
        (chat(), None, None),
    ],
)
def test_logprobs_are_read_in_all_forms(
    params: SamplingParams, logprobs: Any, prompt_logprobs: Any
):
    assert params.logprobs == logprobs
    assert params.prompt_logprobs == prompt_logprobs


def test_logprob_token_ids_are_validated():
    ids = [7, 5]
    for params in (
        completion(logprob_token_ids=ids, logprobs=0),
        completion(logprob_token_ids=ids, logprobs=5, echo=True),
        chat(logprob_token_ids=ids, logprobs=True, top_logprobs=5),
        respond(logprob_token_ids=ids, include=["message.output_text.logprobs"]),
    ):
        assert (params.logprobs, params.logprob_token_ids) == (None, ids)
        assert params.num_logprobs == 2
    echoed = completion(logprob_token_ids=ids, logprobs=5, echo=True)
    assert echoed.prompt_logprobs == 5
    for make in (completion, chat, respond):
        with pytest.raises(RequestError, match="`logprobs` must be set"):
            make(logprob_token_ids=ids)
        with pytest.raises(RequestError, match="must not be an empty list"):
            make(logprob_token_ids=[])
    with pytest.raises(RequestError, match="no tokens are generated"):
        completion(logprob_token_ids=ids, logprobs=0, echo=True, max_tokens=0)


SCHEMA = {"type": "object"}
TAG: Any = {"structures": [], "triggers": ["<f="]}
NEW_TAG: Any = {"format": {"type": "any_text"}}
OF_TAG = {"type": "structural_tag"}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": OF_SCHEMA}, "json", SCHEMA),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "x"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
        *(
            ({"response_format": one | OF_TAG}, "structural_tag", one | OF_TAG)
            for one in (TAG, NEW_TAG)
        ),
        ({"structured_outputs": {"json": {}}}, "json", {}),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_json": {}}, "json", {}),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "regex", "a"),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " ?"},
            "whitespace_pattern",
            " ?",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            "whitespace_pattern",
            " ?",
        ),
    ],
)
def test_structured_outputs_are_read_from_their_fields(
    body: dict[str, Any], field: str, value: Any
):
    for params in (completion(**body), chat(**body)):
        kind = "json" if field == "whitespace_pattern" else field
        assert params.structured_outputs.kind == kind
        assert getattr(params.structured_outputs, field) == value


@pytest.mark.parametrize("name", ["guided_jsn", "guided_json_object", "guided_x"])
def test_unknown_guided_field_is_refused(name: str):
    message = (
        f"{name} is not a field of this API: use structured_outputs, or .*guided_json,"
    )
    for make in (completion, chat, respond):
        body: dict[str, Any] = {name: "x"}
        with pytest.raises(RequestError, match=message) as refused:
            make(**body)
        assert refused.value.parameter == name
        assert make(**(body | {name: None})).structured_outputs is None


def test_field_without_effect_is_logged(caplog: pytest.LogCaptureFixture):
    completion(guided_decoding_backend="outlines")
    assert "guided_decoding_backend has no effect" in caplog.text


def test_refuses_too_long_grammar():
    half = "a" * (MAX_GRAMMAR_CHARACTERS // 2)
    assert completion(structured_outputs={"choice": [half]}).structured_outputs
    long: tuple[dict[str, Any], ...] = (
        {"guided_regex": half * 2},
        {"guided_json": {"const": half * 2}},
    )
    for body in long:
        with pytest.raises(RequestError, match=str(MAX_GRAMMAR_CHARACTERS)):
            completion(**body)


def test_num_speculative_tokens_and_no_grammar():
    assert completion(num_speculative_tokens=2).num_speculative_tokens == 2
    xargs = {"num_speculative_tokens": 0}
    assert completion(vllm_xargs=xargs).num_speculative_tokens == 0
    assert completion(response_format={"type": "text"}).structured_outputs is None
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="none").structured_outputs is None


@pytest.mark.parametrize(
    "body",
    [
        {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "text"}, "structured_outputs": {}},
        {"guided_regex": "a", "guided_choice": ["a"]},
    ],
)
def test_refuses_contradictions(body: dict[str, Any]):
    for make in (completion, chat):
        with pytest.raises(RequestError):
            make(**body)


def test_refuses_unsupported_fields():
    for make in (completion, chat):
        with pytest.raises(UnsupportedError):
            make(kv_transfer_params={})
    for value in ("", "AAAA", ["AAAA"]):
        with pytest.raises(UnsupportedError, match="prompt_embeds is not") as refused:
            completion(prompt_embeds=value)
        assert refused.value.parameter == "prompt_embeds"
