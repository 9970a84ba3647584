"""Owns the errors a caller can cause, and the argument checks that raise them.

Every message has the given value, the allowed values and, if there is one, a fix.
Independent of which arguments exist.
"""

import difflib
import math
import numbers
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SHOWN = 200
# Minimum difflib ratio of a suggested name: "prot" and "port" have 0.75.
NEAR = 0.75
# Arguments whose values are never quoted.
SECRET_ARGUMENTS = ("api_key", "api_keys", "hf_token")


class ArgumentError(Exception):
    """Base of the errors below; carries the argument at fault.

    Attributes:
        parameter: Name of the argument as the caller spelled it, if one is at fault.
        value: Its value.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: object = None
    ):
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ConfigError(ArgumentError, ValueError):
    """An engine argument, a model folder or a combination of them is invalid."""


class RequestError(ArgumentError, ValueError):
    """A prompt or a sampling parameter of one request is invalid."""


class UnsupportedError(ArgumentError, NotImplementedError):
    """The request is meaningful, but this engine does not support it."""


class EngineGenerateError(Exception):
    """A step of this request failed; the engine continues without the request."""


class RetryableRequestError(Exception):
    """The engine accepts no requests now; the same request may succeed later."""


class EngineDeadError(Exception):
    """The engine has ended, and accepts no more requests."""

    def __init__(self, message: str = ""):
        super().__init__(
            message
            or "The engine has stopped. See the log for the reason, and create a "
            "new engine."
        )


class NativePanicError(Exception):
    """A library in Rust panicked, because of a bug in the library, in one call."""


def is_panic(error: BaseException) -> bool:
    """Return whether an error is the one that pyo3 raises for a panic in Rust.

    The error's type derives from BaseException alone, and cannot be imported.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def named_in(place: str) -> Iterator[None]:
    """Prefix argument errors raised in this block with the arguments' place."""
    try:
        yield
    except ArgumentError as error:
        raise type(error)(
            f"{place}: {error}", parameter=error.parameter, value=error.value
        ) from error


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean ...?" for an unknown name, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)
    return f"did you mean {close[0]}?" if close else otherwise


def wrong_argument(
    error: type[ArgumentError],
    name: str,
    allowed: str,
    value: object,
    hint: str = "",
    *,
    described_as: str = "",
) -> ArgumentError:
    """Make the error "`name` must be `allowed`, got `value`".

    Args:
        described_as: Replaces `name` in the message, if the name alone would be
            unclear.
    """
    called, got = described_as or name, shown(value)
    if is_secret(name):
        got, value = "another value, which is not shown", None
    message = f"{called} must be {allowed}, got {got}. {hint}".rstrip()
    return error(message, parameter=name, value=value)


def is_secret(name: str) -> bool:
    """Return whether the name is that of a secret argument, or a misspelling of it."""
    plain = name.lstrip("-").replace("-", "_")
    return bool(difflib.get_close_matches(plain, SECRET_ARGUMENTS, n=1, cutoff=0.8))


def escaped(text: str) -> str:
    r"""Return a text in one line: a client's text must not forge log lines.

    Characters that are not printable become `\n`, `\x1b`, `\u2028`.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode()
        for one in text
    )


def read_keys(
    name: str, given: object, known: Collection[str], *, has_dashes: bool = False
) -> dict[str, Any]:
    """Check a dict of settings; return its keys and values.

    Args:
        name: Name of the argument.
        has_dashes: Read "a-b" as "a_b".

    Raises:
        ConfigError: It is not a dict, or has an unknown key.
    """
    if not isinstance(given, Mapping):
        allowed = "a dict with keys among " + ", ".join(known)
        raise wrong_argument(ConfigError, name, allowed, given)
    values = {
        str(key).replace("-", "_") if has_dashes else str(key): value
        for key, value in given.items()
    }
    for key, value in values.items():
        if key not in known:
            hint = nearest(key, known, f"known: {list(known)}.")
            raise ConfigError(
                f"{name} has no key {key!r} (given {value!r}): {hint}",
                parameter=name,
                value=given,
            )
    return values


def one_of(choices: Iterable[object]) -> str:
    """List all choices, for an error message."""
    return "one of " + ", ".join(map(repr, choices))


def shown(value: object) -> str:
    """Write a value for a message, shortened if it is long."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[: MAX_SHOWN + 1]  # the repr of a whole prompt takes long
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def refuse(name: str, value: object) -> None:
    """Raise `UnsupportedError` unless `value` is None."""
    if value is not None:
        raise UnsupportedError(
            f"{name}={shown(value)} is not supported yet; leave it out.",
            parameter=name,
            value=value,
        )


def check_utf8(error: type[ArgumentError], name: str, text: str) -> str:
    """Return `text` if UTF-8 can encode it; a lone surrogate has no bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        allowed = "text that UTF-8 can encode"
        raise wrong_argument(error, name, allowed, text, str(cause)) from cause
    return text


def check_integer(
    error: type[ArgumentError],
    name: str,
    value: object,
    *,
    low: int,
    high: int | None = None,
    hint: str = "",
    described_as: str = "",
) -> int:
    """Return `value` as an int if it is an integer in `[low, high]`, not a bool.

    Args:
        described_as: As for `wrong_argument`.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    allowed = f"an integer from {low} to {high}"
    if high is None:
        allowed = f"an integer of at least {low}"
    raise wrong_argument(error, name, allowed, value, hint, described_as=described_as)


def check_number(
    error: type[ArgumentError],
    name: str,
    value: object,
    *,
    low: float | int,
    high: float | int | None = None,
    open_low: bool = False,
    hint: str = "",
) -> float:
    """Return `value` as a float if it is a finite number in `[low, high]`.

    With `open_low` the lower end itself is not allowed.
    """
    if high is None:
        allowed = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    else:
        allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_argument(error, name, allowed, value, hint)
    try:
        number = float(value)
    except OverflowError:  # an int has no bounds
        number = math.inf
    too_low = number < low or (open_low and number == low)
    if not math.isfinite(number) or too_low or (high is not None and number > high):
        raise wrong_argument(error, name, allowed, value, hint)
    return number


def check_flag(error: type[ArgumentError], name: str, value: object) -> bool:
    """Return `value` if it is True or False; 0, 1 and strings are refused."""
    if not isinstance(value, bool):
        raise wrong_argument(error, name, "True or False", value)
    return value


def check_choice(
    error: type[ArgumentError],
    name: str,
    value: object,
    choices: tuple[str, ...],
    hint: str = "",
) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        allowed = one_of(choices)
        raise wrong_argument(error, name, allowed, value, hint)
    return value


def check_strings(error: type[ArgumentError], name: str, value: object) -> list[str]:
    """Return `value` if it is a list of non-empty strings; None is an empty list."""
    allowed = "a list of non-empty strings"
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_argument(error, name, allowed, value)
    texts = [text for text in value if isinstance(text, str) and text]
    if len(texts) < len(value):
        raise wrong_argument(error, name, allowed, value)
    return [check_utf8(error, name, text) for text in texts]


def plain_values(value: Any) -> Any:
    """Return an array as Python lists and numbers, and any other value unchanged.

    Arrays are those of numpy, jax and torch, and columns of pandas: objects with
    `tolist` and `ndim`. An array without dimensions becomes a number.
    """
    is_array = hasattr(value, "tolist") and hasattr(value, "ndim")
    return value.tolist() if is_array else value


def check_token_ids(error: type[ArgumentError], name: str, value: object) -> list[int]:
    """Return `value` as a list if it holds integers of at least 0; None is empty."""
    if value is None:
        return []
    ids = plain_values(value)
    if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
        raise wrong_argument(error, name, "a list of token ids", value)
    return [check_token_id(error, name, plain_values(token)) for token in ids]


def check_token_id(
    error: type[ArgumentError],
    name: str,
    token: object,
    vocab_size: int | None = None,
    *,
    described_as: str = "",
) -> int:
    """Return `token`, one of the ids in `name`, if it is a valid token id.

    Args:
        vocab_size: Upper bound; None if it is not known yet.
        described_as: As for `wrong_argument`; "Every id of `name`" by default.
    """
    high, hint = None, ""
    if vocab_size is not None:
        high = vocab_size - 1
        hint = f"The vocabulary has {vocab_size} tokens; others are out of vocabulary."
    described_as = described_as or f"Every id of {name}"
    return check_integer(
        error, name, token, low=0, high=high, hint=hint, described_as=described_as
    )
