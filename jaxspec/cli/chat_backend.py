"""What a chat needs of an engine or a server: answers in parts, and an error."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxspec.cli.terminal import Piece
from jaxspec.command_line import CommandError

Message = dict[str, str]
# Sampling fields of a request, by their names in the server's API.
Fields = dict[str, Any]


class BackendError(CommandError):
    """A request failed, or the server did not respond."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A new part of an answer.

    Attributes:
        finish_reason: Set in the last part.
        metrics: The server's `metrics`, in the last part if the server returns them.
    """

    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: dict[str, Any] | None = None


Parts = Generator[Part, None, None]


@runtime_checkable
class ChatBackend(Protocol):
    """Answers conversations."""

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        """Answer the last message; closing the generator early ends the request.

        Raises:
            ArgumentError: The engine refuses the request.
            BackendError: The server refuses it or cannot be reached.
        """
        ...

    def close(self) -> None: ...
