"""Owns what the command line shows of a text as it comes: accepted drafts in green."""

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.outputs import CompletionOutput

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@runtime_checkable
class Screen(Protocol):
    """The part of a text file that is needed to write to it."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class Piece(NamedTuple):
    """What one token added to a text, or several."""

    text: str
    is_draft: bool


def pieces_of(output: CompletionOutput) -> list[Piece]:
    """Cut a new part of a text by who drew it, if the output tells that."""
    if output.token_origins is None:
        return [Piece(output.text, False)]
    return [Piece(one.text, one.origin == "draft") for one in output.token_origins]


class Printer:
    """Writes a text as it comes; on a terminal, accepted drafts are green."""

    def __init__(self, file: Screen):
        self._file = file
        self.has_colours = (
            file.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )

    def show(self, pieces: Iterable[Piece]) -> None:
        for text, is_draft in pieces:
            is_green = is_draft and text and self.has_colours
            self._file.write(f"{_GREEN}{text}{_PLAIN}" if is_green else text)
        self._file.flush()

    def explain(self) -> None:
        """Say what the colour means, where there is one."""
        if self.has_colours:
            self.show([Piece("Green", True)])
            self.show([Piece(": drafts that the target accepted.\n", False)])
