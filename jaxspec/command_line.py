"""Parsing, errors and exit status of all command lines of the package."""

import argparse
import difflib
import io
import json
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from jaxspec.errors import (
    NEAR,
    ArgumentError,
    ConfigError,
    EngineGenerateError,
    wrong_argument,
)
from jaxspec.exit import INTERRUPTED
from jaxspec_checkpoints import CheckpointError

# argparse's exit code for a wrong argument.
WRONG_ARGUMENT = 2
# The exit code of a command that failed.
FAILED = 1


# Short names of flags whose value is a dict, as in vLLM.
SHORT_DICTS = {"-sc": "--speculative-config", "-cc": "--compilation-config"}
_UNITS = "kmgt"
_WITH_UNIT = re.compile(rf"(\d+(?:\.\d+)?)([{_UNITS}{_UNITS.upper()}])")
# A flag for a key of a dict, such as --speculative-config.method.
_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)(\+?)")


class CommandError(Exception):
    """A command failed; its message is shown without a traceback."""


class CommandParser(argparse.ArgumentParser):
    """Reports errors in two lines: argparse's usage message can have a hundred."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line; unknown arguments exit the program.

        Also called for a subcommand's parser, which knows its own flags.
        """
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = " ".join(_without_values(unknown))
            self._refuse(f"unrecognized arguments: {names}", unknown)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Exit the program; argparse calls this for a wrong or missing value."""
        self._refuse(message)

    def _refuse(self, message: str, unknown: Sequence[str] = ()) -> NoReturn:
        hint = f"See {self.prog} --help."
        # Compared without dashes: with them "--typo" would be near "--dtype".
        flags = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        for argument in unknown:
            name = argument.partition("=")[0].lstrip("-")
            near = difflib.get_close_matches(name, flags, n=1, cutoff=NEAR)
            if argument.startswith("--") and near:
                hint = f"Did you mean {flags[near[0]]}?"
                break
        self.exit(WRONG_ARGUMENT, f"{self.prog}: error: {message}\n{hint}\n")


def dashed(argument: str) -> str:
    """Replace underscores in a flag's name by dashes; vLLM accepts both."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    flag, dot, keys = name.partition(".")
    return flag.replace("_", "-") + dot + keys + equals + value


def without_dots(arguments: Sequence[str]) -> list[str]:
    """Join flags for single keys of a dict to one flag with a JSON object, as in vLLM.

    `--speculative-config.method ngram` becomes `--speculative-config
    {"method": "ngram"}`. A value is JSON, a number with a unit, or a string; after
    `--flag.key+` it is a list, separated by commas.

    Raises:
        ConfigError: A value is missing, or the flag is also given as a whole.
    """
    kept, dicts = [], {}
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        found = _DOTTED.fullmatch(name)
        if found is None:
            kept.append(argument)
            continue
        flag, path, is_list = found.groups()
        flag = SHORT_DICTS.get(flag, flag)
        text = value if equals else next(given, None)
        if text is None or (not equals and text.startswith("--")):
            raise wrong_argument(ConfigError, name, "followed by a value", None)
        inner = dicts.setdefault(flag, {})
        *outer, last = path.split(".")
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise wrong_argument(ConfigError, name, "given once", text)
        inner[last] = text.split(",") if is_list else _dotted_value(text)
    for flag, values in dicts.items():
        names = [argument.partition("=")[0] for argument in kept]
        if flag in (SHORT_DICTS.get(name, name) for name in names):
            hint = f"Give all keys in {flag}, or each as {flag}.KEY."
            raise wrong_argument(ConfigError, flag, "given in one way", values, hint)
        kept += [flag, json.dumps(values)]
    return kept


def parse_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse arguments in all spellings of flags; None: those of the process."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        given = without_dots([dashed(argument) for argument in given])
    except ConfigError as error:
        parser.error(str(error))
    return parser.parse_args(given)


def _dotted_value(text: str) -> Any:
    for read in (json.loads, integer_flag):
        try:
            return read(text)
        except (json.JSONDecodeError, argparse.ArgumentTypeError):
            continue
    return text


def _without_values(arguments: Sequence[str]) -> list[str]:
    """Return unknown arguments without values of flags, which may be secrets."""
    names: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument.startswith("-"):
            names.append(argument.partition("=")[0])
        elif not before.startswith("-"):
            names.append(argument)
    return names


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the headers that send an API key to a server.

    Args:
        api_key: None or "" for the environment's OPENAI_API_KEY, if there is one.

    Raises:
        ArgumentError: The key is not valid in a header.
    """
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise wrong_argument(ArgumentError, "api_key", "printable ASCII", key)
    return {"Authorization": f"Bearer {key}"}


def run_command(prog: str, run: Callable[[], int | None]) -> int:
    """Run a command; print its errors to stderr and return the exit code.

    Args:
        prog: Name of the command in messages.
        run: Returns an exit code; None is 0.
    """
    before = warnings.formatwarning
    # Python's own format adds a source line, which is useless to a user.
    warnings.formatwarning = lambda message, *_, **__: f"{prog}: warning: {message}\n"
    # Generated text may have characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # A byte that is not UTF-8 must not end the read: it is read as a surrogate, as in
    # command-line arguments, and `check_utf8` reports it.
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
    """Return the argparse type for a dataclass field's type."""
    is_union = isinstance(kind, types.UnionType)
    members = [one for one in typing.get_args(kind) if one is not types.NoneType]
    kind = members[0] if is_union else kind
    if kind in (float, str):
        return kind
    return integer_flag if kind is int else json_flag


def integer_flag(text: str) -> int:
    """Parse an integer, which may have a unit as in vLLM: 8k = 8000, 8K = 8192.

    Numbers with a decimal unit (k, m, g, t) may have a fraction.
    """
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None:
        try:
            return int(text)
        except ValueError:
            message = f"it must be an integer, such as 8000, 8k or 8K, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None
    number, unit = found.groups()
    power = 1 + _UNITS.index(unit.lower())
    if unit.islower():
        return int(Decimal(number) * 1000**power)
    if "." in number:
        message = f"{unit} is a power of 1024, without a fraction; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(number) * 1024**power


def length_flag(text: str) -> int:
    """Parse a length like `integer_flag`; "auto" is -1."""
    return -1 if text.strip().lower() == "auto" else integer_flag(text)


def json_flag(text: str) -> Any:
    """Parse a flag's value as JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"it must be JSON, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(message) from error


def documented(*classes: type) -> dict[str, str]:
    """Return the descriptions of attributes in classes' docstrings, by name."""
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
    # argparse formats help texts with "%".
    return {name: text.replace("%", "%%") for name, text in found.items()}
