"""Chats with tools, with openai's client and a device with scripted texts.

Only the generated text is scripted; the server and the bundled tokenizer are real.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxspec.serve.requests.tool_parsers import ToolParserManager
from tests.support.serving import CHAT, Client, checked
from tests.support.tool_chats import (
    MESSAGES,
    NAMED,
    NOW,
    OSLO,
    ROME,
    TOKENIZER,
    TOOLS,
    Stage,
    said,
    tool,
)
from tests.support.tool_parser_plugin import PLUGIN

ASKED: dict[str, Any] = {"model": "model", "messages": MESSAGES, "tools": TOOLS}
FLAT_TOOLS = [{"type": "function", **one["function"]} for one in TOOLS]
ASKED_FLAT: dict[str, Any] = {"model": "model", "input": MESSAGES, "tools": FLAT_TOOLS}
REQUIRED = {"tool_choice": "required"}
RESPONSES = "/v1/responses"


@pytest.fixture(autouse=True)
def _calls_are_not_checked(unchecked_types: None):
    """Disable type checks of calls; other tests make the same calls with checks."""


@dataclasses.dataclass
class Answer:
    """One choice of a response, whole or streamed.

    Attributes:
        calls: Names and arguments of the called functions.
    """

    content: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    tokens: list[bytes] = dataclasses.field(default_factory=list)


def chat(stage: Stage, **given: Any) -> tuple[list[Answer], int]:
    """Request a chat with tools; return its answers and number of tokens."""
    asked = ASKED | {"logprobs": True} | given
    if not asked.get("stream"):
        response = stage.chats.create(**asked)
        answers = [whole(choice) for choice in response.choices]
        return answers, response.usage.completion_tokens
    options = {"include_usage": True}
    return streamed(stage.chats.create(**asked, stream_options=options))


def whole(choice: Any) -> Answer:
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    assert all(re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", call.id) for call in calls)
    assert (choice.message.content is None) <= bool(calls)
    return Answer(
        choice.message.content or "",
        [(call.function.name, call.function.arguments) for call in calls],
        choice.finish_reason,
        [bytes(one.bytes) for one in choice.logprobs.content],
    )


def streamed(chunks: Any) -> tuple[list[Answer], int]:
    """Join the chunks of an answer, and check each."""
    answers: dict[int, Answer] = {}
    ids: set[str] = set()
    usage = None
    for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, Answer())
            assert answer.finish_reason is None, "a chunk after the last one"
            answer.finish_reason = choice.finish_reason
            if choice.logprobs is not None:
                answer.tokens += [bytes(one.bytes) for one in choice.logprobs.content]
            answer.content += choice.delta.content or ""
            assert len(choice.delta.tool_calls or ()) <= 1
            for call in choice.delta.tool_calls or ():
                function = call.function
                if call.id is not None:
                    assert call.index == len(answer.calls)
                    assert (call.type, function.arguments) == ("function", "")
                    assert call.id not in ids
                    ids.add(call.id)
                    answer.calls.append((function.name, ""))
                    continue
                assert (call.type, function.name) == (None, None)
                assert call.index == len(answer.calls) - 1
                name, arguments = answer.calls.pop()
                answer.calls.append((name, arguments + function.arguments))
    assert usage is not None
    return [answers[index] for index in sorted(answers)], usage.completion_tokens


def made(*calls: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(one["name"], one["parameters"]) for one in calls]


WORDS = "Yes, it is [warm].\n"
NO_CALL = said({"name": "f"})
CASES: list[tuple[str, dict[str, Any], tuple[str, list[Any], str]]] = [
    (WORDS, {}, (WORDS, [], "stop")),
    (said(ROME, OSLO, NOW), {}, ("", made(ROME, OSLO, NOW), "tool_calls")),
    (said(ROME, NOW), {"parallel_tool_calls": False}, ("", made(ROME), "tool_calls")),
    (f"Let me see.\n{said(NOW)}", {}, ("Let me see.\n", made(NOW), "tool_calls")),
    (f"```json\n{said(ROME)}\n```", {}, ("", made(ROME), "tool_calls")),
    (said(ROME), {"n": 2}, ("", made(ROME), "tool_calls")),
    (said(ROME), REQUIRED, ("", made(ROME), "tool_calls")),
    (said(ROME, NOW), REQUIRED | {"n": 3}, ("", made(ROME, NOW), "tool_calls")),
    (said(ROME), {"tool_choice": NAMED}, ("", made(ROME), "stop")),
    (said(ROME), {"tool_choice": "none"}, (said(ROME), [], "stop")),
    (NO_CALL, {}, (NO_CALL, [], "stop")),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("text", "given", "expected"), CASES)
def test_finds_calls_in_text(
    stage: Stage, text: str, given: dict[str, Any], expected: Any, is_stream: bool
):
    num_said = stage.script.say(text)
    answers, num_tokens = chat(stage, stream=is_stream, **given)
    assert len(answers) == given.get("n", 1)
    assert num_tokens == num_said * len(answers)
    for answer in answers:
        calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
        assert (answer.content, calls, answer.finish_reason) == expected
        # Whole or streamed, the text is returned completely.
        assert b"".join(answer.tokens).removesuffix(b"<eos>") == text.encode()
        assert len(answer.tokens) == num_said


# Enough tokens to begin the parameters of a call, but not to end them.
NUM_BEGUN = len(TOKENIZER.encode(said(ROME | {"parameters": {}})[:-3], False)) + 2


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_cut_off_call_has_finish_reason_length(
    stage: Stage, choice: Any, is_stream: bool
):
    stage.script.say(said(ROME))
    asked = {"tool_choice": choice, "stream": is_stream, "max_tokens": NUM_BEGUN}
    (answer,), num_tokens = chat(stage, **asked)
    assert (answer.finish_reason, num_tokens) == ("length", NUM_BEGUN)
    ((name, arguments),) = answer.calls
    assert name == "weather"
    assert json.dumps(ROME["parameters"], ensure_ascii=False).startswith(arguments)
    assert answer.content == ""


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_call_cut_before_its_name_has_no_content(stage: Stage, choice: Any):
    stage.script.say(said(ROME))
    asked = ASKED | {"tool_choice": choice, "max_tokens": 3}
    (whole,) = stage.http.ask(CHAT, **asked)["choices"]
    chunks = [one["choices"][0] for one in stage.http.ask(CHAT, **asked, stream=True)]
    assert whole["message"]["content"] is None
    assert "tool_calls" not in whole["message"]
    assert {one["delta"].get("content") or "" for one in chunks} == {""}
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("is_stream", [False, True])
def test_forced_call_cut_before_its_name_is_no_text(stage: Stage, is_stream: bool):
    stage.script.say(said(ROME))
    response, _ = respond(stage, is_stream, **REQUIRED, max_output_tokens=3)
    assert response.status == "incomplete"
    assert items_of(response) == [("", "")]


def test_messages_have_fields_of_vllm(stage: Stage):
    fields = {"role", "content", "refusal", "annotations", "audio", "function_call"}
    for text, own in ((WORDS, set[str]()), (said(ROME), {"tool_calls"})):
        stage.script.say(text)
        message = stage.http.ask(CHAT, **ASKED)["choices"][0]["message"]
        assert message.keys() == fields | {"reasoning"} | own
        assert message["reasoning"] is None


def test_openai_stream_helper_reads_calls(stage: Stage):
    stage.script.say(said(ROME, NOW))
    with stage.chats.stream(**ASKED) as events:
        kinds = [event.type for event in events]
        (choice,) = events.get_final_completion().choices
    assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = choice.message.tool_calls
    read = [(one.function.name, json.loads(one.function.arguments)) for one in calls]
    assert read == made(ROME, NOW)
    assert choice.finish_reason == "tool_calls"


def check_prompt_with_result(prompt: str, words: str = "") -> None:
    """Check that a prompt has the tools, a call and its result."""
    assert '{"name": "weather", "parameters": {"type": "object"' in prompt
    _, asked, called, result = prompt.split("<start_of_turn>")[:4]
    assert asked.endswith("\n\nIs it warm in Rom?<end_of_turn>\n")
    assert called == f"model\n{words}{said(ROME)}<end_of_turn>\n"
    assert result == 'user\n{"name": "weather", "result": "21 °C"}<end_of_turn>\n'


def test_model_answers_after_tool_result(stage: Stage):
    stage.script.say(said(ROME))
    message = stage.chats.create(**ASKED).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
    stage.script.say("It is.")
    asked = ASKED | {"messages": [*MESSAGES, message.model_dump(), result]}
    answer = stage.chats.create(**asked, extra_body={"return_prompt_text": True})
    assert answer.choices[0].message.content == "It is."
    assert answer.choices[0].finish_reason == "stop"
    check_prompt_with_result(answer.prompt_text)


def test_prompt_lists_tools(stage: Stage):
    def is_listed(choice: str) -> bool:
        stage.script.say(said(NOW))
        asked = ASKED | {"tool_choice": choice, "return_prompt_text": True}
        return '"name": "weather"' in stage.http.ask(CHAT, **asked)["prompt_text"]

    assert is_listed("auto") and is_listed("required") and not is_listed("none")
    with stage.restarted(exclude_tools_when_tool_choice_none=False):
        assert is_listed("none")
    body = {"messages": MESSAGES, "tools": TOOLS}
    written = TOKENIZER.apply_chat_template(MESSAGES, tools=TOOLS)
    assert stage.http.ask("/tokenize", **body)["count"] == len(written)


BROKEN = (
    ({"properties": {"a": {"type": "nothing"}}}, "nothing"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"$ref": "#/$defs/gone"}, "gone"),
)


@pytest.mark.parametrize("choice", ["required", NAMED | {"function": {"name": "f"}}])
@pytest.mark.parametrize(("schema", "said"), BROKEN)
def test_refuses_invalid_schema(stage: Stage, schema: Any, said: str, choice: Any):
    runner: Any = stage.engine.engine.runner
    before = runner.num_launches
    for is_stream in (False, True):
        given = {"tools": [*TOOLS, tool("f", schema)], "tool_choice": choice}
        error = stage.http.refusal(CHAT, ASKED | given | {"stream": is_stream})
        assert error["param"] == "tools[2]['function']['parameters']"
        assert said in error["message"]
    assert runner.num_launches == before


def test_refuses_invalid_calls_in_messages(stage: Stage):
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [7]}]
    for is_stream in (False, True):
        body = {"messages": messages, "stream": is_stream}
        error = stage.http.refusal(CHAT, body)
        assert error["param"] == "messages[1]['tool_calls'][0]"
        assert "function" in error["message"]


def test_choice_by_model_needs_flag(http: Client):
    for path, asked in ((CHAT, ASKED), (RESPONSES, ASKED_FLAT)):
        for choice in ({}, {"tool_choice": "auto"}):
            error = http.refusal(path, asked | choice)
            assert error["param"] == "tool_choice"
            assert "--enable-auto-tool-choice" in error["message"]


def test_unused_schema_is_not_checked(stage: Stage):
    broken = tool("f", {"properties": {"a": {"type": "nothing"}}})
    for choice in ("auto", NAMED):
        stage.script.say(said(ROME))
        (answer,), _ = chat(stage, tools=[*TOOLS, broken], tool_choice=choice)
        assert len(answer.calls) == 1


def respond(stage: Stage, is_stream: bool, **given: Any) -> tuple[Any, list[str]]:
    """Request a response with tools; return it and the names of its events."""
    asked = ASKED_FLAT | given
    if not is_stream:
        return checked(stage.responses.create(**asked)), []
    events = [checked(event) for event in stage.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_items(events)
    kept = checked(stage.responses.retrieve(events[-1].response.id))
    assert kept == events[-1].response
    return kept, [event.type.removeprefix("response.") for event in events]


def check_items(events: list[Any]) -> None:
    """Check that items begin, grow and end in order, and equal the final response."""
    items: list[Any] = []
    grown, logprobs = "", list[Any]()
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(items)
            assert event.item.status == "in_progress"
            assert getattr(event.item, "arguments", "") == ""
            items.append(event.item)
            grown, logprobs = "", []
        elif kind.endswith(".delta"):
            assert (event.output_index, event.item_id) == (len(items) - 1, items[-1].id)
            grown += event.delta
            if kind == "output_text.delta":
                logprobs += [(one.token, one.logprob) for one in event.logprobs]
        elif kind == "function_call_arguments.done":
            assert (event.name, event.arguments) == (items[-1].name, grown)
        elif kind == "output_text.done":
            assert event.text == grown
            assert [(one.token, one.logprob) for one in event.logprobs] == logprobs
        elif kind == "output_item.done":
            assert event.item.id == items[-1].id
            if event.item.type == "message":
                found = event.item.content[0].logprobs
                assert [(one.token, one.logprob) for one in found] == logprobs
            items[-1] = event.item
    assert items == events[-1].response.output
    assert len({item.id for item in items}) == len(items)


def items_of(response: Any) -> list[tuple[str, Any]]:
    return [
        ("", item.content[0].text)
        if item.type == "message"
        else (item.name, json.loads(item.arguments))
        for item in response.output
    ]


ONLY_TIME = {"type": "allowed_tools", "mode": "auto"}
ONLY_TIME |= {"tools": [{"type": "function", "name": "time"}]}
RESPONSE_CASES: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    (WORDS, {}, [("", WORDS)]),
    (said(ROME, NOW), {}, made(ROME, NOW)),
    (said(ROME, NOW), {"parallel_tool_calls": False}, made(ROME)),
    (f"See:\n{said(NOW)}", {}, [("", "See:\n"), *made(NOW)]),
    (said(OSLO), REQUIRED, made(OSLO)),
    (said(ROME), {"tool_choice": {"type": "function", "name": "weather"}}, made(ROME)),
    (said(ROME), {"tool_choice": "none"}, [("", said(ROME))]),
    (said(ROME), {"tool_choice": ONLY_TIME}, [("", said(ROME))]),
    ("", {}, [("", "")]),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("text", "given", "expected"), RESPONSE_CASES)
def test_responses_contain_calls(
    stage: Stage, text: str, given: dict[str, Any], expected: Any, is_stream: bool
):
    stage.script.say(text)
    given = given | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response, names = respond(stage, is_stream, **given)
    assert items_of(response) == expected
    assert response.status == "completed"
    assert {item.status for item in response.output} == {"completed"}
    calls = [item for item in response.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == len(calls)
    for item in response.output:
        if item.type == "message":
            logprobs = item.content[0].logprobs
            spelled = b"".join(bytes(one.bytes) for one in logprobs)
            assert spelled.removesuffix(b"<eos>") == item.content[0].text.encode()
            assert {len(one.top_logprobs) for one in logprobs} <= {2}
    if is_stream:
        assert names[:2] == ["created", "in_progress"]
        assert names.count("function_call_arguments.done") == len(calls)
        assert names[-1] == "completed"


def result_of(call: Any) -> Any:
    item = {"type": "function_call_output", "call_id": call.call_id}
    return item | {"output": "21 °C"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_cut_off_call_is_incomplete(stage: Stage, is_stream: bool):
    stage.script.say(said(ROME))
    response, _ = respond(stage, is_stream, max_output_tokens=NUM_BEGUN)
    assert response.status == "incomplete"
    (call,) = response.output
    assert (call.name, call.status) == ("weather", "incomplete")
    asked = {"model": "model", "previous_response_id": response.id}
    with pytest.raises(openai.BadRequestError, match="call_id must be the call_id of"):
        stage.responses.create(input=[result_of(call)], **asked)
    stage.script.say("Well.")
    extra = {"enable_response_messages": True}
    then = stage.responses.create(input="Go on.", extra_body=extra, **asked)
    # The cut-off call becomes plain text in the next prompt.
    assert said(ROME)[:20] in then.input_messages[0]["message"]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_response_continues_with_results(stage: Stage, is_stateful: bool):
    stage.script.say(f"See:\n{said(ROME)}")
    first = stage.responses.create(**ASKED_FLAT)
    _, call = first.output
    if is_stateful:
        asked = {"input": [result_of(call)], "previous_response_id": first.id}
    else:
        past = [item.model_dump(exclude_none=True) for item in first.output]
        asked = {"input": [*MESSAGES, *past, result_of(call)]}
    stage.script.say("It is.")
    extra = {"enable_response_messages": True}
    then = stage.responses.create(**ASKED_FLAT | asked, extra_body=extra)
    assert then.output_text == "It is."
    check_prompt_with_result(then.input_messages[0]["message"], "See:\n")


def test_openai_stream_helper_of_responses(stage: Stage):
    stage.script.say(f"See:\n{said(ROME, NOW)}")
    strict = [one | {"strict": True} for one in FLAT_TOOLS]
    with stage.responses.stream(**ASKED_FLAT | {"tools": strict}) as events:
        assert [one for one in events if one.type.endswith("arguments.delta")]
        final = events.get_final_response()
    assert items_of(final) == [("", "See:\n"), *made(ROME, NOW)]
    assert final.output[1].parsed_arguments == ROME["parameters"]


def test_responses_refuse_invalid_tools(stage: Stage):
    broken = [FLAT_TOOLS[1] | {"parameters": {"$ref": "#/x"}}]
    for tools, param in (([], "tools"), (broken, "tools[0]['parameters']")):
        asked = ASKED_FLAT | REQUIRED | {"tools": tools}
        error = stage.http.refusal(RESPONSES, asked)
        assert error["param"] == param
        assert param in error["message"]
    asked = ASKED_FLAT | REQUIRED | {"structured_outputs": {"regex": "a"}}
    assert stage.http.refusal(RESPONSES, asked)["param"] == "tool_choice"


def test_tool_parser_plugin_is_used(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    known = dict(ToolParserManager.tool_parsers)
    monkeypatch.setattr(ToolParserManager, "tool_parsers", known)
    path = tmp_path / "shout_parser.py"
    path.write_text(PLUGIN)
    plugin = {"tool_call_parser": "shout", "tool_parser_plugin": str(path)}
    with stage.restarted(**plugin):
        stage.script.say("TIME ")
        whole = stage.chats.create(**ASKED).choices[0].message.tool_calls
        chunks = [
            one.choices[0].delta for one in stage.chats.create(**ASKED, stream=True)
        ]
    streamed = [call for delta in chunks for call in delta.tool_calls or ()]
    for calls in (whole, streamed):
        assert [call.function.name for call in calls] == ["time"]
