"""Owns `python -m jaxspec chat`: a conversation in the terminal.

Answers go to standard output and all else to standard error, so that a pipe gets texts.
"""

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxspec.errors import ArgumentError, RequestError, check_integer, check_number
from jaxspec.generate import WARM_UP_TOKENS, load_engine
from jaxspec.partners import (
    EnginePartner,
    Fields,
    Message,
    Part,
    Partner,
    PartnerError,
    ServerPartner,
)
from jaxspec.terminal import Printer

# With it `input` has a history, and lines can be edited; not every system has it.
if importlib.util.find_spec("readline") is not None:
    importlib.import_module("readline")

PROMPT = "> "
HELP = """\
/clear           forget the conversation
/temperature T   0 takes the most likely token
/k K             draft at most K tokens a round; 0 none
/quit            end, as Ctrl-D does; Ctrl-C stops an answer"""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
_SAMPLING += ("ignore_eos",)


def run(options: argparse.Namespace) -> None:
    """Run the subcommand.

    Raises:
        ArgumentError: An option cannot work.
    """
    chosen = {name: getattr(options, name) for name in _SAMPLING}
    fields = {name: value for name, value in chosen.items() if value is not None}
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    partner = _make_partner(options, is_terminal=is_terminal)
    try:
        if options.url is None:
            _warm_up(partner, fields)
        Talk(partner, fields, is_terminal=is_terminal).run()
    finally:
        partner.close()


def _make_partner(options: argparse.Namespace, *, is_terminal: bool) -> Partner:
    if options.url is not None:
        if options.speculative_model is not None:
            message = "--speculative-model is for models loaded here, not for --url."
            raise ArgumentError(message)
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        return ServerPartner(options.url, model=options.model, api_key=key)
    engine = load_engine(options)
    if is_terminal:
        engine.announce_compiles(lambda what: _note(f"[{what}]") if what else None)
    return EnginePartner(engine)


def _warm_up(partner: Partner, fields: Fields) -> None:
    """Compile what short answers need: the first one would wait in its midst."""
    _note("Compiling ...")
    short = {"max_tokens": WARM_UP_TOKENS, "ignore_eos": True}
    for _ in partner.answer([{"role": "user", "content": "!"}], fields | short):
        pass


class Talk:
    """One conversation: reads a line, shows the answer, and again."""

    def __init__(self, partner: Partner, fields: Fields, *, is_terminal: bool):
        """Begin a conversation.

        Args:
            fields: How answers are asked for.
            is_terminal: Somebody types; else lines come from a file.
        """
        self._partner, self._fields = partner, dict(fields)
        self._is_terminal = is_terminal
        self._messages: list[Message] = []
        self._printer = Printer(sys.stdout)
        self._printer.has_colours &= is_terminal

    def run(self) -> None:
        """Go on until the input ends or somebody quits."""
        if self._is_terminal:
            _note(HELP)
            self._printer.explain()
        for line in self._lines():
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._ask(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input(PROMPT if self._is_terminal else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                _note("\nCtrl-D or /quit ends.")

    def _obey(self, line: str) -> None:
        command, _, value = line.partition(" ")
        try:
            match command:
                case "/clear" if not value:
                    self._messages = []
                case "/temperature":
                    told = check_number(
                        RequestError, command, _number(value), low=0, high=2
                    )
                    self._fields["temperature"] = told
                case "/k":
                    told = check_integer(RequestError, command, _number(value), low=0)
                    self._fields["num_speculative_tokens"] = told
                case _:
                    _note(HELP)
        except RequestError as error:
            _note(str(error))

    def _ask(self, question: str) -> None:
        """Show the answer to a message, and remember both, or what there is of it."""
        messages = [*self._messages, {"role": "user", "content": question}]
        answer, end = "", "broken off"
        try:
            parts = self._partner.answer(messages, self._fields)
            with contextlib.closing(parts):
                for part in parts:
                    self._printer.show(part.pieces)
                    answer += "".join(piece.text for piece in part.pieces)
                    if part.finish_reason is not None:
                        end = closing_line(part)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            end = "stopped"
        except (ArgumentError, PartnerError) as error:
            _note(f"\nerror: {error}" if answer else f"error: {error}")
            return
        print(flush=True)
        _note(f"[{end}]")
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]


def closing_line(last: Part) -> str:
    """What the last part of an answer tells about it: its end, speed and drafts."""
    told = ["cut off at --max-tokens"] if last.finish_reason == "length" else []
    metrics = last.metrics or {}
    speed = metrics.get("tokens_per_second")
    if speed is not None:
        told.append(f"{speed:.1f} tokens/s")
    drafts = metrics.get("speculative_decoding")
    if drafts and drafts["num_draft_tokens"]:
        told.append(f"{drafts['draft_acceptance_rate']:.0%} of the drafts accepted")
        told.append(f"{drafts['mean_acceptance_length']:.2f} tokens a round")
    return ", ".join(told) or "end"


def _number(text: str) -> Any:
    """The number that a text spells; other texts as they are, for an error to show."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
