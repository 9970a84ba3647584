"""Owns conversations: what one may hold.

Knows nothing of token ids. What is written is marked, so that the tokenizer can tell
a turn marker that the format wrote from one that a message spells.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxspec.errors import RequestError, check_utf8, one_of, wrong_argument
from jaxspec.models.families import DEFAULT_TURNS

# Lone surrogates: UTF-8 has none, so no message can hold a mark of its own.
_FIRST_MARK = 0xD800
_NAME = re.compile(r"[\w.-]+")

# Roles of the model.
_ANSWERS = ("assistant", "model")

# Roles that clients of other models send.
_FOLDED = ("system", "developer")

# Parts of a content by their type, with the field that has the text: OpenAI's of chats
# and of responses.
_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}

# Of lists and dicts in messages and variables.
MAX_DEPTH = 64

Message = dict[str, Any]


class Marks:
    """Swaps the letters of special pieces for marks, one for one, and back.

    A marked text spells no special piece, alone or joined with other text. It keeps its
    length, spaces and lines, so that a template treats it as it would the text.
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
        """Mark only what a special piece can begin with."""
        return text.translate(self._on_first)

    def on_pieces(self, text: str) -> str:
        """Mark the special pieces that it spells, and nothing else."""
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
        roles: Named where a message has none; what is written decides on the others.

    Raises:
        RequestError: It is no list of messages, or a message has no role or no text.
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
    """Let the user say what a format has no turn for: a system's or developer's text.

    User texts in a row, of that or of the caller, become one turn, an empty line
    between them. What the format takes stays as it is.

    Args:
        messages: A checked conversation.
        is_refused: Whether the format refuses one.
    """
    given = {message["role"] for message in messages}
    folded = [
        role
        for role in _FOLDED
        if role in given and is_refused([_said_by(role), _said_by("user")])
    ]
    turns: list[Message] = []
    for message in messages:
        if message["role"] in folded:
            message = message | {"role": "user"}
        turns.append(message)
    roles = [message["role"] for message in turns]
    if ("user", "user") not in itertools.pairwise(roles):
        return turns
    if not folded and not is_refused([_said_by("user"), _said_by("user")]):
        return turns
    joined = turns[:1]
    for message in turns[1:]:
        if message["role"] != "user" or joined[-1]["role"] != "user":
            joined.append(message)
            continue
        texts = joined[-1]["content"].rstrip(), message["content"].lstrip()
        joined[-1] = joined[-1] | {"content": "\n\n".join(filter(None, texts))}
    return joined


def _said_by(role: str) -> Message:
    return {"role": role, "content": "x"}


def read_variables(variables: object) -> dict[str, Any]:
    """Check what a caller gave as `chat_template_kwargs`; return a copy.

    Raises:
        RequestError: It is no dict of plain data by name.
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
        content = ""  # an answer that only calls functions, or was cut off at once
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
    """Return a part's text, or what stands in its place."""
    if not isinstance(part, Mapping):
        return part
    field = _PARTS.get(str(part.get("type", "text")))
    return part.get(field) if field else None


def map_texts(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Copy plain data with its texts changed; names of roles and fields stay.

    Raises:
        RequestError: There is something in it that is no plain data, or too deep.
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
