"""`python -m jaxspec chat`: input, output and exit status."""

import argparse
import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxspec.cli import chat
from jaxspec.cli.chat import ChatSession, Fields, Message, Part, Parts, closing_line
from jaxspec.cli.generate import SAMPLING_OPTIONS
from jaxspec.cli.terminal import Piece, Printer
from jaxspec.command_line import run_command
from jaxspec.errors import ArgumentError, RequestError
from tests.cli.test_terminal import GREEN, Terminal
from tests.serve.test_launcher import served
from tests.support.fake_engines import letters, make_fake_engine, said
from tests.support.serving import PROMPT, TurnsTokenizer

ROOT = Path(__file__).parents[2]
FIELDS = {"max_tokens": 20, "temperature": 0.0}
SERVER_OPTIONS = {"url": "http://server", "model": None, "api_key": None}
# A session leader owns the terminal, so the terminal turns its keys into signals.
IN_A_TERMINAL = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("jaxspec", run_name="__main__")
"""
COLOUR = re.compile("\x1b\\[[0-9;]*m")


class Echo:
    """A backend that repeats each message, and records its requests."""

    def __init__(self):
        self.asked: list[tuple[list[Message], Fields]] = []
        self.is_closed = False

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        self.asked.append((list(messages), dict(fields)))
        said_back = messages[-1]["content"]
        if said_back == "fail":
            yield Part(pieces=[Piece("Oh", False)])
            raise RequestError("no such thing")
        if said_back == "interrupt":
            yield Part(pieces=[Piece("So", False)])
            raise KeyboardInterrupt
        yield Part(pieces=[Piece(said_back, False)])
        yield Part(pieces=[Piece("!", True)], finish_reason="stop")

    def check(self) -> None:
        """Do nothing, because there is no server to check."""

    def close(self) -> None:
        self.is_closed = True


def type_lines(
    monkeypatch: pytest.MonkeyPatch, lines: Iterable[str | type[BaseException]]
) -> None:
    """Simulate typed lines; an exception in their place is raised, as by a key."""
    typed: Iterator[Any] = iter(lines)

    def read(_: str = "") -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def run_session(
    monkeypatch: pytest.MonkeyPatch,
    *lines: str | type[BaseException],
    is_terminal: bool = True,
) -> Echo:
    type_lines(monkeypatch, lines)
    backend = Echo()
    ChatSession(backend, FIELDS, is_terminal=is_terminal).run()
    return backend


def contents(asked: tuple[list[Message], Fields]) -> list[str]:
    return [message["content"] for message in asked[0]]


def test_clear_starts_new_conversation(monkeypatch):
    backend = run_session(monkeypatch, "a", "", "b", "/clear", "c", "/quit", "never")
    assert [contents(one) for one in backend.asked] == [
        ["a"],
        ["a", "a!", "b"],
        ["c"],
    ]
    roles = [message["role"] for message in backend.asked[1][0]]
    assert roles == ["user", "assistant", "user"]


def test_settings_can_be_changed(monkeypatch, capsys):
    lines = ["a", "/temperature 0.8", "/k 3", "b", "/k 0", "c"]
    backend = run_session(monkeypatch, *lines)
    changed = FIELDS | {"temperature": 0.8, "num_speculative_tokens": 3}
    assert [fields for _, fields in backend.asked] == [
        FIELDS,
        changed,
        changed | {"num_speculative_tokens": 0},
    ]
    capsys.readouterr()
    wrong = ["/temperature hot", "/temperature 3", "/k 1.5", "/k", "/clear x", "/what"]
    backend = run_session(monkeypatch, *wrong, "a")
    assert backend.asked[0][1] == FIELDS
    shown = capsys.readouterr().err
    assert "/temperature must be a number in [0, 2], got 'hot'" in shown
    assert "/k must be an integer of at least 0, got 1.5" in shown
    assert shown.count("/clear           start") == 3, "the help, first and twice more"
    assert "No command '/what'." in shown
    capsys.readouterr()
    run_session(monkeypatch, "/help")
    assert "No command" not in capsys.readouterr().err


def test_failures_and_interrupts_end_only_the_answer(monkeypatch, capsys):
    lines = ["fail", "interrupt", KeyboardInterrupt, "a"]
    backend = run_session(monkeypatch, *lines)
    # A failed answer is not added to the conversation; an interrupted one is.
    assert contents(backend.asked[-1]) == ["interrupt", "So", "a"]
    shown = capsys.readouterr()
    assert "error: no such thing" in shown.err
    assert "[stopped]" in shown.err
    assert "Ctrl-D or /quit ends." in shown.err


def test_message_that_is_not_utf8_is_refused(monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\na\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    backend = Echo()
    session = ChatSession(backend, FIELDS, is_terminal=False)
    assert run_command("chat", session.run) == 0
    assert [contents(one) for one in backend.asked] == [["a"]]
    shown = capsys.readouterr().err
    assert "error: the message must be text that UTF-8 can encode" in shown


@pytest.mark.parametrize("line", ["interrupt", KeyboardInterrupt])
def test_interrupt_ends_non_interactive_session(monkeypatch, line):
    with pytest.raises(KeyboardInterrupt):
        run_session(monkeypatch, line, is_terminal=False)


def test_pipe_gets_answers_only(monkeypatch, capsys):
    run_session(monkeypatch, "a", "b", is_terminal=False)
    shown = capsys.readouterr()
    assert shown.out == "a!\nb!\n"
    assert shown.err == "[end]\n[end]\n"


def test_every_answer_begins_a_line(monkeypatch):
    type_lines(monkeypatch, ["one two"] * 2)
    monkeypatch.setenv("COLUMNS", "8")
    monkeypatch.setenv("TERM", "xterm")
    session, screen = ChatSession(Echo(), FIELDS, is_terminal=True), Terminal()
    session._printer = Printer(screen)
    session._printer.has_colors = False
    session.run()
    assert screen.getvalue() == "one two\x1b[3D\x1b[K\ntwo!" * 2


def test_answer_that_breaks_off(monkeypatch, capsys):
    monkeypatch.setattr(
        Echo, "answer", lambda *_: (Part(pieces=[Piece("x", False)]) for _ in "x")
    )
    run_session(monkeypatch, "a", is_terminal=False)
    assert capsys.readouterr().err == "[broken off]\n"


def test_closing_line():
    drafts = {"num_draft_tokens": 8, "draft_acceptance_rate": 0.75}
    drafts["mean_acceptance_length"] = 4.0
    metrics = {"tokens_per_second": 61.23, "speculative_decoding": drafts}
    line = closing_line(Part(finish_reason="stop", metrics=metrics))
    assert line == "61.2 tokens/s, 75% of the drafts accepted, 4.00 tokens a round"
    metrics = {"tokens_per_second": None, "speculative_decoding": None}
    line = closing_line(Part(finish_reason="length", metrics=metrics))
    assert line == "cut off at --max-tokens"
    assert closing_line(Part(finish_reason="stop")) == "end"


def options(**changes: Any) -> argparse.Namespace:
    chosen = dict.fromkeys(SAMPLING_OPTIONS) | FIELDS | SERVER_OPTIONS
    return argparse.Namespace(**(chosen | {"speculative_model": None} | changes))


def test_own_engine(monkeypatch, capsys):
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    ended: list[Any] = []
    monkeypatch.setattr(chat, "load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: ended.append(engine))
    type_lines(monkeypatch, [PROMPT, "/k 0", PROMPT])
    chat.run(options(url=None))
    shown = capsys.readouterr()
    assert shown.out == (letters(said(20)) + "\n") * 2
    warm_up, first, second = shown.err.splitlines()
    assert warm_up == "Compiling ..."
    assert "of the drafts accepted" in first
    assert "drafts" not in second
    assert ended == [engine]
    with pytest.raises(RequestError, match="temperature"):
        chat.run(options(url=None, temperature=9))
    assert len(ended) == 2, "before anything is typed"


def test_failed_answer_sets_exit_status_of_script(monkeypatch, capsys):
    engine, runner = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    monkeypatch.setattr(chat, "load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)
    type_lines(monkeypatch, [PROMPT])
    assert chat.run(options(url=None)) == 0
    monkeypatch.setattr(chat, "_warm_up", lambda *_: None)
    (runner.device.poison, *_) = engine.tokenizer.write_chat(
        [{"role": "user", "content": PROMPT}]
    )[1]
    type_lines(monkeypatch, [PROMPT])
    assert chat.run(options(url=None)) == 1
    assert "error: The model's logits became NaN" in capsys.readouterr().err


def test_compile_notes_are_not_within_answers(capsys):
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    backend = chat.EngineBackend(engine)
    parts = backend.answer([{"role": "user", "content": PROMPT}], FIELDS)
    backend.show_compile("first")
    next(parts)
    backend.show_compile("within")
    parts.close()
    backend.show_compile("after")
    assert capsys.readouterr().err == "[first]\n[after]\n"


def test_server_and_api_key(monkeypatch):
    made: list[Any] = []

    def note(*args: Any, **names: Any) -> Any:
        made.append((args, names))
        return Echo()

    monkeypatch.setattr(chat, "ServerBackend", note)
    for key in (None, "own"):
        type_lines(monkeypatch, [])
        chat.run(options(api_key=key))
    given = [names["api_key"] for _, names in made]
    assert given == [None, "own"]
    with pytest.raises(ArgumentError, match="cannot be combined with --url"):
        chat.run(options(speculative_model="x"))


def test_missing_server_is_reported_at_start(monkeypatch):
    type_lines(monkeypatch, [RuntimeError])
    with pytest.raises(ArgumentError, match="No server responds at http://127.0.0.1:1"):
        chat.run(options(url="http://127.0.0.1:1"))


class Screen:
    """A terminal in which `python -m jaxspec chat` runs."""

    def __init__(self, *arguments: str):
        self._main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, "chat", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "NO_COLOR": ""},
            start_new_session=True,
        )
        os.close(other)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, text: str) -> str:
        """Wait until `text` is shown; consume and return the output up to it."""
        deadline = time.monotonic() + 300
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._main], [], [], 1)[0]:
                self.shown += os.read(self._main, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def end(self) -> int:
        # Read the remaining output: the program could not exit before it is read.
        with contextlib.suppress(OSError):
            while os.read(self._main, 4096):
                pass
        os.close(self._main)
        return self.process.wait(60)


def test_keys_and_colors_of_terminal():
    def ask(client: httpx.Client) -> None:
        client.get("/health")
        screen = Screen("--url", str(client.base_url), "--max-tokens", "60")
        try:
            screen.wait_for("\n> ")
            screen.type(f"{PROMPT}\n")
            answer = screen.wait_for(" tokens a round]")
            assert letters(said(60)) in COLOUR.sub("", answer)
            assert len("".join(GREEN.findall(answer))) > 10
            screen.wait_for("> ")
            screen.type(f"{PROMPT}\n")
            screen.wait_for(letters(said(1)))
            screen.type("\x03")
            assert letters(said(60)) not in COLOUR.sub("", screen.wait_for("[stopped]"))
            screen.wait_for("> ")
            screen.type("\x04")
            assert screen.end() == 0
        finally:
            screen.process.kill()
        os.kill(os.getpid(), signal.SIGTERM)

    assert served(ask, timeout_s=30, delay_s=0.1) == 0
