"""Owns the items that a response is made of, words and calls, and what is told of them.

An item grows while it is streamed; told whole it is the same at its end.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

# An event's name, behind "response.", and what it says.
Told = tuple[str, dict[str, Any]]


class Token(NamedTuple):
    """What is told of one token of words.

    Attributes:
        content: What it spells, in UTF-8; of a character perhaps a part.
        logprob: The entry of its log-probability, where that is wanted.
        origin: Who drew it, where that is wanted.
    """

    content: bytes
    logprob: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None


class Item(ABC):
    """One entry of a response's `output`."""

    def __init__(self, item_id: str, index: int):
        """Begin one; `index` is its place in `output`."""
        self._id, self._index = item_id, index

    @abstractmethod
    def as_json(self, status: str) -> dict[str, Any]:
        """Write what there is of it: its status is "in_progress" before its end."""

    @abstractmethod
    def opening(self) -> Iterator[Told]:
        """Say that it begins."""

    @abstractmethod
    def closing(self, status: str) -> Iterator[Told]:
        """Say it whole, at its end."""

    def _told(self, name: str, /, **content: Any) -> Told:
        return name, {"output_index": self._index, **content}


class Message(Item):
    """Words.

    Attributes:
        text: All of them so far.
    """

    def __init__(self, item_id: str, index: int, *, has_origins: bool):
        """Begin a message, which may tell who drew each of its tokens."""
        super().__init__(item_id, index)
        self._has_origins = has_origins
        self.text = ""
        self._logprobs: list[Any] = []
        self._origins: list[Any] = []

    def add(self, words: str, tokens: list[Token]) -> Told | None:
        """Go on; return what is told of it, if anything is new."""
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
        return self._of_part("output_text.delta", **content)

    def as_json(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, "type": "message", "role": "assistant"}
        content = [] if status == "in_progress" else [self._part()]
        return item | {"status": status, "content": content}

    def opening(self) -> Iterator[Told]:
        yield self._told("output_item.added", item=self.as_json("in_progress"))
        yield self._of_part("content_part.added", part=self._part())

    def closing(self, status: str) -> Iterator[Told]:
        text = {"text": self.text, "logprobs": self._logprobs}
        yield self._of_part("output_text.done", **text)
        yield self._of_part("content_part.done", part=self._part())
        yield self._told("output_item.done", item=self.as_json(status))

    def _part(self) -> dict[str, Any]:
        part = {"type": "output_text", "annotations": []}
        part |= {"text": self.text, "logprobs": list(self._logprobs)}
        if self._has_origins:
            part["token_origins"] = list(self._origins)
        return part

    def _of_part(self, name: str, **content: Any) -> Told:
        return self._told(name, item_id=self._id, content_index=0, **content)


class Call(Item):
    """A call of a function.

    Attributes:
        call_id: What its result will name it by.
        name: Of the function.
        arguments: As JSON, so far.
    """

    def __init__(self, item_id: str, index: int, *, call_id: str, name: str):
        """Begin a call."""
        super().__init__(item_id, index)
        self.call_id, self.name, self.arguments = call_id, name, ""

    def add(self, arguments: str) -> Told:
        """Go on; return what is told of it."""
        self.arguments += arguments
        name = "function_call_arguments.delta"
        return self._told(name, item_id=self._id, delta=arguments)

    def as_json(self, status: str) -> dict[str, Any]:
        item = {"id": self._id, "type": "function_call", "call_id": self.call_id}
        item |= {"name": self.name, "arguments": self.arguments}
        return item | {"status": status}

    def opening(self) -> Iterator[Told]:
        yield self._told("output_item.added", item=self.as_json("in_progress"))

    def closing(self, status: str) -> Iterator[Told]:
        whole = {"name": self.name, "arguments": self.arguments}
        name = "function_call_arguments.done"
        yield self._told(name, item_id=self._id, **whole)
        yield self._told("output_item.done", item=self.as_json(status))


def take_tokens(waiting: list[Token], words: str) -> list[Token]:
    """Take those that spell some words, and with them what was said before these.

    Words of an answer that calls are told when it is known that they are no call: later
    than their tokens came. Where a parser wrote words of its own, all are taken.

    Args:
        waiting: Tokens of which nothing is told yet; loses what is taken.
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
