"""Owns the way from a request for a response to the chat that it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import RequestError, UnsupportedError, refuse, wrong_argument
from jaxspec.serve.protocol import (
    ChatBody,
    GenerationBody,
    JsonSchemaFormat,
    ResponseBody,
    ResponseFormat,
)

LOGPROBS = "message.output_text.logprobs"
# Unknown to responses, and ignored like anything unknown: they make one text, which
# `text.format` shapes.
_CHATS_ONLY = {"n", "max_tokens", "response_format", "stream_options", "echo"}
_CHATS_ONLY |= {"prompt_logprobs"}
_SHARED = GenerationBody.model_fields.keys() - _CHATS_ONLY
_TEXTS = ("input_text", "output_text", "text")


def as_chat(body: ResponseBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the chat whose answer is the response.

    Args:
        messages: What `messages_of` gives.

    Raises:
        RequestError: The input cannot be read.
        UnsupportedError: It asks for what there is not.
    """
    if body.tools and body.tool_choice != "none":
        raise UnsupportedError(
            "tools=[...] is not supported in responses: ask /v1/chat/completions, or "
            "pass tool_choice='none' to ignore them.",
            parameter="tools",
            value=body.tools,
        )
    refuse("conversation", body.conversation)
    refuse("prompt", body.prompt)
    is_cut = _is_cut(body)
    has_logprobs = LOGPROBS in (body.include or ())
    given = {name: getattr(body, name) for name in body.model_fields_set & _SHARED}
    extra = (body.model_extra or {}).items()
    # Those that do not exist are refused where chats are read.
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
        continue_final_message=is_cut,
        add_generation_prompt=not is_cut,
    )


def messages_of(
    body: ResponseBody, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The conversation as whoever goes on from the response would continue it.

    Instructions are not part of it: they are of one request.

    Args:
        earlier: That of the response from which this one goes on.

    Raises:
        RequestError: The input cannot be read.
    """
    if not body.input:
        allowed = "a text, or a list of at least one message"
        raise wrong_argument(RequestError, "input", allowed, body.input)
    if isinstance(body.input, str):
        return [*earlier, {"role": "user", "content": body.input}]
    return [
        *earlier,
        *(_message(f"input[{at}]", item) for at, item in enumerate(body.input)),
    ]


def answered(
    body: ResponseBody, messages: Sequence[dict[str, Any]], text: str
) -> list[dict[str, Any]]:
    """The conversation with the response's own text, which may end a message begun."""
    if not _is_cut(body):
        return [*messages, {"role": "assistant", "content": text}]
    *before, last = messages
    return [*before, last | {"content": last["content"] + text}]


def _instructed(
    instructions: str | None, messages: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Gemma 2 has no system's turn: what it is told opens the user's first."""
    first, *rest = messages
    if not instructions:
        return [first, *rest]
    if first["role"] != "user":
        return [{"role": "user", "content": instructions}, first, *rest]
    whole = f"{instructions}\n\n{first['content']}"
    return [first | {"content": whole}, *rest]


def _message(name: str, item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        allowed = "a message, {'role': ..., 'content': ...}"
        hint = "Calls are of /v1/chat/completions."
        raise wrong_argument(RequestError, name, allowed, item, hint)
    content = item.get("content")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_text(f"{name}.content[{at}]", part) for at, part in parts)
    if not isinstance(content, str):
        allowed = "a string or a list of {'type': 'input_text', 'text': ...}"
        raise wrong_argument(RequestError, f"{name}.content", allowed, content)
    return {"role": item.get("role"), "content": content}


def _text(name: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
    allowed = "{'type': 'input_text', 'text': ...}"
    hint = "Gemma 2 reads text only."
    raise wrong_argument(RequestError, name, allowed, part, hint)


def _is_cut(body: ResponseBody) -> bool:
    """Whether the last message is an answer that was cut off: the model goes on."""
    last = body.input[-1] if isinstance(body.input, list) else {}
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
