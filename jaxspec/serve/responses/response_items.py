"""Owns the items of a response, messages and function calls, and their stream events.

Responses that are not streamed are assembled from the same items.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

# An event's name without the prefix "response.", and its fields.
ItemEvent = tuple[str, dict[str, Any]]


class Token(NamedTuple):
    """A generated token with its requested details.

    Attributes:
        content: Its text in UTF-8, perhaps part of a character.
        logprob: Its log-probability in the format of chats, if requested.
        origin: Its entry of `token_origins`, if requested.
    """

    content: bytes
    logprob: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None


class Item(ABC):
    """One entry of a response's `output`."""

    def __init__(self, item_id: str, index: int):
        """Begin an item; `index` is its position in `output`."""
        self._id, self._index = item_id, index

    @abstractmethod
    def as_json(self, status: str) -> dict[str, Any]:
        """Write the item so far; `status` is "in_progress" before its end."""

    @abstractmethod
    def opening(self) -> Iterator[ItemEvent]:
        """Yield the events that announce the item."""

    @abstractmethod
    def closing(self, status: str) -> Iterator[ItemEvent]:
        """Yield the final events, with the complete item."""

    def _event(self, name: str, /, **content: Any) -> ItemEvent:
        return name, {"output_index": self._index, **content}


class Message(Item):
    """A message.

    Attributes:
        text: Its text so far.
    """

    def __init__(self, item_id: str, index: int, *, has_origins: bool):
        """Begin a message; `has_origins` adds `token_origins` to it."""
        super().__init__(item_id, index)
        self._has_origins = has_origins
        self.text = ""
        self._logprobs: list[Any] = []
        self._origins: list[Any] = []

    def add(self, words: str, tokens: list[Token]) -> ItemEvent | None:
        """Append text and tokens; return the event, None if nothing is new."""
        logprobs = [one.logprob for one in tokens if one.logprob is not None]
        origins = [one.origin for one in tokens if one.origin is not None]
        self.text += words
        self._logprobs += logprobs
        self._origins += origins
        if not (words or logprobs or origins):
            return None
        content: dict[str, Any] = {"delta": words, "logprobs": logprobs}
        if self._has_origins:
            content["token_origins"] = origins
        return self._part_event("output_text.delta", **content)

    def as_json(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, "type": "message", "role": "assistant"}
        content = [] if status == "in_progress" else [self._part()]
        return item | {"status": status, "content": content}

    def opening(self) -> Iterator[ItemEvent]:
        yield self._event("output_item.added", item=self.as_json("in_progress"))
        yield self._part_event("content_part.added", part=self._part())

    def closing(self, status: str) -> Iterator[ItemEvent]:
        text = {"text": self.text, "logprobs": self._logprobs}
        yield self._part_event("output_text.done", **text)
        yield self._part_event("content_part.done", part=self._part())
        yield self._event("output_item.done", item=self.as_json(status))

    def _part(self) -> dict[str, Any]:
        part = {"type": "output_text", "annotations": []}
        part |= {"text": self.text, "logprobs": list(self._logprobs)}
        if self._has_origins:
            part["token_origins"] = list(self._origins)
        return part

    def _part_event(self, name: str, **content: Any) -> ItemEvent:
        return self._event(name, item_id=self._id, content_index=0, **content)


class Call(Item):
    """A function call.

    Attributes:
        call_id: The id by which its result refers to it.
        name: Name of the function.
        arguments: JSON so far.
    """

    def __init__(self, item_id: str, index: int, *, call_id: str, name: str):
        """Begin a call."""
        super().__init__(item_id, index)
        self.call_id, self.name, self.arguments = call_id, name, ""

    def add(self, arguments: str) -> ItemEvent:
        """Append arguments; return the event."""
        self.arguments += arguments
        name = "function_call_arguments.delta"
        return self._event(name, item_id=self._id, delta=arguments)

    def as_json(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, "type": "function_call", "call_id": self.call_id}
        item |= {"name": self.name, "arguments": self.arguments}
        return item | {"status": status}

    def opening(self) -> Iterator[ItemEvent]:
        yield self._event("output_item.added", item=self.as_json("in_progress"))

    def closing(self, status: str) -> Iterator[ItemEvent]:
        whole = {"name": self.name, "arguments": self.arguments}
        name = "function_call_arguments.done"
        yield self._event(name, item_id=self._id, **whole)
        yield self._event("output_item.done", item=self.as_json(status))


def take_tokens(waiting: list[Token], words: str) -> list[Token]:
    """Remove and return the tokens of some text, and all tokens before them.

    A tool parser holds text back until it cannot be a call, so that the text comes
    later than its tokens. If the text is not that of the tokens, because the parser has
    changed it, returns all of them.

    Args:
        waiting: Tokens without an event so far; the returned ones are removed.
    """
    spelled = b"".join(one.content for one in waiting)
    start = spelled.find(words.encode())
    end = len(spelled) if start < 0 else start + len(words.encode())
    taken: list[Token] = []
    place = 0
    while waiting and place < end:
        token = waiting.pop(0)
        place += len(token.content)
        if place > start:
            taken.append(token)
    return taken
