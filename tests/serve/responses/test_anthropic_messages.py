"""Anthropic's Messages API: requests become chats, answers messages or events."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.serve.requests.anthropic_input import MessagesBody, as_chat
from tests.support.client_programs import CLIENTS, needs_clients, run
from tests.support.fake_engines import letters, said
from tests.support.serving import MESSAGES, PROMPT, Client, server
from tests.support.tool_chats import CITY, NOW, ROME, Stage
from tests.support.tool_chats import said as calls_said

CALLS = Path(__file__).parents[1] / "clients" / "calls.py"
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: dict[str, Any] = {"model": "model", "messages": MESSAGES, "max_tokens": 5}
TOOLS = [
    {"name": "weather", "input_schema": CITY},
    {"name": "time", "description": "Tells it.", "input_schema": {"type": "object"}},
]
TOOL_USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rom"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "21 °C"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def events(http: Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names must be their types."""
    response = http.post(PATH, json=ASKED | body | {"stream": True})
    assert response.status_code == 200, response.text
    found = []
    for one in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the events."""
    assert [one["type"] for one in (found[0], *found[-2:])] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    message, blocks = found[0]["message"], []
    assert message["content"] == [] and message["stop_reason"] is None
    is_open = False
    for event in found[1:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(blocks) - (kind != "start")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(event["content_block"] | {"parts": []})
        elif kind == "delta":
            blocks[-1]["parts"] += [event["delta"]]
    assert not is_open
    for block in blocks:
        parts = block.pop("parts")
        kinds = {part["type"] for part in parts}
        if block["type"] == "text":
            assert kinds <= {"text_delta"}
            block["text"] += "".join(part["text"] for part in parts)
        else:
            assert kinds == {"input_json_delta"}
            written = "".join(part["partial_json"] for part in parts)
            block["input"] = json.loads(written)
    end = found[-2]
    return message | {"content": blocks} | end["delta"] | {"usage": end["usage"]}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("sequence", [None, letters(said(4)[3:])])
def test_message_has_anthropics_fields(http: Client, sequence: Any, is_stream: bool):
    given = {"stop_sequences": [sequence], "max_tokens": 9} if sequence else {}
    found = http.ask(PATH, **ASKED | given)
    if is_stream:
        found, whole = joined(events(http, **given)), found
        assert found.keys() == whole.keys()
    assert found.pop("id").startswith("msg_")
    usage = found.pop("usage")
    assert usage == {"input_tokens": 3, "output_tokens": 4 if sequence else 5}
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "model",
        "content": [text(letters(said(3 if sequence else 5)))],
        "stop_reason": "stop_sequence" if sequence else "max_tokens",
        "stop_sequence": sequence,
    }


ONE = {"type": "auto", "disable_parallel_tool_use": True}
SEEN = "Let me see.\n"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("script", "choice", "words", "calls"),
    [
        (calls_said(ROME, NOW), None, "", [ROME, NOW]),
        (f"{SEEN}{calls_said(NOW)}", None, SEEN, [NOW]),
        ("Yes.", None, "Yes.", []),
        (calls_said(ROME, NOW), ONE, "", [ROME]),
        (calls_said(ROME), {"type": "any"}, "", [ROME]),
        (calls_said(ROME), {"type": "tool", "name": "weather"}, "", [ROME]),
        (calls_said(ROME), {"type": "none"}, calls_said(ROME), []),
    ],
)
def test_calls_become_tool_use_blocks(
    stage: Stage, script, choice, words, calls, is_stream
):
    stage.script.say(script)
    asked = {"tools": TOOLS, "max_tokens": 200, "tool_choice": choice}
    if is_stream:
        found = joined(events(stage.http, **asked))
    else:
        found = stage.http.ask(PATH, **ASKED | asked)
    ids = [block.pop("id") for block in found["content"] if "id" in block]
    assert len(set(ids)) == len(calls)
    used = [
        {"type": "tool_use", "name": one["name"], "input": one["parameters"]}
        for one in calls
    ]
    assert found["content"] == [text(words)] * bool(words) + used
    assert found["stop_reason"] == ("tool_use" if calls else "end_turn")


def chat_of(messages: list[Any], **given: Any) -> Any:
    return as_chat(MessagesBody(messages=messages, max_tokens=9, **given))


@pytest.mark.parametrize("is_enabled", [False, True])
def test_usage_counts_tokens_of_the_prefix_cache_if_enabled(is_enabled):
    content = PROMPT * 6
    with server(enable_prompt_tokens_details=is_enabled) as http:
        asked = ASKED | {"messages": [{"role": "user", "content": content}]}
        first, second = (http.ask(PATH, **asked)["usage"] for _ in range(2))
        streamed = events(http, messages=asked["messages"])
    usages = [first, second, streamed[0]["message"]["usage"], streamed[-2]["usage"]]
    if not is_enabled:
        keys = {"input_tokens", "output_tokens"}
        assert [(one["input_tokens"], one.keys()) for one in usages] == [(18, keys)] * 4
        return
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    found = [[one[name] for name in parts] for one in usages]
    assert found == [[2, 16, 0], *[[2, 0, 16]] * 3]


def test_blocks_become_chat_messages():
    user = [text("Warm"), text("in Rom?")]
    answer = [{"type": "thinking", "thinking": "Hm."}, text("Let me see."), TOOL_USE]
    found = chat_of(
        [
            {"role": "user", "content": user},
            {"role": "user", "content": "Now?"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [RESULT, text("So?")]},
        ],
        system=[text("Be brief."), text("Be kind.")],
    )
    call = {"name": "weather", "arguments": '{"city": "Rom"}'}
    assert found.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Warm\nin Rom?\nNow?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "21 °C"},
        {"role": "user", "content": "So?"},
    ]
    assert found.add_generation_prompt and not found.continue_final_message


def test_last_assistant_message_is_continued():
    found = chat_of([*MESSAGES, {"role": "assistant", "content": "It is"}])
    assert found.continue_final_message and not found.add_generation_prompt


def test_sampling_values_tools_and_formats_are_passed_on():
    given = dict(temperature=0.5, top_k=3, top_p=0.9, seed=7, stop_sequences=["x"])
    wanted = {"type": "json_schema", "schema": CITY}
    form = {"format": wanted, "effort": "low"}
    found = chat_of(MESSAGES, tools=TOOLS, output_config=form, **given)
    assert (found.max_tokens, found.stop) == (9, ["x"])
    assert (found.temperature, found.top_k, found.top_p, found.seed) == (0.5, 3, 0.9, 7)
    functions = [tool.function for tool in found.tools]
    assert [one.name for one in functions] == ["weather", "time"]
    assert functions[0].parameters == CITY
    assert functions[1].description == "Tells it."
    assert found.response_format.json_schema.json_schema == CITY
    # Tools of the provider are left out.
    search = {"type": "web_search_20250305", "name": "web_search"}
    found = chat_of(MESSAGES, tools=[search], output_config={"effort": "low"})
    assert (found.tools, found.tool_choice) == (None, None)
    assert found.response_format is None


def test_counts_the_tokens_of_the_prompt(http: Client):
    count = http.ask(COUNT, model="model", messages=MESSAGES)
    assert count == {"input_tokens": 3}


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


FORM = {"format": {"type": "json_schema", "schema": {}}}
FORMS = {"output_config": FORM, "response_format": {"type": "text"}}
UNANSWERED = {"messages": [*MESSAGES, {"role": "assistant", "content": [TOOL_USE]}]}
TOOL_TURN = {"messages": [{"role": "tool", "content": "x"}]}


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        (TOOL_TURN, "messages[0].role", "user"),
        (
            user({"type": "image"}),
            "messages[0].content[0]",
            "Images and documents are not supported",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "7"),
        (
            user(RESULT | {"tool_use_id": 7}),
            "messages[0].content[0].tool_use_id",
            "the id of a tool_use block",
        ),
        (UNANSWERED, "messages", "tool results"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "JSON schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "'any'"),
        (
            {"output_config": {"format": {"type": "x"}}},
            "output_config.format",
            "schema",
        ),
        (FORMS, "output_config", "leave one out"),
        ({"tool_choice": {"type": "any"}}, "tools", "must be set"),
    ],
)
def test_invalid_requests_are_refused_in_the_form_of_the_api(http, given, field, said):
    response = http.post(PATH, json=ASKED | given)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"] and said in body["error"]["message"]


def test_other_errors_have_the_types_of_the_api():
    with server(api_keys=("secret",), max_body_bytes=1000) as http:
        for headers, given, status, kind in (
            ({}, {}, 401, "authentication_error"),
            ({"x-api-key": "wrong"}, {}, 401, "authentication_error"),
            ({"x-api-key": "secret"}, {"model": "other"}, 404, "not_found_error"),
            ({"x-api-key": "secret"}, {"x": "y" * 999}, 413, "request_too_large"),
        ):
            response = http.post(PATH, json=ASKED | given, headers=headers)
            assert response.status_code == status, response.text
            assert response.json()["error"]["type"] == kind
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert http.post(PATH, json=ASKED, headers=headers).status_code == 200


def test_failure_in_a_stream_is_an_error_event():
    with server(break_at=3) as http:
        found = events(http, max_tokens=20)
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"


def test_query_and_head_of_agents_are_answered(http: Client):
    assert http.post(f"{PATH}?beta=true", json=ASKED).status_code == 200
    assert http.head("/").status_code == 200


@needs_clients
def test_anthropics_client_reads_calls(stage: Stage):
    stage.script.say(calls_said(ROME))
    words = [CLIENTS / "python", CALLS, "anthropic", stage.url[:-1], "more"]
    found = json.loads(run(words, {}).splitlines()[-1])
    assert [found["whole"], found["streamed"]] == [calls_said(ROME)] * 2
    assert found["reason"] == "end_turn"
    assert found["called"] == [[ROME["name"], ROME["parameters"]]]
    assert found["counted"] > 5
    assert found["refused"] == "BadRequestError"
