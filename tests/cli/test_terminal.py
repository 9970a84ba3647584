"""What is shown of a text as it comes."""

import io
import re

import pytest

from jaxspec.cli.terminal import Piece, Printer, pieces_of
from jaxspec.outputs import CompletionOutput, TokenOrigin

GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)
PIECES = [Piece("He", False), Piece("l", True), Piece("", True), Piece("lo", False)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_drafts_are_green_on_a_terminal():
    screen = Terminal()
    Printer(screen).show(PIECES)
    assert screen.getvalue() == "He\x1b[32ml\x1b[0mlo"
    Printer(screen).explain()
    assert screen.getvalue().endswith(
        "\x1b[32mGreen\x1b[0m: drafts that the target accepted.\n"
    )


@pytest.mark.parametrize("name", ["file", "NO_COLOR", "dumb"])
def test_no_colours_where_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv("NO_COLOR", "1" if name == "NO_COLOR" else "")
    monkeypatch.setenv("TERM", "dumb" if name == "dumb" else "xterm")
    screen = io.StringIO() if name == "file" else Terminal()
    printer = Printer(screen)
    printer.show(PIECES)
    printer.explain()
    assert screen.getvalue() == "Hello"


def test_pieces_are_cut_by_who_drew_them():
    output = CompletionOutput(index=0, text="abcd", token_ids=[1, 2, 3])
    assert pieces_of(output) == [("abcd", False)]
    told = [("ab", "draft"), ("c", "recovered"), ("d", "target")]
    output.token_origins = [TokenOrigin(*one, 1) for one in told]
    assert pieces_of(output) == [("ab", True), ("c", False), ("d", False)]
