import math
from typing import Any

import pytest

from jaxspec import errors


def test_errors_have_the_expected_base_classes():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    for error in (errors.ConfigError, errors.RequestError, errors.UnsupportedError):
        assert issubclass(error, errors.ArgumentError)


def test_wrong_argument_error_has_parameter_and_value():
    error = errors.wrong_argument(
        errors.ConfigError, "seed", "an integer", "x", "Try 0."
    )
    assert str(error) == "seed must be an integer, got 'x'. Try 0."
    assert (error.parameter, error.value) == ("seed", "x")
    assert isinstance(error, errors.ConfigError)
    # A long value is cut in the message alone.
    error = errors.wrong_argument(errors.RequestError, "prompt", "short", "y" * 1000)
    assert len(str(error)) < 300
    assert error.value == "y" * 1000


INTEGER = (errors.check_integer, dict(low=1, high=3))
NUMBER = (errors.check_number, dict(low=0, high=1, open_low=True))
CHOICE = (errors.check_choice, dict(choices=("a", "b")))


@pytest.mark.parametrize(
    ("check", "given", "found"),
    [
        (INTEGER, 1, 1),
        (INTEGER, 3, 3),
        (NUMBER, 1, 1.0),
        ((errors.check_number, dict(low=0, high=1)), 0, 0.0),
        ((errors.check_flag, {}), False, False),
        (CHOICE, "a", "a"),
        ((errors.check_strings, {}), ["é", "x"], ["é", "x"]),
    ],
)
def test_allowed_values_are_returned(check: Any, given: object, found: object):
    function, limits = check
    value = function(errors.RequestError, "k", given, **limits)
    assert (value, type(value)) == (found, type(found))


@pytest.mark.parametrize(
    ("check", "values", "message"),
    [
        (INTEGER, [0, 4, True, 2.0, "2", None], "k must be an integer from 1 to 3"),
        (
            NUMBER,
            [0, -1, 1.01, math.nan, math.inf, True, "1", None],
            r"k must be a number in \(0, 1\], got",
        ),
        # An upper limit of 0 is a limit, although Python treats 0 as false.
        ((errors.check_number, dict(low=-1, high=0)), [0.5], r"in \[-1, 0\]"),
        ((errors.check_number, dict(low=0, open_low=True)), [0], "above 0"),
        ((errors.check_number, dict(low=0)), [-1], "of at least 0"),
        ((errors.check_number, dict(low=0)), [math.inf], "a finite number"),
        ((errors.check_flag, {}), [0, 1, "True", None], "k must be True or False, got"),
        (CHOICE, ["c", None, ["a"]], "k must be one of 'a', 'b', got"),
        (
            (errors.check_strings, {}),
            [["a", "\ud800"]],
            "k must be text that UTF-8 can",
        ),
    ],
)
def test_rejects_wrong_values(check: Any, values: list[object], message: str):
    function, limits = check
    for value in values:
        with pytest.raises(errors.ConfigError, match=message):
            function(errors.ConfigError, "k", value, **limits)


@pytest.mark.parametrize("name", ["api_key", "api_keys", "--api-key", "hf_token"])
def test_secrets_are_not_quoted(name: str):
    with pytest.raises(errors.ConfigError, match="must be") as refused:
        errors.check_strings(errors.ConfigError, name, ["hush", ""])
    assert "hush" not in f"{refused.value} {refused.value.value}"


def test_escaped_text_is_one_line():
    forged = "a\nINFO b\r\x1b[2J\x85\u2028\ud800 \u00e9"
    assert errors.escaped(forged) == "a\\nINFO b\\r\\x1b[2J\\x85\\u2028\\ud800 \u00e9"
