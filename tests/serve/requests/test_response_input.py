"""From a request for a response to a chat, written with the bundled tokenizer."""

from typing import Any

import pytest

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.requests.params import make_params
from jaxspec.serve.requests.protocol import ChatBody, ResponseBody
from jaxspec.serve.requests.response_input import (
    add_answer,
    as_chat,
    call_of,
    flat_tool_names,
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
    """A conversation in which the model is to speak next."""
    whole = "<bos>"
    for place, text in enumerate(texts):
        role = "model" if place % 2 else "user"
        whole += f"<start_of_turn>{role}\n{text}<end_of_turn>\n"
    return whole + "<start_of_turn>model\n"


def test_every_form_of_an_input():
    parts = [{"type": "input_text", "text": text} for text in ("Hel", "lo")]
    answer = {"type": "output_text", "text": "Well", "annotations": []}
    past = {"type": "message", "role": "assistant", "content": [answer], "id": "msg_1"}
    past["status"] = "completed"
    assert written() == turns("Hello")
    assert written(input=[USER]) == turns("Hello")
    assert written(input=[USER | {"content": parts}]) == turns("Hel\nlo")
    assert written(input=[USER, past, USER]) == turns("Hello", "Well", "Hello")


def test_instructions_open_the_first_turn():
    told = {"instructions": "Be brief."}
    assert written(**told) == turns("Be brief.\n\nHello")
    system = {"role": "system", "content": "Be polite."}
    whole = "Be brief.\n\nBe polite.\n\nHello"
    assert written(input=[system, USER], **told) == turns(whole)
    past = {"role": "assistant", "content": "Well"}
    assert written(input=[past, USER], **told) == turns("Be brief.", "Well", "Hello")


def test_an_answer_that_was_cut_off_is_gone_on_with():
    past: dict[str, Any] = {"role": "assistant", "content": "We"}
    cut = past | {"status": "incomplete"}
    whole = "<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\nWe"
    assert written(input=[USER, cut]) == whole
    assert written(input=[USER, past]) == turns("Hello", "We")


def test_fields_arrive():
    given = {"temperature": 0.5, "seed": 3, "top_k": 7, "stop": ["x"], "min_tokens": 1}
    params = make_params(chat(max_output_tokens=9, **given), {})
    assert params.max_tokens == 9
    for name, value in given.items():
        assert getattr(params, name) == value
    # Names that are no response's.
    params = make_params(chat(max_tokens=2, n=2, prompt_logprobs=1), {})
    assert (params.max_tokens, params.n, params.prompt_logprobs) == (None, 1, None)


def test_logprobs_are_asked_for_by_including_them():
    included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert make_params(chat(top_logprobs=2), {}).logprobs is None
    assert make_params(chat(include=included), {}).logprobs == 0
    assert make_params(chat(include=included, top_logprobs=2), {}).logprobs == 2


@pytest.mark.parametrize(
    ("form", "kind", "value"),
    [
        ({"type": "json_object"}, "json_object", True),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
            "json",
            {"type": "object"},
        ),
    ],
)
def test_forms(form: Any, kind: str, value: Any):
    params = make_params(chat(text={"format": form}), {})
    assert params.structured_outputs is not None
    assert getattr(params.structured_outputs, kind) == value
    plain = chat(text={"format": {"type": "text"}})
    assert make_params(plain, {}).structured_outputs is None


def test_what_is_too_long_can_be_cut():
    text = "Hello " * 200
    with pytest.raises(RequestError, match="maximum context length"):
        written(input=text)
    prompt = PROMPTS.of_chat(chat(input=text, truncation="auto"), 4)
    assert len(prompt["prompt_token_ids"]) == 92


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input must be .* at least one message"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\] must be a message"),
        ({"input": [CALL | {"name": None}]}, r"input\[0\].name must be a string"),
        (
            {"input": [CALL | {"arguments": "{"}]},
            r"input\[0\].arguments must be a JSON",
        ),
        ({"input": [CALL | {"arguments": "[]"}]}, r"input\[0\].arguments must be"),
        ({"input": [USER, RESULT]}, r"input\[1\].call_id must be that of a"),
        (
            {"input": [CALL, RESULT | {"output": [{"type": "input_file"}]}]},
            r"input\[1\].output\[0\] must be .*input_text",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "at least one message"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] must be .*'function'"),
        ({"tools": [F | {"parameters": 1}]}, r"tools\[0\].parameters must be a JSON"),
        ({"tools": [F], "tool_choice": "some"}, "tool_choice must be 'none', 'auto'"),
        (
            {"tools": [F], "tool_choice": {"type": "function"}},
            "tool_choice must be .*'name': ",
        ),
        (
            {"tools": [F], "tool_choice": allowing("auto", "g")},
            "tool_choice must be names .* got 'g'. There are: 'f'",
        ),
        ({"input": [USER | {"content": 5}]}, r"input\[0\].content must be a string"),
        (
            {"input": [USER | {"content": [{"type": "input_image"}]}]},
            r"input\[0\].content\[0\] must be .*input_text",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be"),
    ],
)
def test_what_cannot_be_read(body: dict[str, Any], said: str):
    with pytest.raises(RequestError, match=said):
        chat(**body)


@pytest.mark.parametrize(
    "body",
    [
        {"conversation": "conv_1"},
        {"prompt": {"id": "pmpt_1"}},
    ],
)
def test_what_there_is_not(body: dict[str, Any]):
    with pytest.raises(UnsupportedError) as refused:
        make_params(chat(**body), {})
    assert refused.value.parameter in body


def test_accepts_what_clients_send_back():
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    noted = {"type": "item_reference", "id": "msg_1"}
    refused = {"type": "refusal", "refusal": "No."}
    answers = [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [refused]},
    ]
    for answer, text in zip(answers, ("", "No."), strict=True):
        told = written(input=[noted, USER, thought, answer, USER])
        assert told == turns("Hello", text, "Hello")
    empty = CALL | {"arguments": ""}
    assert written(input=[USER, thought, empty, RESULT]) == written(
        input=[USER, CALL, RESULT]
    )
    # An answer that was cut off goes on, whatever stands behind it.
    cut = {"role": "assistant", "content": "We", "status": "incomplete"}
    assert written(input=[USER, cut, noted]) == written(input=[USER, cut])


def test_tools_of_other_types_are_ignored(caplog: pytest.LogCaptureFixture):
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


def test_a_forced_call_wins_over_a_form():
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    read = chat(tools=[F], tool_choice="required", text=form)
    assert make_params(read, {}).structured_outputs == form_of(read)


def test_tools_may_be_ignored():
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
def test_tools(choice: Any, names: list[str], kind: str):
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


def test_calls_and_their_results():
    """Words and calls in a row are one message of the model, whatever their order."""
    second = CALL | {"name": "g", "arguments": '{"a": 1}', "call_id": "2"}
    words = {"role": "assistant", "content": "Well"}
    results = [RESULT | {"call_id": "2", "output": [{"type": "text", "text": "8"}]}]
    results.append(RESULT)
    called = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a": 1}}]'
    told = '{"name": "g", "result": "8"}\n\n{"name": "f", "result": "7"}'
    for answer in ([words, CALL, second], [CALL, words, second], [CALL, second, words]):
        whole = written(input=[USER, *answer, *results])
        assert whole == turns("Hello", f"Well\n{called}", told)


def test_an_answer_that_calls_is_gone_on_from():
    first = ResponseBody(input="Hello", tools=[F])
    earlier = add_answer(first, messages_of(first), "Well", [call_of("1", "f", "{}")])
    then = ResponseBody(input=[RESULT])
    messages = messages_of(then, earlier)
    told = PROMPTS.of_chat(as_chat(then, messages), 4).get("prompt")
    called = 'Well\n[{"name": "f", "parameters": {}}]'
    assert told == turns("Hello", called, '{"name": "f", "result": "7"}')
    assert earlier[-1]["content"] == "Well"


def test_errors_name_tools_as_responses_do():
    with pytest.raises(RequestError) as refused, flat_tool_names():
        name = "tools[0]['function']['parameters']"
        raise RequestError(f"{name} must be x", parameter=name, value=1)
    assert refused.value.parameter == "tools[0]['parameters']"
    assert str(refused.value) == "tools[0]['parameters'] must be x"
    with pytest.raises(RequestError, match="^x$"), flat_tool_names():
        raise RequestError("x", parameter="y")


def test_a_conversation_that_goes_on():
    first = ResponseBody(input="Hello", instructions="Be brief.")
    messages = messages_of(first)
    assert messages == [USER], "instructions are of one request"
    earlier = add_answer(first, messages, "Well")
    assert earlier == [USER, {"role": "assistant", "content": "Well"}]
    then = ResponseBody(input="And?", instructions="Be kind.")
    messages = messages_of(then, earlier)
    read = as_chat(then, messages)
    told = PROMPTS.of_chat(read, 4).get("prompt")
    assert told == turns("Be kind.\n\nHello", "Well", "And?")
    assert messages[0] == USER


def test_a_message_that_was_cut_off_is_one_with_its_end():
    begun = {"role": "assistant", "content": "We", "status": "incomplete"}
    body = ResponseBody(input=[USER, begun])
    earlier = add_answer(body, messages_of(body), "ll")
    assert earlier == [USER, {"role": "assistant", "content": "Well"}]
