"""Responses requests are converted to chats, with the bundled tokenizer."""

from typing import Any

import pytest

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.requests.params import make_params
from jaxspec.serve.requests.protocol import ChatBody, ResponseBody
from jaxspec.serve.requests.response_input import (
    add_answer,
    as_chat,
    messages_of,
)
from jaxspec.serve.requests.tool_choice import form_of, read_choice
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.support.loops import make_config

PROMPTS = Prompts(
    make_config(), Tokenizer.from_folder(bundled_target()), ServerSettings()
)
USER = {"role": "user", "content": "Hello"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "7"}
IMAGE = {"type": "input_image"}
F: dict[str, Any] = {"type": "function", "name": "f"}


def chat(**body: Any) -> ChatBody:
    body.setdefault("input", "Hello")
    read = ResponseBody(**body)
    return as_chat(read, messages_of(read))


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def written(**body: Any) -> str | None:
    return PROMPTS.of_chat(chat(**body), 4).get("prompt")


def turns(*texts: str) -> str:
    """Return the text of a conversation up to the model's next turn."""
    whole = "<bos>"
    for place, text in enumerate(texts):
        role = "model" if place % 2 else "user"
        whole += f"<start_of_turn>{role}\n{text}<end_of_turn>\n"
    return whole + "<start_of_turn>model\n"


def test_input_of_all_types_is_read():
    parts = [{"type": "input_text", "text": text} for text in ("Hel", "lo")]
    answer = {"type": "output_text", "text": "Well", "annotations": []}
    past = {"type": "message", "role": "assistant", "content": [answer], "id": "msg_1"}
    past["status"] = "completed"
    assert written() == turns("Hello")
    assert written(input=[USER]) == turns("Hello")
    assert written(input=[USER | {"content": parts}]) == turns("Hel\nlo")
    assert written(input=[USER, past, USER]) == turns("Hello", "Well", "Hello")


def test_instructions_open_first_user_turn():
    given = {"instructions": "Be brief."}
    assert written(**given) == turns("Be brief.\n\nHello")
    system = {"role": "system", "content": "Be polite."}
    whole = "Be brief.\n\nBe polite.\n\nHello"
    assert written(input=[system, USER], **given) == turns(whole)
    past = {"role": "assistant", "content": "Well"}
    assert written(input=[past, USER], **given) == turns("Be brief.", "Well", "Hello")


def test_continues_cut_off_answer():
    past: dict[str, Any] = {"role": "assistant", "content": "We"}
    cut = past | {"status": "incomplete"}
    whole = "<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\nWe"
    assert written(input=[USER, cut]) == whole
    assert written(input=[USER, past]) == turns("Hello", "We")
    # Whatever items follow it in the input.
    noted = {"type": "item_reference", "id": "msg_1"}
    assert written(input=[USER, cut, noted]) == whole
    body = ResponseBody(input=[USER, cut])
    joined = add_answer(body, messages_of(body), "ll")
    assert joined == [USER, {"role": "assistant", "content": "Well"}]


def test_fields_are_passed_on():
    given = {"temperature": 0.5, "seed": 3, "top_k": 7, "stop": ["x"], "min_tokens": 1}
    params = make_params(chat(max_output_tokens=9, **given), {})
    assert params.max_tokens == 9
    for name, value in given.items():
        assert getattr(params, name) == value
    # These fields exist in chats, but not in Responses.
    params = make_params(chat(max_tokens=2, n=2, prompt_logprobs=1), {})
    assert (params.max_tokens, params.n, params.prompt_logprobs) == (None, 1, None)


def test_include_requests_logprobs():
    included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert make_params(chat(top_logprobs=2), {}).logprobs is None
    assert make_params(chat(include=included), {}).logprobs == 0
    assert make_params(chat(include=included, top_logprobs=2), {}).logprobs == 2


def test_text_formats_become_constraints():
    schema = {"type": "object"}
    for form, kind, value in (
        ({"type": "json_object"}, "json_object", True),
        ({"type": "json_schema", "name": "x", "schema": schema}, "json", schema),
    ):
        params = make_params(chat(text={"format": form}), {})
        assert getattr(params.structured_outputs, kind) == value
    plain = chat(text={"format": {"type": "text"}})
    assert make_params(plain, {}).structured_outputs is None


def test_truncation_shortens_the_prompt():
    text = "Hello " * 200
    with pytest.raises(RequestError, match="maximum context length"):
        written(input=text)
    prompt = PROMPTS.of_chat(chat(input=text, truncation="auto"), 4)
    assert len(prompt["prompt_token_ids"]) == 92


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "computer_call"}, r"input\[1\] must be a message"),
        (CALL | {"name": None}, r"input\[1\].name must be a string"),
        (CALL | {"arguments": "{"}, r"input\[1\].arguments must be a JSON"),
        (CALL | {"arguments": "[]"}, r"input\[1\].arguments must be"),
        (RESULT, r"input\[1\].call_id must be the call_id of"),
        (USER | {"content": 5}, r"input\[1\].content must be a string"),
        (USER | {"content": [IMAGE]}, r"input\[1\].content\[0\] must be .*input_text"),
    ],
)
def test_refuses_invalid_items(item: dict[str, Any], said: str):
    with pytest.raises(RequestError, match=said):
        chat(input=[USER, item])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input must be .* at least one message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "at least one message"),
        (
            {"input": [CALL, RESULT | {"output": [{"type": "input_file"}]}]},
            r"input\[1\].output\[0\] must be .*input_text",
        ),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] must be .*'function'"),
        ({"tools": [F | {"parameters": 1}]}, r"tools\[0\].parameters must be a JSON"),
        ({"tools": [F], "tool_choice": "some"}, "tool_choice must be 'none', 'auto'"),
        (
            {"tools": [F], "tool_choice": {"type": "function"}},
            "tool_choice must be .*'name': ",
        ),
        (
            {"tools": [F], "tool_choice": allowing("auto", "g")},
            "tool_choice must be names .* got 'g'. The tools are: 'f'",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be"),
    ],
)
def test_refuses_invalid_input(body: dict[str, Any], said: str):
    with pytest.raises(RequestError, match=said):
        chat(**body)


def test_refuses_unsupported_fields():
    for name, value in (("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"})):
        with pytest.raises(UnsupportedError) as refused:
            make_params(chat(**{name: value}), {})
        assert refused.value.parameter == name


def test_accepts_items_that_clients_send_back():
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    noted = {"type": "item_reference", "id": "msg_1"}
    refusal = [{"type": "refusal", "refusal": "No."}]
    for content, text in ((None, ""), (refusal, "No.")):
        answer = {"role": "assistant", "content": content}
        text_read = written(input=[noted, USER, thought, answer, USER])
        assert text_read == turns("Hello", text, "Hello")
    empty = CALL | {"arguments": ""}
    plain = written(input=[USER, CALL, RESULT])
    assert written(input=[USER, thought, empty, RESULT]) == plain


def test_other_tool_types_are_ignored(caplog: pytest.LogCaptureFixture):
    search = {"type": "web_search"}
    read = chat(tools=[search, F])
    assert [tool.function.name for tool in read.tools or ()] == ["f"]
    assert "web_search" in caplog.text
    for choice in (None, "auto", allowing("auto") | {"tools": [search]}):
        assert read_choice(chat(tools=[search], tool_choice=choice)).kind == "none"
    allowed = allowing("auto", "f")
    allowed["tools"].append(search)
    assert read_choice(chat(tools=[search, F], tool_choice=allowed)).kind == "auto"
    with pytest.raises(RequestError, match="`tools` must be set"):
        read_choice(chat(tools=[search], tool_choice="required"))


def test_tool_choice_none_drops_tools():
    make_params(chat(tools=[{"type": "function"}], tool_choice="none"), {})
    make_params(chat(tools=[], store=True), {})


@pytest.mark.parametrize(
    ("choice", "names", "kind"),
    [
        (None, ["f", "g"], "auto"),
        ("required", ["f", "g"], "required"),
        ({"type": "function", "name": "g"}, ["f", "g"], "named"),
        (allowing("auto", "g"), ["g"], "auto"),
        (allowing("required", "g", "f"), ["f", "g"], "required"),
    ],
)
def test_tool_choices_are_read(choice: Any, names: list[str], kind: str):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [F, F | {"name": "g", "parameters": schema, "strict": True}]
    read = chat(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    found = read_choice(read)
    assert [tool.name for tool in found.tools] == names
    assert (found.kind, found.name) == (kind, "g" if kind == "named" else None)
    assert found.tools[-1].parameters == schema
    assert read.parallel_tool_calls is False
    form = make_params(read, {}).structured_outputs
    assert form == form_of(read)
    assert (form is None) == (kind == "auto")


def test_calls_and_results_become_messages():
    """Consecutive texts and calls, in any order, become one message of the model."""
    second = CALL | {"name": "g", "arguments": '{"a": 1}', "call_id": "2"}
    words = {"role": "assistant", "content": "Well"}
    results = [RESULT | {"call_id": "2", "output": [{"type": "text", "text": "8"}]}]
    results.append(RESULT)
    called = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": 1}}]'
    text = '{"name": "g", "result": "8"}\n\n{"name": "f", "result": "7"}'
    for answer in ([words, CALL, second], [CALL, words, second], [CALL, second, words]):
        whole = written(input=[USER, *answer, *results])
        assert whole == turns("Hello", f"Well\n{called}", text)


def test_conversation_is_continued():
    first = ResponseBody(input="Hello", instructions="Be brief.")
    messages = messages_of(first)
    assert messages == [USER], "instructions apply to one request"
    earlier = add_answer(first, messages, "Well")
    assert earlier == [USER, {"role": "assistant", "content": "Well"}]
    then = ResponseBody(input="And?", instructions="Be kind.")
    messages = messages_of(then, earlier)
    read = as_chat(then, messages)
    text = PROMPTS.of_chat(read, 4).get("prompt")
    assert text == turns("Be kind.\n\nHello", "Well", "And?")
    assert messages[0] == USER
