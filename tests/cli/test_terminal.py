"""Printing of streamed text."""

import io
import re

import pytest

from jaxspec.cli.terminal import Piece, Printer, pieces_of
from jaxspec.outputs import CompletionOutput, TokenOrigin
from tests.support.terminals import Terminal

PIECES = [Piece("He", False), Piece("l", True), Piece("", True), Piece("lo", False)]


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", ["file", "NO_COLOR", "dumb"])
def test_no_colors_without_terminal_or_with_no_color(monkeypatch, name: str):
    monkeypatch.setenv("NO_COLOR", "1" if name == "NO_COLOR" else "")
    monkeypatch.setenv("TERM", "dumb" if name == "dumb" else "xterm")
    # Only a terminal's lines are wrapped.
    monkeypatch.setenv("COLUMNS", "80" if name == "NO_COLOR" else "4")
    screen = io.StringIO() if name == "file" else Terminal()
    printer = Printer(screen)
    printer.show(PIECES)
    printer.explain()
    assert screen.getvalue() == "Hello"


def test_text_is_split_by_origin():
    output = CompletionOutput(index=0, text="abcde", token_ids=[1, 2, 3, 4])
    assert pieces_of(output) == [("abcde", False)]
    origins = [("ab", "draft"), ("c", "recovered"), ("d", "target"), ("e", "leaf")]
    output.token_origins = [TokenOrigin(*one, 1) for one in origins]
    expected = [("ab", True), ("c", False), ("d", False), ("e", True)]
    assert pieces_of(output) == expected


def lines_of(written: str) -> list[str]:
    """Return the lines shown by a terminal that can move back and erase to the end."""
    lines = [""]
    for part in re.split("(\x1b\\[\\d*[A-Za-z]|\n)", written):
        if part == "\n":
            lines.append("")
        elif part.endswith("D") and part.startswith("\x1b"):
            lines[-1] = lines[-1][: -int(part[2:-1])]
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two ", "three four"]),
        ("one two thr", ["one two thr"]),
        ("one two thre", ["one two ", "thre"]),
        ("one two thr four", ["one two thr", "four"]),
        ("abcdefghijklm nop", ["abcdefghijk", "lm nop"]),
        ("a\nbcd efg hij\nk", ["a", "bcd efg hij", "k"]),
        ("\u732b" * 7, ["\u732b" * 5, "\u732b" * 2]),
        ("a " + "\u732b" * 5, ["a " + "\u732b" * 4, "\u732b"]),
        ("e\u0301" * 11 + " a", ["e\u0301" * 11, "a"]),
        ("a\tb cde", ["a\tb ", "cde"]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_wraps_lines_at_words(monkeypatch, text: str, lines: list[str], size: int):
    monkeypatch.setenv("COLUMNS", "12")
    screen = Terminal()
    printer = Printer(screen)
    for number, at in enumerate(range(0, len(text), size)):
        printer.show([Piece(text[at : at + size], number % 2 == 1)])
    assert lines_of(screen.getvalue()) == lines


def test_moved_word_keeps_its_colors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "8")
    screen = Terminal()
    pieces = [Piece("one t", False), Piece("wo", True), Piece("x", True)]
    Printer(screen).show([*pieces, Piece("", True)])
    moved = screen.getvalue().partition("\n")[2]
    assert moved == "t\x1b[32mw\x1b[0m\x1b[32mo\x1b[0m\x1b[32mx\x1b[0m"
