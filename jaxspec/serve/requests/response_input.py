"""Converts a Responses request to a chat request."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxspec.errors import RequestError, refuse, wrong_argument
from jaxspec.serve.requests.protocol import (
    ChatBody,
    ChatTool,
    FunctionDefinition,
    GenerationBody,
    JsonSchemaFormat,
    ResponseBody,
    ResponseFormat,
    is_function,
)

LOGPROBS = "message.output_text.logprobs"
# Fields of chat requests that Responses requests do not have. They are ignored, as
# unknown fields are: a response has exactly one text, whose format is `text.format`.
_CHATS_ONLY = {"n", "max_tokens", "response_format", "stream_options", "echo"}
_CHATS_ONLY |= {"prompt_logprobs"}
_SHARED = GenerationBody.model_fields.keys() - _CHATS_ONLY
# Types of content parts, with the field that contains the text.
_TEXTS = {
    **dict.fromkeys(("input_text", "output_text", "text"), "text"),
    "refusal": "refusal",
}
# Item types that clients send back from other models' responses. They have no text, and
# are ignored.
_DROPPED = ("reasoning", "item_reference")
_CHOICES = "'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
_CHOICES += "{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}"

Message = dict[str, Any]


def as_chat(body: ResponseBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the chat request that is equivalent to a Responses request.

    Args:
        messages: Result of `messages_of`.

    Raises:
        RequestError: A field is invalid.
        UnsupportedError: A field asks for an unsupported feature.
    """
    tools, choice = _tools(body)
    refuse("conversation", body.conversation)
    refuse("prompt", body.prompt)
    refuse("use_beam_search", body.use_beam_search or None)
    is_cut = _is_cut(body)
    has_logprobs = LOGPROBS in (body.include or ())
    given = {name: getattr(body, name) for name in body.model_fields_set & _SHARED}
    extra = (body.model_extra or {}).items()
    # Unknown `guided_` fields are passed on, for `make_params` to refuse.
    given |= {name: value for name, value in extra if name.startswith("guided_")}
    if body.truncation == "auto":
        given["truncate_prompt_tokens"] = -1
    return ChatBody(
        **given,
        messages=_instructed(body.instructions, messages),
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body),
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        continue_final_message=is_cut,
        add_generation_prompt=not is_cut,
    )


def messages_of(
    body: ResponseBody, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the conversation as chat messages; a later request may continue it.

    Instructions are not part of it: they apply to one request.

    Args:
        earlier: Conversation of the response that this request continues.

    Raises:
        RequestError: The input is invalid.
    """
    items = _items(body)
    if not items:
        allowed = "a text, or a list of at least one message"
        raise wrong_argument(RequestError, "input", allowed, body.input)
    messages = list(earlier)
    for at, item in items:
        _add(messages, _message(f"input[{at}]", item, messages))
    return messages


def _items(body: ResponseBody) -> list[tuple[int, dict[str, Any]]]:
    """Return the input's items with their positions, without ignored types."""
    if isinstance(body.input, str):
        items = [{"role": "user", "content": body.input}] if body.input else []
        return list(enumerate(items))
    return [
        (at, item)
        for at, item in enumerate(body.input)
        if item.get("type") not in _DROPPED
    ]


def add_answer(
    body: ResponseBody,
    messages: Sequence[Message],
    text: str,
    calls: Sequence[dict[str, Any]] = (),
) -> list[Message]:
    """Return the conversation with the response's answer.

    The answer is appended to the last message if the last message is an unfinished
    answer.

    Args:
        calls: Results of `call_of`.
    """
    answer: Message = {"role": "assistant", "content": text}
    before = list(messages)
    if _is_cut(body):
        begun = before.pop()
        answer = begun | {"content": begun["content"] + text}
    if calls:
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *calls]
    return [*before, answer]


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the format of chat messages."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@contextlib.contextmanager
def flat_tool_names() -> Iterator[None]:
    """Rename tool fields in errors: a Responses tool has no nested "function".

    Raises:
        RequestError: The error raised within, with the field renamed.
    """
    try:
        yield
    except RequestError as error:
        wrapped = error.parameter or ""
        if not wrapped.startswith("tools["):
            raise
        flat = wrapped.replace("['function']", "")
        raise RequestError(
            str(error).replace(wrapped, flat), parameter=flat, value=error.value
        ) from error


def _tools(
    body: ResponseBody,
) -> tuple[list[ChatTool] | None, str | dict[str, Any] | None]:
    """Return the callable functions and `tool_choice`, in the format of a chat."""
    choice = body.tool_choice
    if choice == "none" or not (body.tools or choice not in ("auto", None)):
        return None, None
    tools = [
        _tool(f"tools[{at}]", tool)
        for at, tool in enumerate(body.tools or ())
        if is_function(tool)
    ]
    allowed = None
    if isinstance(choice, dict):
        choice, allowed = _choice(choice)
    elif choice not in ("auto", "required", None):
        raise wrong_argument(RequestError, "tool_choice", _CHOICES, choice)
    names = [tool.function.name for tool in tools]
    for name in allowed or ():
        if name not in names:
            hint = f"The tools are: {', '.join(map(repr, names)) or 'none'}."
            known = "names of functions among the tools"
            raise wrong_argument(RequestError, "tool_choice", known, name, hint)
    if allowed is not None:
        tools = [tool for tool in tools if tool.function.name in allowed]
    if not tools and choice == "auto":
        choice = None
    return tools or None, choice


def _tool(name: str, tool: dict[str, Any]) -> ChatTool:
    if tool.get("type") != "function":
        allowed = "{'type': 'function', 'name': ...}"
        raise wrong_argument(RequestError, name, allowed, tool)
    function = {key: value for key, value in tool.items() if key != "type"}
    for key, kinds, allowed in (
        ("name", str, "a string of at least one character"),
        ("description", str | None, "a string"),
        ("parameters", dict | None, "a JSON schema of an object"),
    ):
        value = function.get(key)
        if not isinstance(value, kinds) or value == "":
            raise wrong_argument(RequestError, f"{name}.{key}", allowed, value)
    return ChatTool(function=FunctionDefinition(**function))


def _choice(choice: dict[str, Any]) -> tuple[str | dict[str, Any], list[str] | None]:
    """Convert a `tool_choice` object to a chat's; also return the names it allows."""
    kind, name, mode = map(choice.get, ("type", "name", "mode"))
    if kind == "function" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}, None
    tools = choice.get("tools")
    is_list = isinstance(tools, list) and all(isinstance(one, dict) for one in tools)
    if kind == "allowed_tools" and mode in ("auto", "required") and tools and is_list:
        functions = [tool for tool in tools if tool.get("type") in ("function", None)]
        return str(mode), [str(tool.get("name")) for tool in functions]
    raise wrong_argument(RequestError, "tool_choice", _CHOICES, choice)


def _add(messages: list[Message], message: Message) -> None:
    """Append a message; merge consecutive parts of one answer if one has calls."""
    last = messages[-1] if messages else {}
    both = last, message
    is_answer = all(one.get("role") == "assistant" for one in both)
    if not is_answer or not any("tool_calls" in one for one in both):
        messages.append(message)
        return
    texts = [one["content"] for one in both]
    calls = [call for one in both for call in one.get("tool_calls", ())]
    content = "\n".join(filter(None, texts))
    messages[-1] = last | {"content": content, "tool_calls": calls}


def _instructed(
    instructions: str | None, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Prepend instructions to the first user message: Gemma has no system role."""
    first, *rest = messages
    if not instructions:
        return [first, *rest]
    if first["role"] != "user":
        return [{"role": "user", "content": instructions}, first, *rest]
    whole = f"{instructions}\n\n{first['content']}"
    return [first | {"content": whole}, *rest]


def _message(name: str, item: dict[str, Any], before: Sequence[Message]) -> Message:
    kind = item.get("type", "message")
    if kind == "function_call":
        return _call(name, item)
    if kind == "function_call_output":
        return _result(name, item, before)
    if kind != "message":
        allowed = "a message, {'role': ..., 'content': ...}, a 'function_call' or a "
        allowed += "'function_call_output'"
        raise wrong_argument(RequestError, name, allowed, item)
    role, content = item.get("role"), item.get("content")
    if content is None and role == "assistant":
        content = ""  # an answer that was cut off before its first token
    return {"role": role, "content": _content(f"{name}.content", content)}


def _call(name: str, item: dict[str, Any]) -> Message:
    called, arguments, call_id = (
        _string(f"{name}.{key}", item.get(key))
        for key in ("name", "arguments", "call_id")
    )
    arguments = arguments or "{}"
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        where, allowed = f"{name}.arguments", "a JSON object, as text"
        raise wrong_argument(RequestError, where, allowed, arguments)
    calls = [call_of(call_id, called, arguments)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(name: str, item: dict[str, Any], before: Sequence[Message]) -> Message:
    call_id = _string(f"{name}.call_id", item.get("call_id"))
    made = [call["id"] for one in before for call in one.get("tool_calls", ())]
    if call_id not in made:
        allowed = "the call_id of an earlier function_call"
        raise wrong_argument(RequestError, f"{name}.call_id", allowed, call_id)
    content = _content(f"{name}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_argument(RequestError, name, "a string", value)
    return value


def _content(name: str, content: object) -> str:
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_text(f"{name}[{at}]", part) for at, part in parts)
    if not isinstance(content, str):
        allowed = "a string or a list of {'type': 'input_text', 'text': ...}"
        raise wrong_argument(RequestError, name, allowed, content)
    return content


def _text(name: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        text = part.get(_TEXTS[part["type"]])
        if isinstance(text, str):
            return text
    allowed = "{'type': 'input_text', 'text': ...}"
    hint = "Only text is supported."
    raise wrong_argument(RequestError, name, allowed, part, hint)


def _is_cut(body: ResponseBody) -> bool:
    """Return whether the last message is a cut-off answer, which is continued."""
    items = _items(body)
    last = items[-1][1] if items else {}
    is_part = last.get("status") in ("in_progress", "incomplete")
    return is_part and last.get("role") == "assistant"


def _format(body: ResponseBody) -> ResponseFormat | None:
    wanted = body.text and body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.json_schema is None:
        allowed = "a JSON schema"
        raise wrong_argument(RequestError, "text.format.schema", allowed, None)
    wrapped = JsonSchemaFormat(schema=wanted.json_schema)
    return ResponseFormat(type="json_schema", json_schema=wrapped)
