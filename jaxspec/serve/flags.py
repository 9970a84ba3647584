"""Owns the command line of the server, and the file that may stand in for it.

Every field of `AsyncEngineArgs` is a flag, as in vLLM; so is what the server adds.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jaxspec import envs
from jaxspec.command_line import CommandParser, documented, flag_type
from jaxspec.engine.arg_utils import AsyncEngineArgs, bundled_pair
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.serve.settings import DEFAULT_READ_HEADERS_S, SPEC_METRICS, ServerSettings

WARM_UPS = ("none", "plain", "all")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

_LISTS = ("api_keys", "allowed_origins", "allowed_methods", "allowed_headers")
# Fields of the settings whose flags have other names, as vLLM's do.
_RENAMED = {"api_keys": "api_key"}
# Where every value is text.
_SAID = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A command line that has been read.

    Attributes:
        listening: `host`, `port`, `uds` and what else uvicorn needs.
        warm_up: What is compiled before requests ask for it: one of `WARM_UPS`.
        shutdown_timeout: Seconds that requests have to end after a signal.
    """

    engine: AsyncEngineArgs
    settings: ServerSettings
    listening: argparse.Namespace
    warm_up: str
    shutdown_timeout: int


def read_flags(prog: str, arguments: Sequence[str]) -> Options:
    """Read a command line; a wrong one ends the program, as argparse does.

    Raises:
        ConfigError: A value cannot work.
        UnsupportedError: One asks for what the engine does not do.
    """
    parser = make_parser(prog)
    arguments = [dashed(argument) for argument in arguments]
    config, _ = _config_parser().parse_known_args(arguments)
    if config.config is not None:
        arguments = [*_from_file(Path(config.config), parser), *arguments]
    given = parser.parse_args(arguments)
    return _options(given)


def read_values(prog: str, values: Mapping[str, Any]) -> Options:
    """Read flags by their names, as a file has them.

    Args:
        prog: What the values are for, as errors call it.
        values: By name, with or without dashes; "true" and "false" are flags as well.

    Raises:
        ConfigError: There is no such flag, or a value cannot work.
        UnsupportedError: One asks for what the engine does not do.
    """
    parser = make_parser(prog, _ValuesParser)
    allowed = "flags of `python -m jaxspec.serve` by name"
    return _options(parser.parse_args([*_written(values, parser, prog, allowed)]))


class _ValuesParser(CommandParser):
    """Raises where a command line would end the program."""

    def _refuse(self, message: str, unknown: Sequence[str] = ()) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.", parameter=None, value=None)


def _options(given: argparse.Namespace) -> Options:
    values = vars(given)
    name, count = "--api-server-count", values["api_server_count"]
    if count != 1:
        hint = "One process serves; start several servers behind a proxy instead."
        raise wrong_argument(ConfigError, name, "1", count, hint)
    engine = engine_args(values)
    served = values["served_model_name"] or [values["model"]]
    chosen: dict[str, Any] = {"served_model_names": tuple(served)}
    for item in dataclasses.fields(ServerSettings):
        value = values.get(item.name)
        if item.name in _LISTS:
            value = tuple(_flattened(item.name, value or ()))
        if item.name == "api_keys" and not value and envs.VLLM_API_KEY:
            value = (envs.VLLM_API_KEY,)
        if item.name not in chosen:
            chosen[item.name] = value
    return Options(
        engine=engine,
        settings=ServerSettings(**chosen),
        listening=given,
        warm_up=values["warm_up"],
        shutdown_timeout=values["shutdown_timeout"],
    )


def engine_args(values: dict[str, Any]) -> AsyncEngineArgs:
    """Make the engine's arguments of flags that `add_cli_args` has added.

    Args:
        values: As argparse returns them; the model is settled in them as well.

    Raises:
        ConfigError: A value cannot work.
        UnsupportedError: One asks for what the engine does not do.
    """
    _choose_model(values)
    return AsyncEngineArgs.from_cli_args(argparse.Namespace(**values))


def _choose_model(values: dict[str, Any]) -> None:
    """Settle the model: as an argument, as a flag, or the bundled pair."""
    tag, name = values.get("model_tag"), values["model"]
    if tag is not None and name is not None and tag != name:
        allowed = f"left out, or {tag!r}, which stands alone on the command line"
        raise wrong_argument(ConfigError, "--model", allowed, name)
    values["model"] = tag or name
    if values["model"] is None:
        values |= bundled_pair(values)


def dashed(argument: str) -> str:
    """Spell a flag with dashes, however it was spelled; vLLM takes both."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def parse_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Read a command line with flags in either spelling; None: the process's own."""
    given = sys.argv[1:] if arguments is None else arguments
    return parser.parse_args([dashed(argument) for argument in given])


def _flattened(name: str, values: Sequence[str]) -> Iterator[str]:
    """Read what vLLM takes as JSON: `--allowed-origins '["*"]'`.

    Raises:
        ConfigError: A value that begins as a JSON list is none.
    """
    for value in values:
        if value.startswith("["):
            try:
                yield from json.loads(value)
            except json.JSONDecodeError as error:
                allowed = "texts, or a JSON list of them"
                raise wrong_argument(ConfigError, name, allowed, value) from error
        else:
            yield value


def _config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML with flags by name; flags of the command line win",
    )
    return parser


def _from_file(path: Path, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Read a file of flags as if they stood on the command line."""
    allowed = "a YAML file with flags by name"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            # The whole message quotes lines of the file, which may hold keys.
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
            f"--config must be {allowed}, got {str(path)!r}, which holds a "
            f"{type(content).__name__}.",
            parameter="config",
            value=str(path),
        )
    yield from _written(content, parser, str(path), allowed)


def _written(
    values: Mapping[str, Any], parser: argparse.ArgumentParser, place: str, allowed: str
) -> Iterator[str]:
    """Write flags by name as a command line has them.

    Args:
        place: Where they stand, which the error for an unknown one begins with.
    """
    actions = parser._option_string_actions
    for key, value in values.items():
        flag = f"--{key}".replace("_", "-")
        if flag not in actions or flag in ("--config", "--help"):
            hint = "See --help for the flags there are."
            raise wrong_argument(ConfigError, place, allowed, key, hint)
        if isinstance(actions[flag], argparse.BooleanOptionalAction):
            value = _SAID.get(value, value) if isinstance(value, str) else value
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
    """Make the parser of the whole command line."""
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
    _add_life(parser.add_argument_group("start and end"))
    _add_settings(parser.add_argument_group("answers and limits"))
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def listening_flags() -> frozenset[str]:
    """Name the flags of the socket, as `Options.listening` has them."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_listening(parser.add_argument_group())
    return frozenset(action.dest for action in parser._actions)


def _add_listening(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default: this machine only")
    add("--port", type=int, default=8000, help="default: %(default)s; 0: any")
    add("--uds", metavar="PATH", help="a Unix socket, in place of host and port")
    add("--ssl-certfile", metavar="FILE", help="with it, HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="where the certificate's has no key")
    add("--ssl-ca-certs", metavar="FILE", help="who signs clients' certificates")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="whether clients bring certificates: 0 no, 1 they may, 2 they must",
    )
    add("--root-path", default="", help="what a proxy takes off every path, or leaves")
    add(
        "--limit-concurrency",
        metavar="N",
        type=_positive(int),
        help="connections at a time; requests on further ones get 503, except for "
        "/health, /ping and /metrics (default: 4096, or what `ulimit -n` permits)",
    )
    add(
        "--timeout-keep-alive",
        metavar="SECONDS",
        type=_positive(float),
        default=5.0,
        help="an idle connection is closed after an answer (default: %(default)g)",
    )
    add(
        "--timeout-read-headers",
        metavar="SECONDS",
        type=_positive(float),
        default=DEFAULT_READ_HEADERS_S,
        help="for the headers of a request to arrive (default: %(default)g); of its "
        "body: --timeout-read-body",
    )
    add(
        "--api-server-count",
        type=int,
        default=1,
        help="1: one process serves, and there are no others; start several servers "
        "behind a proxy instead",
    )
    add("--uvicorn-log-level", choices=LOG_LEVELS, default="info")
    add("--disable-uvicorn-access-log", action=argparse.BooleanOptionalAction)


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return the type of a flag whose numbers are above 0 and finite."""

    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    # argparse names it in errors: "invalid int value".
    read.__name__ = kind.__name__
    return read


def _add_life(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warm-up",
        choices=WARM_UPS,
        default="plain",
        help="what is compiled unasked: what plain requests need (default), beside "
        "them, and /health says 503 until the first program is there; all, also for "
        "logprobs, penalties, masks and structured outputs, before the server listens",
    )
    group.add_argument(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=int,
        default=30,
        help="for requests to end after SIGTERM (default: %(default)s); a second "
        "signal ends the server at once",
    )


def _add_settings(group: argparse._ArgumentGroup) -> None:
    told = documented(ServerSettings)
    choices = {"per_request_spec_decode_metrics": SPEC_METRICS}
    for item in dataclasses.fields(ServerSettings):
        if item.name == "served_model_names":
            continue  # an argument of the engine
        flag = "--" + _RENAMED.get(item.name, item.name).replace("_", "-")
        options: dict[str, Any] = {"dest": item.name, "default": item.default}
        options["help"] = told.get(item.name)
        if item.name in _LISTS:
            options |= {"nargs": "+", "metavar": "TEXT"}
        elif item.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = flag_type(item.type)
            options["choices"] = choices.get(item.name)
        group.add_argument(flag, **options)
