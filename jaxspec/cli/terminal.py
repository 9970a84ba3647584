"""Prints streamed text: accepted drafts in green, lines wrapped at words."""

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
    """Interface of the text file that a `Printer` writes to."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


class Piece(NamedTuple):
    """Text added by one token, or by several with the same origin."""

    text: str
    is_draft: bool


def pieces_of(output: CompletionOutput) -> list[Piece]:
    """Split a new part of a text by the origin of its tokens, if that is known."""
    if output.token_origins is None:
        return [Piece(output.text, False)]
    return [Piece(one.text, one.origin in DRAFTED) for one in output.token_origins]


class Printer:
    """Prints streamed text; on a terminal, accepted drafts are green.

    Attributes:
        has_colors: Whether the file is a terminal with colors, without NO_COLOR.
        has_lines: Whether the file is a terminal, whose lines are wrapped at words.
    """

    def __init__(self, file: Screen):
        self._file = file
        is_able = os.environ.get("TERM") != "dumb"
        self.has_lines = file.isatty() and is_able
        self.has_colors = self.has_lines and not os.environ.get("NO_COLOR")
        self.begin_line()

    def begin_line(self) -> None:
        """Record that the cursor is at the beginning of a line."""
        self._column = 0
        self._word: list[Piece] = []  # the last word of the line, letter by letter

    def show(self, pieces: Iterable[Piece]) -> None:
        # The last column stays free, because terminals differ in where they put the
        # cursor after a full line.
        width = shutil.get_terminal_size().columns - 1
        for text, is_draft in pieces:
            self._write(self._fitted(text, is_draft, width), is_draft)
        self._file.flush()

    def explain(self) -> None:
        """Print the meaning of the color, if colors are used."""
        if self.has_colors:
            self.show([Piece("Green", True)])
            self.show([Piece(": drafts that the target accepted.\n", False)])

    def _write(self, text: str, is_draft: bool) -> None:
        is_green = is_draft and text and self.has_colors
        self._file.write(f"{_GREEN}{text}{_PLAIN}" if is_green else text)

    def _fitted(self, text: str, is_draft: bool, width: int) -> str:
        """Return the text to write; move a word that does not fit to the next line."""
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
            # Lines may break after any two-column letter (as in Chinese), not only at
            # spaces.
            is_end = letter.isspace() or columns == 2
            self._word = [] if is_end else [*self._word, Piece(letter, is_draft)]
        return fitted

    def _move_word(self) -> None:
        """Begin a new line, and move the last word of the old one to it."""
        word = self._word
        columns = sum(self._columns_of(letter) for letter, _ in word)
        if columns == self._column:  # the word fills the whole line
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
