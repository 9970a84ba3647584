"""Owns the way from a request for a response to the chat that it is.

Nothing is kept between requests: the whole conversation comes with each. `store` is
ignored, as in vLLM, whose clients send it by default; what needs it is refused.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import RequestError, UnsupportedError, refuse, wrong_argument
from jaxspec.serve.errors import ResponseNotFoundError
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


def as_chat(body: ResponseBody) -> ChatBody:
    """Return the chat whose answer is the response.

    Raises:
        RequestError: The input cannot be read.
        ResponseNotFoundError: It goes on from an earlier response.
        UnsupportedError: It asks for what there is not.
    """
    if body.previous_response_id is not None:
        raise ResponseNotFoundError(body.previous_response_id)
    if body.background:
        raise UnsupportedError(
            "background=True is not supported: responses are not stored, so none could "
            "be fetched later. Leave it out; stream=True tells the text as it comes.",
            parameter="background",
            value=True,
        )
    if not body.input:
        allowed = "a text, or a list of at least one message"
        raise wrong_argument(RequestError, "input", allowed, body.input)
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
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body),
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        tools=body.tools or None,
        tool_choice=body.tool_choice,
        continue_final_message=is_cut,
        add_generation_prompt=not is_cut,
    )


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    if isinstance(body.input, str):
        messages = [{"role": "user", "content": body.input}]
    else:
        messages = [
            _message(f"input[{at}]", item) for at, item in enumerate(body.input)
        ]
    if body.instructions:
        # Gemma 2 has no system's turn: what it is told opens the user's first.
        opening = body.instructions
        if messages[0]["role"] == "user":
            opening += "\n\n" + messages.pop(0)["content"]
        messages.insert(0, {"role": "user", "content": opening})
    return messages


def _message(name: str, item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        allowed = "a message, {'role': ..., 'content': ...}"
        hint = "Gemma 2 has no form for calls, and no response is stored."
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
