"""Structured outputs: constraints on a generated text, with vLLM's names and rules.

`StructuredOutputsParams` belongs to a request, `StructuredOutputsConfig` to an engine.
Owns the fields and their combinations; `jaxspec.engine.structured_output` turns them
into masks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, no_type_check

from jaxspec.errors import (
    ArgumentError,
    ConfigError,
    RequestError,
    UnsupportedError,
    check_flag,
    named_in,
    one_of,
    read_keys,
    wrong_argument,
)

_log = logging.getLogger(__name__)

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_FLAGS = ("disable_any_whitespace", "disable_additional_properties")
# All are llguidance; vLLM has the last three as well.
_BACKENDS = ("auto", "guidance", "lm-format-enforcer", "outlines", "xgrammar")
# The white space allowed between two parts of JSON: none, one space, or a line break
# with an indentation. 16 columns are eight levels of `json.dumps(..., indent=2)`. JSON
# itself sets no bound, and an uncertain model generates white space until `max_tokens`.
DEFAULT_WHITESPACE_PATTERN = r" |\r?\n( {0,16}|\t{0,8})"


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The constraint on a generated text: exactly one of these kinds is set.

    The kinds are json, regex, choice, grammar, json_object and structural_tag.

    Once a text satisfies the constraint and cannot be continued, only the model's end
    tokens may follow. A text that ends early, by `max_tokens` or a stop string, is a
    prefix of a matching text.

    Attributes:
        json: A JSON schema, as a dict or as its text.
        regex: A regular expression that the whole text matches.
        choice: The texts to choose from.
        grammar: A context-free grammar, in Lark's or GBNF's notation.
        json_object: True: any JSON object.
        disable_any_whitespace: No white space between the parts of JSON.
        disable_additional_properties: Objects of the schema that do not set
            `additionalProperties` allow none.
        whitespace_pattern: Regular expression of the white space between two parts of
            JSON. Default: a space, or a line break and up to 16 columns.
        structural_tag: A constraint on parts of the text, such as the calls in it, in
            either of vLLM's notations, as a dict or as its JSON text.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self):
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise wrong_argument(
                RequestError,
                "structured_outputs",
                f"exactly one of {', '.join(_KINDS)}",
                {
                    name: value
                    for name, value in vars(self).items()
                    if value not in (None, False)
                },
            )
        self._check_kind()
        for name in _JSON_FLAGS:
            check_flag(RequestError, name, getattr(self, name))
        _check_white_space(RequestError, self)

    @property
    def kind(self) -> str:
        """Name of the one field that is set."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def _check_kind(self) -> None:
        kind = self.kind
        value = getattr(self, kind)
        texts = isinstance(value, str) and bool(value)
        is_right, allowed = {
            "json": (texts or isinstance(value, Mapping), "a JSON schema"),
            "regex": (texts, "a regular expression"),
            "choice": (_is_choice(value), "a list of at least one string"),
            "grammar": (texts, "a grammar in Lark's or GBNF's notation"),
            "json_object": (value is True, "True"),
            "structural_tag": (
                texts or isinstance(value, Mapping),
                "a structural tag",
            ),
        }[kind]
        if not is_right:
            raise wrong_argument(RequestError, kind, allowed, value)


# The tests do not check it with jaxtyping: its own checks have better errors.
@no_type_check
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """An engine's defaults for structured outputs, with vLLM's names.

    Attributes:
        backend: "auto" or "guidance"; both are llguidance. vLLM's other backends are
            replaced by llguidance, with a warning.
        disable_fallback: Without effect: there is no other backend.
        disable_any_whitespace: No white space between the parts of JSON.
        disable_additional_properties: Objects of a schema that do not set
            `additionalProperties` allow none.
        whitespace_pattern: Regular expression of the white space between two parts of
            JSON. vLLM does not have it; None is `DEFAULT_WHITESPACE_PATTERN`.
        reasoning_parser: Only "" is allowed: Gemma does not mark its reasoning.
        reasoning_parser_plugin: Only "" is allowed.
        enable_in_reasoning: Without effect.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False

    def __post_init__(self):
        if self.backend not in _BACKENDS:
            hint = "Grammars are always compiled by llguidance; leave it out."
            raise wrong_argument(
                UnsupportedError, "backend", one_of(_BACKENDS), self.backend, hint
            )
        if self.backend not in _BACKENDS[:2]:
            _log.warning(
                "backend=%r has no effect: llguidance compiles all grammars",
                self.backend,
            )
        for name in ("reasoning_parser", "reasoning_parser_plugin"):
            if getattr(self, name):
                raise UnsupportedError(
                    f"{name}={getattr(self, name)!r} is not supported: Gemma does "
                    "not mark its reasoning. Leave it out.",
                    parameter=name,
                    value=getattr(self, name),
                )
        flags = ("disable_fallback", "enable_in_reasoning")
        for name in (*flags, *_JSON_FLAGS):
            check_flag(ConfigError, name, getattr(self, name))
        _check_white_space(ConfigError, self)

    @classmethod
    def read(cls, given: object) -> "StructuredOutputsConfig":
        """Read `structured_outputs_config`: a dict, or None.

        Raises:
            ConfigError: The value is neither, or has an unknown key or a wrong value.
            UnsupportedError: A value is not supported.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        name, known = "structured_outputs_config", [item.name for item in fields(cls)]
        values = read_keys(name, given, known, has_dashes=True)
        with named_in(name):
            return cls(**values)


def _check_white_space(
    error: type[ArgumentError],
    given: "StructuredOutputsParams | StructuredOutputsConfig",
) -> None:
    pattern = given.whitespace_pattern
    if pattern is not None and not isinstance(pattern, str):
        allowed = "a regular expression or None"
        raise wrong_argument(error, "whitespace_pattern", allowed, pattern)
    if pattern and given.disable_any_whitespace:
        raise error(
            f"whitespace_pattern={pattern!r} and disable_any_whitespace=True "
            "contradict each other: leave one out.",
            parameter="whitespace_pattern",
            value=pattern,
        )


def check_structured_outputs(given: object) -> None:
    """Check the field of `SamplingParams`; its attributes may have been changed.

    Raises:
        RequestError: It is neither None nor `StructuredOutputsParams`, or its values
            contradict each other.
    """
    if given is None:
        return
    if not isinstance(given, StructuredOutputsParams):
        hint = 'For example StructuredOutputsParams(choice=["yes", "no"]).'
        allowed = "StructuredOutputsParams"
        raise wrong_argument(RequestError, "structured_outputs", allowed, given, hint)
    given.__post_init__()


def _is_choice(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return bool(value) and all(isinstance(text, str) for text in value)
