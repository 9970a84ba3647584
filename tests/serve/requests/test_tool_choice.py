"""Interpretation of a chat's `tools` and `tool_choice`."""

from typing import Any

import pytest

from jaxspec.errors import RequestError
from jaxspec.serve.requests.params import MAX_GRAMMAR_CHARACTERS, make_params
from jaxspec.serve.requests.protocol import ChatBody
from jaxspec.serve.requests.tool_choice import form_of, read_choice, tools_as_given


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f"), tool("g", parameters={"type": "object", "x-note": 1})]
NAMED = {"type": "function", "function": {"name": "g"}}
LONG = {"description": "x" * MAX_GRAMMAR_CHARACTERS}


def body(**given: Any) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "x"}], **given)


@pytest.mark.parametrize(
    ("given", "kind", "name"),
    [
        ({}, "none", None),
        ({"tool_choice": "none"}, "none", None),
        ({"tools": TOOLS}, "auto", None),
        ({"tools": TOOLS, "tool_choice": None}, "auto", None),
        ({"tools": TOOLS, "tool_choice": "auto"}, "auto", None),
        ({"tools": TOOLS, "tool_choice": "none"}, "none", None),
        ({"tools": TOOLS, "tool_choice": "required"}, "required", None),
        ({"tools": TOOLS, "tool_choice": NAMED}, "named", "g"),
    ],
)
def test_tool_choices_are_read(given: dict[str, Any], kind: str, name: str | None):
    choice = read_choice(body(**given))
    assert (choice.kind, choice.name) == (kind, name)
    form = form_of(body(**given))
    assert (form is not None) == (kind in ("required", "named"))
    assert make_params(body(**given), {}).structured_outputs == form


@pytest.mark.parametrize(
    ("given", "names", "most"),
    [
        ({"tool_choice": "required"}, ["f", "g"], None),
        ({"tool_choice": "required", "parallel_tool_calls": True}, ["f", "g"], None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["f", "g"], 1),
        ({"tool_choice": NAMED}, ["g"], 1),
    ],
)
def test_forced_calls_are_limited_to_the_tools(
    given: dict[str, Any], names: list[str], most: Any
):
    form: Any = form_of(body(tools=TOOLS, **given))
    parts = form.json["$defs"].values()
    assert [part["properties"]["name"]["const"] for part in parts] == names
    assert form.json.get("maxItems") == most


def test_template_gets_tools_unchanged():
    assert tools_as_given(body(tools=TOOLS)) == TOOLS
    assert tools_as_given(body(tools=[{"function": {"name": "f"}}])) == [tool("f")]
    assert tools_as_given(body()) is None


PARAMETERS = "tools[0]['function']['parameters']"


def named(**function: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": function}}


def with_schema(schema: Any) -> dict[str, Any]:
    return {"tools": [tool("f", parameters=schema)], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("given", "name", "said"),
    [
        ({"tools": []}, "tools", "empty array"),
        ({"tools": [], "tool_choice": "none"}, "tools", "empty array"),
        ({"tools": None, "tool_choice": "auto"}, "tools", "must be set"),
        ({"tools": None, "tool_choice": NAMED}, "tools", "must be set"),
        ({"tool_choice": "some"}, "tool_choice", "'some'"),
        ({"tool_choice": {}}, "tool_choice", "got {}"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice", "'type'"),
        (named(), "tool_choice", "'name'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        (
            named(name="h"),
            "tool_choice",
            "'h', which is not one of the `tools`: 'f', 'g'",
        ),
        (with_schema({"type": "array"}), PARAMETERS, "of an object"),
        ({"tools": [tool("f", parameters={"type": "array"})]}, PARAMETERS, "an object"),
        (
            {"tool_choice": "required", "response_format": {"type": "some"}},
            "response_format.type",
            "json_schema",
        ),
        (
            named(name="g") | {"structured_outputs": {"regex": "a"}},
            "tool_choice",
            "cannot be combined with",
        ),
        (with_schema(LONG), "tools", str(MAX_GRAMMAR_CHARACTERS)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refuses_contradictions(given: dict[str, Any], name: str, said: str):
    with pytest.raises(RequestError) as refused:
        make_params(body(**{"tools": TOOLS} | given), {})
    assert refused.value.parameter == name
    assert said in str(refused.value)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_call_overrides_response_format(choice: Any):
    asked = {"tools": TOOLS, "tool_choice": choice}
    form = make_params(body(**asked), {}).structured_outputs
    assert form is not None
    for wanted in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}},
        {"type": "text"},
    ):
        found = make_params(body(**asked, response_format=wanted), {})
        assert found.structured_outputs == form


def test_other_tool_types_are_ignored(caplog: pytest.LogCaptureFixture):
    search = {"type": "web_search_preview"}
    found = read_choice(body(tools=[search, *TOOLS]))
    assert [tool.name for tool in found.tools] == ["f", "g"]
    assert "web_search_preview" in caplog.text
    for choice in (None, "auto", "none"):
        assert read_choice(body(tools=[search], tool_choice=choice)).kind == "none"
    with pytest.raises(RequestError, match="`tools` must be set"):
        read_choice(body(tools=[search], tool_choice="required"))


def test_response_format_with_optional_calls():
    asked = body(tools=TOOLS, response_format={"type": "json_object"})
    form = make_params(asked, {}).structured_outputs
    assert form is not None and form.json_object
