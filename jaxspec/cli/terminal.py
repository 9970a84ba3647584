"""Owns what the command line shows of a text as it comes.

Accepted drafts in green, and lines that end between words.
"""

import os
import shutil
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxspec.outputs import DRAFTED, CompletionOutput

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_TAB = 8


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
    return [Piece(one.text, one.origin in DRAFTED) for one in output.token_origins]


class Printer:
    """Writes a text as it comes; on a terminal, accepted drafts are green.

    Attributes:
        has_colours: Whether it is a terminal that shows colours, and they are wanted.
        has_lines: Whether it is a terminal, whose lines are to end between words.
    """

    def __init__(self, file: Screen):
        self._file = file
        is_able = os.environ.get("TERM") != "dumb"
        self.has_lines = file.isatty() and is_able
        self.has_colours = self.has_lines and not os.environ.get("NO_COLOR")
        self.begin_line()

    def begin_line(self) -> None:
        """Say that the cursor is at the beginning of a line."""
        self._column = 0
        self._word: list[Piece] = []  # what the line ends with, letter by letter

    def show(self, pieces: Iterable[Piece]) -> None:
        # A full line leaves the cursor where terminals differ: the last place is free.
        width = shutil.get_terminal_size().columns - 1
        for text, is_draft in pieces:
            self._write(self._fitted(text, is_draft, width), is_draft)
        self._file.flush()

    def explain(self) -> None:
        """Say what the colour means, where there is one."""
        if self.has_colours:
            self.show([Piece("Green", True)])
            self.show([Piece(": drafts that the target accepted.\n", False)])

    def _write(self, text: str, is_draft: bool) -> None:
        is_green = is_draft and text and self.has_colours
        self._file.write(f"{_GREEN}{text}{_PLAIN}" if is_green else text)

    def _fitted(self, text: str, is_draft: bool, width: int) -> str:
        """A text as it is to be written now; a word that is too long is moved."""
        if not self.has_lines:
            return text
        fitted = ""
        for letter in text:
            columns = self._columns_of(letter)
            if letter == "\n" or (letter.isspace() and self._column + columns > width):
                fitted += "\n"
                self.begin_line()
                continue
            if self._column + columns > width:
                self._write(fitted, is_draft)
                fitted = ""
                self._move_word()
            fitted += letter
            self._column += columns
            # Scripts whose letters are wide may break anywhere.
            is_end = letter.isspace() or columns == 2
            self._word = [] if is_end else [*self._word, Piece(letter, is_draft)]
        return fitted

    def _move_word(self) -> None:
        """Go on in a new line, with the word that the old one ends with."""
        word = self._word
        columns = sum(self._columns_of(letter) for letter, _ in word)
        if columns == self._column:  # it has filled the line
            word, columns = [], 0
        if word:
            self._file.write(f"\x1b[{columns}D\x1b[K")
        self._file.write("\n")
        for letter, is_draft in word:
            self._write(letter, is_draft)
        self._column, self._word = columns, word

    def _columns_of(self, letter: str) -> int:
        if letter == "\t":
            return _TAB - self._column % _TAB
        if unicodedata.combining(letter) or unicodedata.category(letter) in (
            "Cf",
            "Cc",
        ):
            return 0
        return 2 if unicodedata.east_asian_width(letter) in ("F", "W") else 1
