"""Validates conversations, and marks turn markers in the text of messages.

Independent of token ids. The marks let the tokenizer distinguish turn markers that
the chat format writes from turn markers in a message's text.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxspec.errors import RequestError, check_utf8, one_of, wrong_argument
from jaxspec.models.families import DEFAULT_TURNS

# Marks are lone surrogates from this code point on. UTF-8 has none, so no message can
# contain a mark.
_FIRST_MARK = 0xD800
_NAME = re.compile(r"[\w.-]+")

# Role names of the model's own messages.
_ANSWERS = ("assistant", "model")

# Roles that are merged into the user's turn if the format has no turn for them.
_FOLDED = ("system", "developer")

# Types of content parts of OpenAI's chats and responses, with the field that contains
# the text.
_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}

# Maximum nesting of lists and dicts in messages and template variables.
MAX_DEPTH = 64

Message = dict[str, Any]


class Marks:
    """Replaces letters of special pieces by marks, and marks by the letters again.

    A marked text contains no special piece, even when joined with other text. Length,
    spaces and lines are unchanged, so that a template treats it like the text itself.
    """

    def __init__(self, special: Iterable[str]):
        pieces = sorted(special, key=len, reverse=True)
        self.split = re.compile(f"({'|'.join(map(re.escape, pieces))})").split
        letters = "".join(sorted(set("".join("".join(pieces).split()))))
        marks = "".join(chr(_FIRST_MARK + place) for place in range(len(letters)))
        self._on = str.maketrans(letters, marks)
        self._off = str.maketrans(marks, letters)
        first = {ord(piece[0]) for piece in pieces}
        self._on_first = {key: mark for key, mark in self._on.items() if key in first}

    def on(self, text: str) -> str:
        return text.translate(self._on)

    def on_first(self, text: str) -> str:
        """Mark only letters with which a special piece can begin."""
        return text.translate(self._on_first)

    def on_pieces(self, text: str) -> str:
        """Mark only the special pieces that the text contains."""
        parts = self.split(text)
        parts[1::2] = map(self.on, parts[1::2])
        return "".join(parts)

    def off(self, text: str) -> str:
        return text.translate(self._off)


def read_messages(
    messages: object, roles: Iterable[str] = DEFAULT_TURNS.roles
) -> list[Message]:
    """Check a conversation; return copies whose content is one string.

    Args:
        roles: Roles to name in the error for a message without one. Whether a role is
            allowed is decided when the conversation is rendered.

    Raises:
        RequestError: `messages` is not a list of messages, or a message has no role or
            text.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        allowed = "a list of at least one {'role': ..., 'content': ...}"
        raise wrong_argument(RequestError, "messages", allowed, messages)
    return [
        _read_message(f"messages[{position}]", message, roles)
        for position, message in enumerate(messages)
    ]


def fold_turns(
    messages: list[Message], is_refused: Callable[[list[Message]], bool]
) -> list[Message]:
    """Merge system and developer messages into user turns if the format needs that.

    Consecutive user messages, original or converted, then become one turn, separated
    by an empty line. A conversation that the format accepts is unchanged.

    Args:
        messages: A checked conversation.
        is_refused: Returns whether the format refuses a conversation.
    """
    given = {message["role"] for message in messages}
    folded = [
        role
        for role in _FOLDED
        if role in given and is_refused([_message_by(role), _message_by("user")])
    ]
    turns: list[Message] = []
    for message in messages:
        if message["role"] in folded:
            message = message | {"role": "user"}
        turns.append(message)
    roles = [message["role"] for message in turns]
    if ("user", "user") not in itertools.pairwise(roles):
        return turns
    if not folded and not is_refused([_message_by("user"), _message_by("user")]):
        return turns
    joined = turns[:1]
    for message in turns[1:]:
        if message["role"] != "user" or joined[-1]["role"] != "user":
            joined.append(message)
            continue
        texts = joined[-1]["content"].rstrip(), message["content"].lstrip()
        joined[-1] = joined[-1] | {"content": "\n\n".join(filter(None, texts))}
    return joined


def _message_by(role: str) -> Message:
    return {"role": role, "content": "x"}


def read_variables(variables: object) -> dict[str, Any]:
    """Check `chat_template_kwargs`; return a copy.

    Raises:
        RequestError: The value is not a dict of plain data by name.
    """
    name, allowed = "chat_template_kwargs", "a dict of plain data by name"
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(key, str) and key.isidentifier() for key in variables
    ):
        raise wrong_argument(RequestError, name, allowed, variables)
    try:
        return map_texts(variables, lambda text: check_utf8(RequestError, name, text))
    except RequestError as error:
        raise RequestError(
            f"{name} must be {allowed}: {error}", parameter=name, value=variables
        ) from error


def _read_message(name: str, message: object, roles: Iterable[str]) -> Message:
    if not isinstance(message, Mapping):
        allowed = "a dict with 'role' and 'content'"
        raise wrong_argument(RequestError, name, allowed, message)
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_argument(RequestError, f"{name}['role']", one_of(roles), role)
    content = message.get("content")
    if content is None and (role in _ANSWERS or message.get("tool_calls")):
        content = ""  # an answer that has only calls, or was cut off at its start
    content = _content(f"{name}['content']", content)
    whole = {**message, "content": content}
    return map_texts(whole, lambda text: check_utf8(RequestError, name, text))


def _content(name: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        texts = [_part(part) for part in content]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    allowed = "a string or a list of {'type': 'text', 'text': ...}"
    raise wrong_argument(RequestError, name, allowed, content)


def _part(part: object) -> object:
    """Return a part's text, or another object if it has none."""
    if not isinstance(part, Mapping):
        return part
    field = _PARTS.get(str(part.get("type", "text")))
    return part.get(field) if field else None


def map_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Copy plain data with its texts changed, except names of roles and fields.

    Raises:
        RequestError: The data contain other types, or are nested too deep.
    """
    if depth > MAX_DEPTH:
        allowed = f"nested {MAX_DEPTH} deep at most"
        raise wrong_argument(RequestError, "messages", allowed, "more")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            is_name = key in ("role", "type") and _NAME.fullmatch(str(item))
            key = str(key) if _NAME.fullmatch(str(key)) else change(str(key))
            copy[key] = item if is_name else map_texts(item, change, depth + 1)
        return copy
    if isinstance(value, (list, tuple)):
        return [map_texts(item, change, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    allowed = "made of dicts, lists, strings and numbers"
    raise wrong_argument(RequestError, "messages", allowed, value)
