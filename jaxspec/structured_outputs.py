"""Owns `StructuredOutputsParams`: what form a text must have. vLLM's names and rules.

Knows the fields and how they may be combined; what they mean to a vocabulary is
`jaxspec.engine.structured_output`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

from jaxspec.errors import RequestError, UnsupportedError, check_flag, wrong_argument

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


# No checks by jaxtyping in the tests: the class has its own, with better errors.
@no_type_check
@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The form of a generated text: exactly one of the first five fields.

    A text is complete when the form is; then only the model's end tokens may follow.
    One that `max_tokens` or a stop string cuts short is a beginning of the form.

    Attributes:
        json: A JSON schema, as a dict or as its text.
        regex: A regular expression that the whole text matches.
        choice: The texts to choose from.
        grammar: A context-free grammar, in Lark's or in GBNF's form.
        json_object: True: any JSON object.
        disable_any_whitespace: No white space between the parts of JSON.
        disable_additional_properties: Objects of the schema that do not speak of
            `additionalProperties` allow none.
        whitespace_pattern: Regular expression of the white space that JSON may have.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self):
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise wrong_argument(
                RequestError,
                "structured_outputs",
                f"exactly one of {', '.join(_KINDS[:-1])}",
                {name: getattr(self, name) for name in given},
            )
        if self.structural_tag is not None:
            raise UnsupportedError(
                "structural_tag is not supported: Gemma 2 has no tags for calls. Use "
                "json, regex, choice, grammar or json_object.",
                parameter="structural_tag",
                value=self.structural_tag,
            )
        self._check_kind()
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_flag(RequestError, name, getattr(self, name))
        pattern = self.whitespace_pattern
        if pattern is not None and not (isinstance(pattern, str) and pattern):
            allowed = "a regular expression or None"
            raise wrong_argument(RequestError, "whitespace_pattern", allowed, pattern)
        if pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                f"whitespace_pattern={pattern!r} and disable_any_whitespace=True "
                "contradict each other: leave one out.",
                parameter="whitespace_pattern",
                value=pattern,
            )

    @property
    def kind(self) -> str:
        """The one field that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def _check_kind(self) -> None:
        kind = self.kind
        value = getattr(self, kind)
        texts = isinstance(value, str) and bool(value)
        is_right, allowed = {
            "json": (texts or isinstance(value, Mapping), "a JSON schema"),
            "regex": (texts, "a regular expression"),
            "choice": (_is_choice(value), "a list of at least one string"),
            "grammar": (texts, "a grammar in Lark's or GBNF's form"),
            "json_object": (value is True, "True"),
        }[kind]
        if not is_right:
            raise wrong_argument(RequestError, kind, allowed, value)


def check_structured_outputs(given: object) -> None:
    """Check the field of `SamplingParams`, whose parts may have been assigned.

    Raises:
        RequestError: It is neither None nor `StructuredOutputsParams`, or its parts do
            not go together.
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
