"""Owns the command line of the server, and its YAML equivalent (`--config`).

Every field of `AsyncEngineArgs` is a flag, as in vLLM; so is every `ServerSettings`
field.
"""

import argparse
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jaxspec import envs
from jaxspec.command_line import (
    CommandParser,
    dashed,
    documented,
    flag_type,
    without_dots,
)
from jaxspec.engine.arg_utils import (
    AsyncEngineArgs,
    add_vllm_flags,
    engine_args,
    flags_of,
)
from jaxspec.engine.vllm_arguments import VLLM_SERVER_FLAGS, check_vllm_arguments
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.serve.settings import DEFAULT_READ_HEADERS_S, SPEC_METRICS, ServerSettings

_log = logging.getLogger(__name__)

WARM_UPS = ("none", "plain", "all")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

_LISTS = ("api_keys", "allowed_origins", "allowed_methods", "allowed_headers")
# Settings whose flag differs from the field's name, because vLLM uses that flag.
_RENAMED = {"api_keys": "api_key"}
# Spellings of booleans, for sources such as Ray Serve's command line whose values are
# all strings.
_BOOLEANS = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line.

    Attributes:
        listening: `host`, `port`, `uds` and uvicorn's other options.
        warm_up: Programs compiled before a request needs them: one of `WARM_UPS`.
        shutdown_timeout: Seconds for running requests to finish after a signal.
    """

    engine: AsyncEngineArgs
    settings: ServerSettings
    listening: argparse.Namespace
    warm_up: str
    shutdown_timeout: int


def read_flags(prog: str, arguments: Sequence[str]) -> Options:
    """Parse a command line; an invalid one exits the program, as argparse does.

    Raises:
        ConfigError: A value is invalid.
        UnsupportedError: A flag asks for an unsupported feature.
    """
    parser = make_parser(prog)
    arguments = without_dots([dashed(argument) for argument in arguments])
    config, _ = _config_parser().parse_known_args(arguments)
    if config.config is not None:
        arguments = [*_from_file(Path(config.config), parser), *arguments]
    given = parser.parse_args(arguments)
    return _options(given)


def read_values(prog: str, values: Mapping[str, Any]) -> Options:
    """Parse flags given by name.

    Args:
        prog: Name of the program or application in error messages.
        values: By name, with or without dashes; the texts "true" and "false" set
            boolean flags too.

    Raises:
        ConfigError: A flag is unknown, or a value is invalid.
        UnsupportedError: A flag asks for an unsupported feature.
    """
    parser = make_parser(prog, _ValuesParser)
    allowed = "flags of `python -m jaxspec.serve` by name"
    return _options(parser.parse_args([*_written(values, parser, prog, allowed)]))


class _ValuesParser(CommandParser):
    """Raises `ConfigError` where a command line would exit the program."""

    def _refuse(self, message: str, unknown: Sequence[str] = ()) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.", parameter=None, value=None)


def _options(given: argparse.Namespace) -> Options:
    values = vars(given)
    name, count = "--api-server-count", values["api_server_count"]
    if count != 1:
        hint = "A server is one process; run several servers behind a proxy instead."
        raise wrong_argument(ConfigError, name, "1", count, hint)
    no_effect = check_vllm_arguments(VLLM_SERVER_FLAGS, values)
    if no_effect:
        _log.warning("Flags without effect: %s", ", ".join(no_effect))
    return Options(
        engine=engine_args(values),
        settings=read_settings(values),
        listening=given,
        warm_up=values["warm_up"],
        shutdown_timeout=values["shutdown_timeout"],
    )


def read_settings(values: dict[str, Any]) -> ServerSettings:
    """Make the settings from flags that `add_settings` and `add_cli_args` have added.

    Settings without a flag have their defaults.

    Args:
        values: As argparse returns them, with the `model` that `engine_args` has set.

    Raises:
        ConfigError: A value is invalid.
    """
    served = values["served_model_name"] or [values["model"]]
    chosen: dict[str, Any] = {"served_model_names": tuple(served)}
    for item in dataclasses.fields(ServerSettings):
        if item.name in chosen or item.name not in values:
            continue
        value = values[item.name]
        if item.name in _LISTS:
            value = tuple(_flattened(item.name, value or ()))
        if item.name == "api_keys" and not value and envs.VLLM_API_KEY:
            value = (envs.VLLM_API_KEY,)
        if item.name == "server_dev_mode":
            value = value or envs.VLLM_SERVER_DEV_MODE
        chosen[item.name] = value
    return ServerSettings(**chosen)


def _flattened(name: str, values: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a list flag, which may be JSON: `'["*"]'`, as in vLLM.

    Raises:
        ConfigError: A value begins as a JSON list but is not valid JSON.
    """
    for value in values:
        if value.startswith("["):
            try:
                yield from json.loads(value)
            except json.JSONDecodeError as error:
                allowed = "strings, or a JSON list of strings"
                raise wrong_argument(ConfigError, name, allowed, value) from error
        else:
            yield value


def _config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file that maps names of flags to values; the command line takes "
        "precedence",
    )
    return parser


def _from_file(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Read a file of flags as command-line arguments."""
    allowed = "a YAML file that maps names of flags to values"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            # The full message quotes lines of the file, which may contain API keys.
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise ConfigError(
            f"--config must be {allowed}, got {str(path)!r}: {reason}",
            parameter="config",
            value=str(path),
        ) from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config must be {allowed}, but {str(path)!r} contains a "
            f"{type(content).__name__}.",
            parameter="config",
            value=str(path),
        )
    yield from _written(content, parser, str(path), allowed)


def _written(
    values: Mapping[str, Any], parser: argparse.ArgumentParser, place: str, allowed: str
) -> Iterator[str]:
    """Convert flags given by name to command-line arguments.

    Args:
        place: Name of the source of `values`, for the error about an unknown flag.
    """
    actions = parser._option_string_actions
    for key, value in values.items():
        flag = f"--{key}".replace("_", "-")
        if flag not in actions or flag in ("--config", "--help"):
            hint = "See --help for all flags."
            raise wrong_argument(ConfigError, place, allowed, key, hint)
        if isinstance(actions[flag], argparse.BooleanOptionalAction):
            value = _BOOLEANS.get(value, value) if isinstance(value, str) else value
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif isinstance(value, list) and not _holds_objects(value):
            yield from (flag, *map(str, value))
        elif isinstance(value, (dict, list)):
            yield f"{flag}={json.dumps(value)}"
        elif value is not None:
            yield f"{flag}={value}"


def _holds_objects(values: list[Any]) -> bool:
    return any(isinstance(value, (dict, list)) for value in values)


def make_parser(prog: str, kind: type[CommandParser] = CommandParser) -> CommandParser:
    """Make the parser of the complete command line."""
    parser = kind(
        prog=prog,
        description="Serve a Gemma model with OpenAI's API. Without a model: the "
        "bundled pair.",
        parents=[_config_parser()],
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the same as --model"
    )
    _add_listening(parser.add_argument_group("listening"))
    _add_lifecycle(parser.add_argument_group("startup and shutdown"))
    settings = parser.add_argument_group("responses and limits")
    add_settings(settings, [item.name for item in dataclasses.fields(ServerSettings)])
    AsyncEngineArgs.add_cli_args(parser)
    add_vllm_flags(parser, VLLM_SERVER_FLAGS)
    return parser


def listening_flags() -> frozenset[str]:
    """Return the names of the flags that `Options.listening` holds, such as `port`."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_listening(parser.add_argument_group())
    return frozenset(action.dest for action in parser._actions)


def _add_listening(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default: this machine only")
    add("--port", type=int, default=8000, help="default: %(default)s; 0: any free port")
    add("--uds", metavar="PATH", help="Unix socket, in place of host and port")
    add("--ssl-certfile", metavar="FILE", help="certificate; enables HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="default: the key in --ssl-certfile")
    add("--ssl-ca-certs", metavar="FILE", help="CAs that sign client certificates")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="client certificates: 0 none, 1 optional, 2 required",
    )
    add("--root-path", default="", help="path prefix under which a proxy serves this")
    add(
        "--limit-concurrency",
        metavar="N",
        type=_positive(int),
        help="concurrent connections; requests on further ones get 503, except for "
        "/health, /ping and /metrics (default: 4096, or as `ulimit -n` permits)",
    )
    add(
        "--timeout-keep-alive",
        metavar="SECONDS",
        type=_positive(float),
        default=5.0,
        help="time until an idle connection is closed (default: %(default)g)",
    )
    add(
        "--timeout-read-headers",
        metavar="SECONDS",
        type=_positive(float),
        default=DEFAULT_READ_HEADERS_S,
        help="time for the headers of a request to arrive (default: %(default)g); for "
        "its body see --timeout-read-body",
    )
    add(
        *flags_of("api_server_count"),
        type=int,
        default=1,
        help="only 1 is supported; run several servers behind a proxy instead",
    )
    add("--uvicorn-log-level", choices=LOG_LEVELS, default="info", help="default: info")
    add(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        help="do not log every request",
    )


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a converter for argparse that accepts only finite numbers above 0."""

    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    # argparse shows this name in errors: "invalid int value".
    read.__name__ = kind.__name__
    return read


def _add_lifecycle(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warm-up",
        choices=WARM_UPS,
        default="plain",
        help="programs to compile before a request needs them. plain (default): those "
        "of plain requests, in the background; /health returns 503 until the first is "
        "compiled. all: also those for logprobs, penalties, masks and structured "
        "outputs, before the server accepts connections",
    )
    group.add_argument(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=int,
        default=30,
        help="time for running requests to finish after Ctrl-C or SIGTERM (default: "
        "%(default)s); the second one stops the server at once",
    )


def add_settings(group: argparse._ArgumentGroup, names: Sequence[str]) -> None:
    """Add the flags of the fields of `ServerSettings` with these names."""
    help_texts = documented(ServerSettings)
    choices = {"per_request_spec_decode_metrics": SPEC_METRICS}
    for item in dataclasses.fields(ServerSettings):
        if item.name not in names or item.name == "served_model_names":
            continue  # `served_model_name` is an engine argument
        flag = "--" + _RENAMED.get(item.name, item.name).replace("_", "-")
        options: dict[str, Any] = {"dest": item.name, "default": item.default}
        options["help"] = help_texts.get(item.name)
        if item.name in _LISTS:
            options |= {"nargs": "+", "metavar": "TEXT"}
        elif item.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = flag_type(item.type)
            options["choices"] = choices.get(item.name)
        group.add_argument(flag, **options)
