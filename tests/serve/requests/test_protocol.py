"""The schemas of request bodies, and the limits on their values."""

from typing import Any

import pytest
from pydantic import ValidationError

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
    "body",
    [
        {"prompt": "\ud800"},
        {"user": ["\ud800"]},
        {"unknown": {"a": [{"b": "\udfff"}]}},
        {"logit_bias": {"\ud800": 1}},
    ],
)
def test_refuses_lone_surrogates(body: dict[str, Any]):
    rejects("surrogate", **body)


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (["#"] * (MAX_ENTRIES + 1), "a list may have at most 8192 entries other than"),
        (FIELDS | {"more": 1}, "at most 1024 fields, got 1025"),
        (nested(MAX_DEPTH), "be nested at most 100 levels deep"),
        ("\ud800", "a text has an unpaired surrogate, which is not valid Unicode"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_name_the_field(content: Any, said: str):
    (fault,) = rejects(prompt="x", suffix=content).errors()
    assert fault.get("ctx", {})["error"].field == "suffix"
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


def test_schema_field_is_read_by_its_alias():
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    body = CompletionBody.model_validate({"response_format": wanted})
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.json_schema == {"type": "object"}
