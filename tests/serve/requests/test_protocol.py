"""The schemas of request bodies, and the limits on their values."""

from typing import Any

import pytest
from pydantic import ValidationError

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.sampling_params import SamplingParams
from jaxspec.serve.requests.params import MAX_GRAMMAR_CHARACTERS, make_params
from jaxspec.serve.requests.protocol import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_FIELDS,
    MAX_N,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    ResponseBody,
    unknown_fields,
)
from jaxspec.serve.requests.response_input import as_chat


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


FIELDS: dict[str, Any] = {str(number): 1 for number in range(MAX_FIELDS)}
WORD = "#" * MAX_BAD_WORD_CHARACTERS


def rejects(error: str | None = None, **body: Any) -> ValidationError:
    with pytest.raises(ValidationError, match=error) as refused:
        CompletionBody.model_validate(body)
    return refused.value


@pytest.mark.parametrize(
    ("name", "largest", "larger"),
    [
        ("unknown", nested(MAX_DEPTH - 1), nested(MAX_DEPTH)),
        ("unknown", ["#"] * MAX_ENTRIES, ["#"] * (MAX_ENTRIES + 1)),
        ("unknown", FIELDS, FIELDS | {"more": 1}),
        ("stop", ["#"] * MAX_STOPS, ["#"] * (MAX_STOPS + 1)),
        ("bad_words", ["#"] * MAX_BAD_WORDS, ["#"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", [WORD], [WORD + "#"]),
        ("n", MAX_N, MAX_N + 1),
        ("n", 1, 0),
        ("request_id", "x" * 256, "x" * 257),
    ],
    ids=lambda value: str(value)[:20],
)
def test_larger_values_are_refused(name: str, largest: Any, larger: Any):
    assert CompletionBody.model_validate({name: largest})
    rejects(**{name: larger})


UNPAIRED = "a text has an unpaired surrogate, which is not valid Unicode"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("suffix", ["#"] * (MAX_ENTRIES + 1), "at most 8192 entries other than"),
        ("suffix", FIELDS | {"more": 1}, "at most 1024 fields, got 1025"),
        ("suffix", nested(MAX_DEPTH), "be nested at most 100 levels deep"),
        ("suffix", "\ud800", UNPAIRED),
        ("user", ["\ud800"], UNPAIRED),
        ("unknown", {"a": [{"b": "\udfff"}]}, UNPAIRED),
        ("logit_bias", {"\ud800": 1}, UNPAIRED),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_name_the_field(name: str, content: Any, said: str):
    (fault,) = rejects(**{"prompt": "x", name: content}).errors()
    assert fault.get("ctx", {})["error"].field == name
    assert said in fault["msg"]


def test_token_ids_have_no_entry_limit():
    ids = [7] * (2 * MAX_ENTRIES)
    assert CompletionBody.model_validate({"prompt": ids}).prompt == ids
    assert CompletionBody.model_validate({"prompt": [ids, ids]})


def test_reports_first_invalid_entry_only():
    (fault,) = rejects(stop_token_ids=[1, *["x"] * 100]).errors()
    assert fault["loc"] == ("stop_token_ids", 1)


def unknown_of(body: Any) -> list[str]:
    return [f"{one.place}{one.name}" for one in unknown_fields(body)]


def test_unknown_fields_are_found_in_every_object():
    function = {"name": "f", "description": "", "strict": True, "cached": 1}
    schema = {"name": "s", "description": "", "schema": {"any": 1}, "strikt": True}
    body = {
        "messages": [
            {"role": "user", "content": "a", "name": "b"},
            {"role": "assistant", "content": None, "reasoning": "c", "wait": 1},
        ],
        "tools": [
            {"type": "function", "function": {"name": "e"}},
            {"type": "function", "function": function, "cache_control": {}},
        ],
        "response_format": {"type": "json_schema", "json_schema": schema, "x": 1},
        "stream_options": {"include_usage": True, "include_usge": True},
        "logit_bias": {"7": 1},
        "vllm_xargs": {"any": 1},
        "temprature": 0,
    }
    assert sorted(unknown_of(ChatBody.model_validate(body))) == [
        "messages[1].wait",
        "response_format.json_schema.strikt",
        "response_format.x",
        "stream_options.include_usge",
        "temprature",
        "tools[1].cache_control",
        "tools[1].function.cached",
    ]
    item = {"type": "message", "role": "user", "content": "a", "id": "b", "wait": 1}
    form = {"type": "json_schema", "schema": {"any": 1}, "strikt": True}
    response = {
        "input": [item],
        "tools": [{"type": "function", **function}],
        "text": {"format": form, "verbosity": "low"},
        "metadata": {"any": "b"},
    }
    assert sorted(unknown_of(ResponseBody.model_validate(response))) == [
        "input[0].wait",
        "text.format.strikt",
        "text.verbosity",
        "tools[0].cached",
    ]


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
PATTERN = "whitespace_pattern"
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": OF_SCHEMA}, "json", SCHEMA),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag", "x"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG),
        ({"response_format": TAG | OF_TAG}, "structural_tag", TAG | OF_TAG),
        ({"response_format": NEW_TAG | OF_TAG}, "structural_tag", NEW_TAG | OF_TAG),
        ({"structured_outputs": {"json": {}}}, "json", {}),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
        ({"guided_json": {}}, "json", {}),
        ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "regex", "a"),
        ({"guided_json": {}, f"guided_{PATTERN}": " "}, PATTERN, " "),
        ({"structured_outputs": {"json": {}, PATTERN: " "}}, PATTERN, " "),
    ],
)
def test_structured_outputs_are_read_from_their_fields(
    body: dict[str, Any], field: str, value: Any
):
    for params in (completion(**body), chat(**body)):
        kind = "json" if field == PATTERN else field
        assert params.structured_outputs.kind == kind
        assert getattr(params.structured_outputs, field) == value


@pytest.mark.parametrize("name", ["guided_jsn", "guided_json_object", "guided_x"])
def test_unknown_guided_field_is_refused(name: str):
    message = f"{name} is not a field .*: use structured_outputs, or .*guided_json,"
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
    for name, long in (("regex", half * 2), ("json", {"const": half * 2})):
        body: dict[str, Any] = {f"guided_{name}": long}
        with pytest.raises(RequestError, match=str(MAX_GRAMMAR_CHARACTERS)):
            completion(**body)


def test_num_speculative_tokens_and_no_grammar():
    assert completion(num_speculative_tokens=2).num_speculative_tokens == 2
    xargs = {"num_speculative_tokens": 0}
    assert completion(vllm_xargs=xargs).num_speculative_tokens == 0
    assert completion(response_format={"type": "text"}).structured_outputs is None


def test_refuses_unsupported_fields():
    for make in (completion, chat):
        with pytest.raises(UnsupportedError):
            make(kv_transfer_params={})
    for value in ("", "AAAA", ["AAAA"]):
        with pytest.raises(UnsupportedError, match="prompt_embeds is not") as refused:
            completion(prompt_embeds=value)
        assert refused.value.parameter == "prompt_embeds"
