"""Converts a request of Anthropic's Messages API to a chat request."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxspec.errors import RequestError, wrong_argument
from jaxspec.serve.requests.protocol import (
    ChatBody,
    ChatTool,
    Entries,
    FunctionDefinition,
    GenerationBody,
    JsonSchemaFormat,
    ResponseFormat,
    is_function,
)
from jaxspec.serve.requests.response_input import call_of

Message = dict[str, Any]

# Thoughts of other models, which clients send back. The prompt leaves them out.
_DROPPED = ("thinking", "redacted_thinking")
_CHOICES = "{'type': 'auto'}, {'type': 'any'}, {'type': 'tool', 'name': ...} or "
_CHOICES += "{'type': 'none'}"
_SHARED = GenerationBody.model_fields.keys() - {"stop", "max_tokens", "n", "echo"}


class CountBody(GenerationBody):
    """Body of POST /v1/messages/count_tokens; the model's parameters have no effect.

    `thinking`, `metadata`, `service_tier`, `effort` in `output_config` and the
    `cache_control` of blocks are accepted, and have no effect: Gemma does not think,
    and prefixes are always cached.
    """

    messages: Entries[dict[str, Any]] = Field(min_length=1)
    system: str | Entries[dict[str, Any]] | None = None
    tools: Entries[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    service_tier: str | None = None


class MessagesBody(CountBody):
    """Body of POST /v1/messages: Anthropic's fields, and vLLM's for sampling."""

    # Without a default, unlike in other requests: Anthropic's API requires it.
    max_tokens: int = Field(ge=1)  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    stop_sequences: Entries[str] | None = None


def as_chat(body: CountBody) -> ChatBody:
    """Return the chat request that is equivalent to a Messages request.

    An assistant message at the end is continued, as in Anthropic's API.

    Raises:
        RequestError: A field is invalid, or has content other than text.
    """
    messages = _messages(body)
    is_continued = messages[-1]["role"] == "assistant"
    if is_continued and messages[-1].get("tool_calls"):
        allowed = "a last message with text, or a 'user' message with tool results"
        raise wrong_argument(RequestError, "messages", allowed, body.messages[-1])
    tools, choice, is_parallel = _tools(body)
    given = {name: getattr(body, name) for name in body.model_fields_set & _SHARED}
    wanted = _format(body)
    if wanted is not None:
        if body.response_format is not None:
            raise RequestError(
                "`output_config` and `response_format` both have a format: leave one "
                "out.",
                parameter="output_config",
            )
        given["response_format"] = wanted
    return ChatBody(
        **given,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=getattr(body, "stop_sequences", None) or body.stop,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        continue_final_message=is_continued,
        add_generation_prompt=not is_continued,
    )


def _format(body: CountBody) -> ResponseFormat | None:
    """Return the format of `output_config`, which constrains the answer to a schema."""
    wanted = (body.output_config or {}).get("format")
    if wanted is None:
        return None
    schema = wanted.get("schema") if isinstance(wanted, dict) else None
    if not isinstance(schema, dict) or wanted.get("type") != "json_schema":
        name, allowed = "output_config.format", "{'type': 'json_schema', 'schema': ...}"
        raise wrong_argument(RequestError, name, allowed, wanted)
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(schema=schema)
    )


def _messages(body: CountBody) -> list[Message]:
    """Return the messages of the chat; turns of one role in a row become one."""
    system = _text("system", body.system)
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(body.messages):
        for one in _split(f"messages[{at}]", message):
            last = found[-1]["role"] if found else None
            if one["role"] == last and last in ("user", "assistant"):
                found[-1] = _merged(found[-1], one)
            else:
                found.append(one)
    return found


def _merged(one: Message, other: Message) -> Message:
    content = "\n".join(filter(None, (one["content"], other["content"])))
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return one | {"content": content} | ({"tool_calls": calls} if calls else {})


def _split(name: str, message: Message) -> Iterator[Message]:
    """Yield a chat message for each tool result of a message, and one for the rest."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        allowed = "'user' or 'assistant'"
        raise wrong_argument(RequestError, f"{name}.role", allowed, role)
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        allowed = "a text or a list of blocks"
        raise wrong_argument(RequestError, f"{name}.content", allowed, content)
    texts, calls, has_results = [], [], False
    for at, block in enumerate(content):
        where = f"{name}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _DROPPED:
            continue
        if kind == "tool_result" and role == "user":
            has_results = True
            yield _result(where, block)
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(where, block))
        else:
            texts.append(_block_text(where, block))
    if texts or calls or not has_results:
        found: Message = {"role": role, "content": "\n".join(texts)}
        yield found | ({"tool_calls": calls} if calls else {})


def _result(name: str, block: dict[str, Any]) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        allowed = "the id of a tool_use block"
        raise wrong_argument(RequestError, f"{name}.tool_use_id", allowed, call_id)
    content = _text(f"{name}.content", block.get("content"))
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _call(name: str, block: dict[str, Any]) -> dict[str, Any]:
    for key, kind, allowed in (
        ("id", str, "a string"),
        ("name", str, "a string"),
        ("input", dict, "an object"),
    ):
        if not isinstance(block.get(key), kind):
            raise wrong_argument(RequestError, f"{name}.{key}", allowed, block.get(key))
    return call_of(block["id"], block["name"], json.dumps(block["input"]))


def _text(name: str, content: str | list[Any] | None) -> str:
    """Return the text of a field that has a text or a list of text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        allowed = "a text or a list of blocks"
        raise wrong_argument(RequestError, name, allowed, content)
    return "\n".join(
        _block_text(f"{name}[{at}]", one) for at, one in enumerate(content)
    )


def _block_text(name: str, block: object) -> str:
    if isinstance(block, dict) and block.get("type") == "text":
        text = block.get("text")
        if isinstance(text, str):
            return text
    allowed = "{'type': 'text', 'text': ...}"
    hint = "Images and documents are not supported."
    raise wrong_argument(RequestError, name, allowed, block, hint)


def _tools(
    body: CountBody,
) -> tuple[list[ChatTool] | None, str | dict[str, Any] | None, bool | None]:
    """Return tools, `tool_choice` and `parallel_tool_calls` of the chat.

    Tools that Anthropic's servers run, such as a web search, are left out.
    """
    choice = body.tool_choice or {}
    tools = [
        _tool(f"tools[{at}]", tool)
        for at, tool in enumerate(body.tools or ())
        if tool.get("type") in (None, "custom") or is_function(tool)
    ]
    kind, name = choice.get("type", "auto"), choice.get("name")
    wanted: str | dict[str, Any] | None
    match kind:
        case "auto":
            wanted = "auto" if tools else None
        case "any":
            wanted = "required"
        case "none":
            wanted = "none" if tools else None
        case "tool" if isinstance(name, str):
            wanted = {"type": "function", "function": {"name": name}}
        case _:
            raise wrong_argument(RequestError, "tool_choice", _CHOICES, choice)
    is_serial = choice.get("disable_parallel_tool_use")
    return tools or None, wanted, None if is_serial is None else not is_serial


def _tool(name: str, tool: dict[str, Any]) -> ChatTool:
    for key, kinds, allowed in (
        ("name", str, "a string of at least one character"),
        ("description", str | None, "a string"),
        ("input_schema", dict, "a JSON schema of an object"),
    ):
        value = tool.get(key)
        if not isinstance(value, kinds) or value == "":
            raise wrong_argument(RequestError, f"{name}.{key}", allowed, value)
    return ChatTool(
        function=FunctionDefinition(
            name=tool["name"],
            description=tool.get("description"),
            parameters=tool["input_schema"],
        )
    )
