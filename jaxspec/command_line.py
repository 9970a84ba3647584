"""Parsing, errors and exit status of all command lines of the package."""

import argparse
import difflib
import io
import json
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxspec.errors import ArgumentError, EngineGenerateError, wrong_argument
from jaxspec.exit import INTERRUPTED
from jaxspec_checkpoints import CheckpointError

# argparse's exit code for a wrong argument.
WRONG_ARGUMENT = 2
# The exit code of a command that failed.
FAILED = 1
# Of a flag that is meant, as difflib counts: "prot" is 0.75 near "port".
NEAR = 0.7


class CommandError(Exception):
    """A command failed; its message is shown without a traceback."""


class CommandParser(argparse.ArgumentParser):
    """Says in two lines what is wrong: argparse's own usage can have a hundred."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line; what is not known ends the program.

        A subcommand's parser is asked this way, too, and knows its own flags.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = " ".join(_without_values(unknown))
            self._refuse(f"unrecognized arguments: {names}", unknown)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """End the program, as argparse does where a value is wrong or missing."""
        self._refuse(message)

    def _refuse(self, message: str, unknown: Sequence[str] = ()) -> NoReturn:
        hint = f"See {self.prog} --help."
        # Dashes are alike in all flags: with them "--typo" would be near "--dtype".
        flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        for argument in unknown:
            name = argument.partition("=")[0].lstrip("-")
            near = difflib.get_close_matches(name, flags, n=1, cutoff=NEAR)
            if argument.startswith("--") and near:
                hint = f"Did you mean {flags[near[0]]}?"
                break
        self.exit(WRONG_ARGUMENT, f"{self.prog}: error: {message}\n{hint}\n")


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Return unknown arguments without values of flags: one may be a secret."""
    names: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument.startswith("-"):
            names.append(argument.partition("=")[0])
        elif not before.startswith("-"):
            names.append(argument)
    return names


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the headers that send a key to a server.

    Args:
        api_key: None or "" for the environment's OPENAI_API_KEY, if there is one.

    Raises:
        ArgumentError: A header cannot hold it.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise wrong_argument(ArgumentError, "api_key", "printable ASCII", key)
    return {"Authorization": f"Bearer {key}"}


def run_command(prog: str, run: Callable[[], int | None]) -> int:
    """Run a command; returns the exit code, and says on stderr what was wrong.

    Args:
        prog: What the command is called in its messages.
        run: Returns an exit code; None is 0.
    """
    before = warnings.formatwarning
    # Python's own form adds a line of source, which tells a user nothing.
    warnings.formatwarning = lambda message, *_, **__: f"{prog}: warning: {message}\n"
    # A text has characters that a terminal's encoding may lack.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # As in arguments: `check_utf8` names a byte that is not UTF-8, and no line is lost.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        return run() or 0
    except (ArgumentError, CheckpointError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENT
    except (CommandError, EngineGenerateError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    finally:
        warnings.formatwarning = before


def flag_type(kind: Any) -> Any:
    """What turns a flag's text into a value of a field's type."""
    is_union = isinstance(kind, types.UnionType)
    members = [one for one in typing.get_args(kind) if one is not types.NoneType]
    kind = members[0] if is_union else kind
    if kind in (int, float, str):
        return kind
    return json_flag


def json_flag(text: str) -> Any:
    """Read a flag's value that is JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"it must be JSON, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(message) from error


def documented(*classes: type) -> dict[str, str]:
    """Read what docstrings say of attributes."""
    found: dict[str, str] = {}
    for one in classes:
        name = ""
        _, _, attributes = (one.__doc__ or "").partition("Attributes:\n")
        for line in attributes.splitlines():
            indent, text = len(line) - len(line.lstrip()), line.strip()
            if indent == 8 and ": " in text:
                name, _, text = text.partition(": ")
                found[name] = text
            elif indent > 8 and name:
                found[name] += f" {text}"
    # argparse takes "%" for a value of its own.
    return {name: text.replace("%", "%%") for name, text in found.items()}
