"""Owns `python -m jaxspec chat`: a conversation with its own engine, or a server.

Answers go to stdout and everything else to stderr, so that answers can be piped.
"""

import argparse
import contextlib
import importlib.util
import itertools
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxspec.cli.chat_backend import (
    BackendError,
    ChatBackend,
    Fields,
    Message,
    Part,
    Parts,
)
from jaxspec.cli.generate import SAMPLING_OPTIONS, WARM_UP_TOKENS, load_engine
from jaxspec.cli.terminal import Printer, pieces_of
from jaxspec.command_line import FAILED
from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.errors import (
    ArgumentError,
    RequestError,
    check_integer,
    check_number,
    check_utf8,
)
from jaxspec.extras import needs_extra
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.serve.responses.usage import request_metrics

# Importing readline adds a history and line editing to `input`. Not every system has
# readline.
if importlib.util.find_spec("readline") is not None:
    importlib.import_module("readline")

PROMPT = "> "
HELP = """\
/help            show this list
/clear           start a new conversation
/temperature T   0 takes the most likely token
/k K             draft at most K tokens per round; 0 for none
/exit, /quit     end, like Ctrl-D; Ctrl-C stops an answer"""
_END = ("/exit", "/quit")


class EngineBackend:
    """Answers with an engine in this process."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._numbers = itertools.count()
        self._is_writing = False

    def show_compile(self, program: str | None) -> None:
        """Print the program being compiled, unless an answer is being printed."""
        if program and not self._is_writing:
            _print_note(f"[{program}]")

    def answer(self, messages: list[Message], fields: Fields) -> Parts:
        given = dict(fields)
        extra = {"return_token_origins": True}
        extra["num_speculative_tokens"] = given.pop("num_speculative_tokens", None)
        params = SamplingParams(
            **given, extra_args=extra, output_kind=RequestOutputKind.DELTA
        )
        text, token_ids = self._engine.tokenizer.write_chat(messages)
        name = f"chat-{next(self._numbers)}"
        prompt: Any = {"prompt": text, "prompt_token_ids": token_ids}
        self._engine.add_request(name, prompt, params)
        try:
            while self._engine.has_unfinished_requests():
                with _delay_interrupt():
                    outputs = self._engine.step()
                for part in map(_part_of, outputs):
                    self._is_writing = True
                    yield part
        finally:
            self._is_writing = False
            self._engine.abort_request(name)

    def close(self) -> None:
        self._engine.shutdown()


def _part_of(output: RequestOutput) -> Part:
    (completion,) = output.outputs
    if completion.finish_reason == "error":
        raise BackendError(completion.stop_reason)
    metrics = None
    if output.finished:
        metrics = request_metrics(output, has_drafts=True, has_times=True)
    return Part(
        pieces=pieces_of(completion),
        finish_reason=completion.finish_reason,
        metrics=metrics,
    )


@contextlib.contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of a step: within one it breaks the engine."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def run(options: argparse.Namespace) -> int:
    """Run the subcommand; return the exit code.

    Raises:
        ArgumentError: An option is invalid.
    """
    chosen = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    fields = {name: value for name, value in chosen.items() if value is not None}
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    backend = _make_backend(options, is_terminal=is_terminal)
    try:
        if options.url is None:
            _warm_up(backend, fields)
        session = ChatSession(backend, fields, is_terminal=is_terminal)
        session.run()
    finally:
        backend.close()
    # An interactive user has seen the error message; a script needs an exit status.
    return FAILED if session.has_failed and not is_terminal else 0


def _make_backend(options: argparse.Namespace, *, is_terminal: bool) -> ChatBackend:
    if options.url is not None:
        if options.speculative_model is not None:
            message = "--speculative-model cannot be combined with --url: it applies "
            message += "to models loaded in this process."
            raise ArgumentError(message)
        with needs_extra("serve", "--url"):
            module = importlib.import_module("jaxspec.cli.chat_server")
        server = module.ServerBackend(
            options.url, model=options.model, api_key=options.api_key
        )
        server.check()
        return server
    engine = load_engine(options, is_chat=True)
    backend = EngineBackend(engine)
    if is_terminal:
        engine.announce_compiles(backend.show_compile)
    return backend


def _warm_up(backend: ChatBackend, fields: Fields) -> None:
    """Compile the programs of short answers, so that the first answer does not wait."""
    _print_note("Compiling ...")
    short = {"max_tokens": WARM_UP_TOKENS, "ignore_eos": True}
    for _ in backend.answer([{"role": "user", "content": "!"}], fields | short):
        pass


class ChatSession:
    """One conversation: reads lines, and prints the answer to each.

    Attributes:
        has_failed: Whether an answer has failed.
    """

    def __init__(self, backend: ChatBackend, fields: Fields, *, is_terminal: bool):
        """Begin a conversation.

        Args:
            fields: Fields of every request.
            is_terminal: The input is interactive; otherwise lines come from a file.
        """
        self._backend, self._fields = backend, dict(fields)
        self._is_terminal = is_terminal
        self._messages: list[Message] = []
        self.has_failed = False
        self._printer = Printer(sys.stdout)
        self._printer.has_colors &= is_terminal
        self._printer.has_lines &= is_terminal

    def run(self) -> None:
        """Run until the input ends or the user quits."""
        if self._is_terminal:
            _print_note(HELP)
            self._printer.explain()
        for line in self._lines():
            if line in _END:
                return
            if line.startswith("/"):
                self._handle(line)
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
                _print_note("\nCtrl-D or /exit ends.")

    def _handle(self, line: str) -> None:
        command, _, value = line.partition(" ")
        try:
            match command:
                case "/clear" if not value:
                    self._messages = []
                case "/temperature":
                    self._fields["temperature"] = check_number(
                        RequestError, command, _number(value), low=0, high=2
                    )
                case "/k":
                    self._fields["num_speculative_tokens"] = check_integer(
                        RequestError, command, _number(value), low=0
                    )
                case "/help" if not value:
                    _print_note(HELP)
                case _:
                    _print_note(f"No command {line!r}.\n{HELP}")
        except RequestError as error:
            _print_note(str(error))

    def _ask(self, question: str) -> None:
        """Print the answer to a message; add both to the conversation.

        Of an answer that the user stopped, the printed part is added.
        """
        messages = [*self._messages, {"role": "user", "content": question}]
        answer, end, reason = "", "broken off", None
        self._printer.begin_line()
        try:
            check_utf8(RequestError, "the message", question)
            parts = self._backend.answer(messages, self._fields)
            with contextlib.closing(parts):
                for part in parts:
                    self._printer.show(part.pieces)
                    answer += "".join(piece.text for piece in part.pieces)
                    reason = part.finish_reason or reason
                    if reason is not None:
                        # The metrics arrive in a part of their own, after the last part
                        # of the text.
                        end = closing_line(replace(part, finish_reason=reason))
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            end = "stopped"
        except (ArgumentError, BackendError) as error:
            _print_note(f"\nerror: {error}" if answer else f"error: {error}")
            self.has_failed = True
            return
        print(flush=True)
        _print_note(f"[{end}]")
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]


def closing_line(last: Part) -> str:
    """Describe a finished answer from its last part: end, speed and acceptance."""
    parts = ["cut off at --max-tokens"] if last.finish_reason == "length" else []
    metrics = last.metrics or {}
    speed = metrics.get("tokens_per_second")
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    drafts = metrics.get("speculative_decoding")
    if drafts and drafts["num_draft_tokens"]:
        parts.append(f"{drafts['draft_acceptance_rate']:.0%} of the drafts accepted")
        parts.append(f"{drafts['mean_acceptance_length']:.2f} tokens a round")
    return ", ".join(parts) or "end"


def _number(text: str) -> Any:
    """Parse a number; return any other text unchanged, for the error message."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
