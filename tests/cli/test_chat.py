"""`python -m jaxspec chat` and its backends, an engine in this process and a server."""

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
from pathlib import Path
from typing import Any

import pytest

from jaxspec.cli import chat, chat_server
from jaxspec.cli.chat import ChatSession, EngineBackend, closing_line
from jaxspec.cli.chat_backend import BackendError, Fields, Message, Part, Parts
from jaxspec.cli.chat_server import ServerBackend, _parts_in
from jaxspec.cli.generate import SAMPLING_OPTIONS
from jaxspec.cli.terminal import Piece, Printer
from jaxspec.command_line import run_command
from jaxspec.errors import ArgumentError, RequestError
from tests.support.fake_engines import assert_idle, letters, make_fake_engine, said
from tests.support.serving import MESSAGES, PROMPT, TurnsTokenizer, site_of
from tests.support.terminals import GREEN, Terminal

ROOT = Path(__file__).parents[2]
FIELDS = {"max_tokens": 20, "temperature": 0.0}
# A session leader owns the terminal, so the terminal turns its keys into signals.
IN_A_TERMINAL = """
import fcntl, runpy, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("jaxspec", run_name="__main__")
"""
COLOUR = re.compile("\x1b\\[[0-9;]*m")


class Echo:
    """A backend that repeats each message, and records its requests."""

    def __init__(self):
        self.asked: list[tuple[list[str], Fields]] = []

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        expected = (["user", "assistant"] * len(messages))[: len(messages)]
        assert [one["role"] for one in messages] == expected
        self.asked.append(([one["content"] for one in messages], dict(fields)))
        said_back = messages[-1]["content"]
        if said_back == "fail":
            yield Part(pieces=[Piece("Oh", False)])
            raise RequestError("no such thing")
        if said_back == "interrupt":
            yield Part(pieces=[Piece("So", False)])
            raise KeyboardInterrupt
        yield Part(pieces=[Piece(said_back, False)])
        if said_back != "break off":
            yield Part(pieces=[Piece("!", True)], finish_reason="stop")

    def check(self) -> None:
        """Do nothing, because there is no server to check."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a session with an `Echo`; it returns the requests.

    Its arguments are the typed lines. An exception in their place is raised, as by a
    key.
    """

    def run(*lines: str | type[BaseException], is_terminal: bool = True) -> Any:
        type_lines(monkeypatch, *lines)
        backend = Echo()
        ChatSession(backend, FIELDS, is_terminal=is_terminal).run()
        return backend.asked

    return run


def type_lines(
    monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]
) -> None:
    typed = iter(lines)

    def read(_: str = "") -> str:
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_clear_starts_new_conversation(session):
    for end in ("/quit", "/exit"):
        asked = session("a", "", "b", "/clear", "c", end, "never")
        assert [texts for texts, _ in asked] == [["a"], ["a", "a!", "b"], ["c"]]


def test_settings_can_be_changed(session, capsys):
    asked = session("a", "/temperature 0.8", "/k 3", "b", "/k 0", "c")
    changed = FIELDS | {"temperature": 0.8, "num_speculative_tokens": 3}
    plain = changed | {"num_speculative_tokens": 0}
    assert [fields for _, fields in asked] == [FIELDS, changed, plain]
    capsys.readouterr()
    wrong = ["/temperature hot", "/temperature 3", "/k 1.5", "/k", "/clear x", "/what"]
    asked = session(*wrong, "a")
    assert asked[0][1] == FIELDS
    shown = capsys.readouterr().err
    assert "/temperature must be a number in [0, 2], got 'hot'" in shown
    assert "/k must be an integer of at least 0, got 1.5" in shown
    assert shown.count("/clear           start") == 3, "the help, first and twice more"
    assert "No command '/what'." in shown
    session("/help")
    shown = capsys.readouterr().err
    assert "No command" not in shown and "/exit, /quit" in shown


def test_failures_and_interrupts_end_only_the_answer(session, capsys):
    asked = session("fail", "interrupt", KeyboardInterrupt, "a")
    # A failed answer is not added to the conversation; an interrupted one is.
    assert asked[-1][0] == ["interrupt", "So", "a"]
    shown = capsys.readouterr().err
    for text in ("error: no such thing", "[stopped]", "Ctrl-D or /exit ends."):
        assert text in shown


def test_message_that_is_not_utf8_is_refused(monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\na\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", typed)
    backend = Echo()
    session = ChatSession(backend, FIELDS, is_terminal=False)
    assert run_command("chat", session.run) == 0
    assert backend.asked == [(["a"], FIELDS)]
    shown = capsys.readouterr().err
    assert "error: the message must be text that UTF-8 can encode" in shown


@pytest.mark.parametrize("line", ["interrupt", KeyboardInterrupt])
def test_interrupt_ends_non_interactive_session(session, line):
    with pytest.raises(KeyboardInterrupt):
        session(line, is_terminal=False)


def test_pipe_gets_answers_only(session, capsys):
    session("a", "b", is_terminal=False)
    assert capsys.readouterr() == ("a!\nb!\n", "[end]\n[end]\n")
    session("break off", is_terminal=False)
    assert capsys.readouterr() == ("break off\n", "[broken off]\n")


def test_every_answer_begins_a_line(monkeypatch):
    type_lines(monkeypatch, "one two", "one two")
    monkeypatch.setenv("COLUMNS", "8")
    monkeypatch.setenv("TERM", "xterm")
    session, screen = ChatSession(Echo(), FIELDS, is_terminal=True), Terminal()
    session._printer = Printer(screen)
    session._printer.has_colors = False
    session.run()
    assert screen.getvalue() == "one two\x1b[3D\x1b[K\ntwo!" * 2


def test_closing_line_shows_speed_and_drafts():
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
    chosen = dict.fromkeys((*SAMPLING_OPTIONS, "speculative_model", "url", "api_key"))
    return argparse.Namespace(**(chosen | FIELDS | {"model": None} | changes))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the engine that the command loads; return it. `ended` lists its ends."""
    made: Any = make_fake_engine(num_draft_tokens=3)[0]
    made.tokenizer = TurnsTokenizer(16)
    made.ended = []
    made.shutdown = lambda: made.ended.append(made)
    monkeypatch.setattr(chat, "load_engine", lambda *_, **__: made)
    return made


def test_own_engine_answers_and_is_ended(engine, monkeypatch, capsys):
    type_lines(monkeypatch, PROMPT, "/k 0", PROMPT)
    assert chat.run(options()) == 0
    shown = capsys.readouterr()
    assert shown.out == (letters(said(20)) + "\n") * 2
    warm_up, first, second = shown.err.splitlines()
    assert warm_up == "Compiling ..."
    assert "of the drafts accepted" in first
    assert "drafts" not in second
    assert engine.ended == [engine]
    with pytest.raises(RequestError, match="temperature"):
        chat.run(options(temperature=9))
    assert len(engine.ended) == 2, "before anything is typed"


def test_failed_answer_sets_exit_status_of_script(engine, monkeypatch, capsys):
    monkeypatch.setattr(chat, "_warm_up", lambda *_: None)
    engine.runner.device.poison = engine.tokenizer.write_chat(MESSAGES)[1][0]
    type_lines(monkeypatch, PROMPT)
    assert chat.run(options()) == 1
    assert "error: The model's logits became NaN" in capsys.readouterr().err


def test_url_needs_a_server_and_may_have_a_key(monkeypatch):
    made: list[Any] = []

    def note(*_: Any, **names: Any) -> Any:
        made.append(names["api_key"])
        return Echo()

    type_lines(monkeypatch)
    with pytest.raises(ArgumentError, match="No server responds at http://127.0.0.1:1"):
        chat.run(options(url="http://127.0.0.1:1"))
    monkeypatch.setattr(chat_server, "ServerBackend", note)
    for key in (None, "own"):
        chat.run(options(url="http://server", api_key=key))
    assert made == [None, "own"]
    with pytest.raises(ArgumentError, match="cannot be combined with --url"):
        chat.run(options(url="http://server", speculative_model="x"))


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


def test_terminal_shows_colors_and_reads_keys():
    with site_of() as site:
        site.delay_s = 0.1
        screen = Screen("--url", site.url, "--max-tokens", "60")
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
            screen.process.wait()


@pytest.fixture
def backend() -> EngineBackend:
    engine, _ = make_fake_engine(num_draft_tokens=3)
    engine.tokenizer = TurnsTokenizer(16)
    return EngineBackend(engine)


def at(url: str, model: str | None = None, api_key: str | None = None) -> ServerBackend:
    return ServerBackend(url, model=model, api_key=api_key)


def text_of(parts: list[Part]) -> str:
    return "".join(piece.text for part in parts for piece in part.pieces)


def check(parts: list[Part]) -> None:
    """Check the parts that a backend yields: a text with its drafts, then metrics."""
    assert text_of(parts) == letters(said(20))
    # The last part from a server has only metrics.
    reasons = [part.finish_reason for part in parts]
    assert [one for one in reasons[-2:] if one] == ["length"]
    assert not any(reasons[:-2])
    metrics = parts[-1].metrics
    assert metrics is not None
    counts = metrics["speculative_decoding"]
    green = sum(piece.is_draft for part in parts for piece in part.pieces)
    # The last round may have accepted one draft more than max_tokens allows.
    assert 0 <= counts["num_accepted_draft_tokens"] - green <= 3
    assert green > 3
    assert metrics["tokens_per_second"] > 0


def test_engine_backend_yields_text_and_drafts(backend: EngineBackend):
    check(list(backend.answer(MESSAGES, FIELDS)))
    parts = list(backend.answer(MESSAGES, FIELDS | {"num_speculative_tokens": 0}))
    assert text_of(parts) == letters(said(20))
    assert not any(piece.is_draft for part in parts for piece in part.pieces)
    with pytest.raises(RequestError, match="temperature"):
        list(backend.answer(MESSAGES, {"temperature": 9}))
    assert_idle(backend._engine)


def test_engine_is_idle_after_abandoned_or_interrupted_answer(backend: EngineBackend):
    parts = backend.answer(MESSAGES, FIELDS)
    next(parts)
    parts.close()
    engine: Any = backend._engine
    step, seen = engine.step, []

    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        seen.append(step())
        return seen[-1]

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(backend.answer(MESSAGES, FIELDS))
    assert len(seen) == 1, "a step runs to its end"
    engine.step = step
    check(list(backend.answer(MESSAGES, FIELDS)))
    assert_idle(engine)


def test_compile_notes_are_not_within_answers(backend: EngineBackend, capsys: Any):
    parts = backend.answer(MESSAGES, FIELDS)
    backend.show_compile("first")
    next(parts)
    backend.show_compile("within")
    parts.close()
    backend.show_compile("after")
    assert capsys.readouterr().err == "[first]\n[after]\n"


def test_server_backend_yields_text_and_drafts():
    with site_of() as site:
        url = site.url[:-1]
        for name in (url, f"{url}/v1", f"{url}/v1/"):
            backend = at(name, model="model", api_key="any")
            check(list(backend.answer(MESSAGES, FIELDS)))
            backend.check()
        for other, fields, message in (
            (at(url, model="other"), FIELDS, "The model `other` does not exist"),
            (at(f"{url}/x"), {}, "Not Found"),
            (at(url), {"temperature": 9}, "temperature must be"),
        ):
            with pytest.raises(BackendError, match=message):
                list(other.answer(MESSAGES, fields))

        def broken(*_: Any) -> Any:
            raise RuntimeError("boom")

        runner: Any = site.engine.engine.runner
        runner.launch = broken
        with pytest.raises(BackendError, match="boom"):
            list(backend.answer(MESSAGES, FIELDS))
    with pytest.raises(BackendError, match="boom"):
        list(_parts_in({"error": {"message": "boom"}}))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[::"])
def test_missing_server_is_reported(url: str):
    with pytest.raises(BackendError, match="v1/chat/completions"):
        next(at(url).answer(MESSAGES, {}))
    with pytest.raises(ArgumentError, match="No server responds at .*/v1: .*--url"):
        at(url).check()


def test_server_with_another_key_is_rejected():
    with site_of(api_keys=("secret",)) as site:
        at(site.url, api_key="secret").check()
        for key in (None, "other"):
            with pytest.raises(ArgumentError, match="refuses the key.*--api-key"):
                at(site.url, api_key=key).check()
        # Not every server has the endpoint /v1/models.
        at(f"{site.url}x", api_key="secret").check()
