"""From a request for a response to a chat, written with the bundled tokenizer."""

from typing import Any

import pytest

from jaxspec.errors import RequestError, UnsupportedError
from jaxspec.serve.params import make_params
from jaxspec.serve.prompts import Prompts
from jaxspec.serve.protocol import ChatBody, ResponseBody
from jaxspec.serve.response_input import answered, as_chat, messages_of
from jaxspec.serve.settings import ServerSettings
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import bundled_target
from tests.loops import make_config

PROMPTS = Prompts(
    make_config(), Tokenizer.from_folder(bundled_target()), ServerSettings()
)
USER = {"role": "user", "content": "Hello"}


def chat(**body: Any) -> ChatBody:
    body.setdefault("input", "Hello")
    read = ResponseBody(**body)
    return as_chat(read, messages_of(read))


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
        ({"input": [{"type": "function_call"}]}, r"input\[0\] must be a message"),
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
        {"tools": [{"type": "function", "name": "f"}]},
    ],
)
def test_what_there_is_not(body: dict[str, Any]):
    with pytest.raises(UnsupportedError) as refused:
        make_params(chat(**body), {})
    assert refused.value.parameter in body


def test_tools_may_be_ignored():
    make_params(chat(tools=[{"type": "function"}], tool_choice="none"), {})
    make_params(chat(tools=[], store=True), {})


def test_a_conversation_that_goes_on():
    first = ResponseBody(input="Hello", instructions="Be brief.")
    messages = messages_of(first)
    assert messages == [USER], "instructions are of one request"
    earlier = answered(first, messages, "Well")
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
    earlier = answered(body, messages_of(body), "ll")
    assert earlier == [USER, {"role": "assistant", "content": "Well"}]
