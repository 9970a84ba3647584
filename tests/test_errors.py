import math

import pytest

from jaxspec.errors import (
    ArgumentError,
    ConfigError,
    RequestError,
    UnsupportedError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_strings,
    escaped,
    wrong_argument,
)


def test_error_hierarchy():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
    for error in (ConfigError, RequestError, UnsupportedError):
        assert issubclass(error, ArgumentError)


def test_wrong_argument_error_has_parameter_and_value():
    error = wrong_argument(ConfigError, "seed", "an integer", "x", "Try 0.")
    assert str(error) == "seed must be an integer, got 'x'. Try 0."
    assert (error.parameter, error.value) == ("seed", "x")
    assert isinstance(error, ConfigError)


def test_long_value_is_cut_only_in_the_message():
    error = wrong_argument(RequestError, "prompt", "short", "y" * 1000)
    assert len(str(error)) < 300
    assert error.value == "y" * 1000


@pytest.mark.parametrize("value", [1, 3])
def test_integer_ranges_include_both_ends(value: int):
    assert check_integer(ConfigError, "k", value, low=1, high=3) == value


@pytest.mark.parametrize("value", [0, 4, True, 2.0, "2", None])
def test_rejects_integers_out_of_range(value: object):
    with pytest.raises(ConfigError, match="k must be an integer from 1 to 3, got"):
        check_integer(ConfigError, "k", value, low=1, high=3)


@pytest.mark.parametrize("value", [0, -1, 1.01, math.nan, math.inf, True, "1", None])
def test_rejects_numbers_out_of_range(value: object):
    with pytest.raises(RequestError, match=r"p must be a number in \(0, 1\], got"):
        check_number(RequestError, "p", value, low=0, high=1, open_low=True)


@pytest.mark.parametrize(
    ("low", "high", "open_low", "value", "allowed"),
    [
        # An upper limit of 0 is a limit, although Python treats 0 as false.
        (-1, 0, False, 0.5, r"in \[-1, 0\]"),
        (0, None, True, 0, "above 0"),
        (0, None, False, -1, "of at least 0"),
        (0, None, False, math.inf, "a finite number"),
    ],
)
def test_ends_of_a_number_range(
    low: float, high: float | None, open_low: bool, value: float, allowed: str
):
    with pytest.raises(RequestError, match=allowed):
        check_number(RequestError, "p", value, low=low, high=high, open_low=open_low)


def test_number_becomes_a_float():
    number = check_number(RequestError, "p", 0, low=0, high=1)
    assert (number, type(number)) == (0.0, float)


@pytest.mark.parametrize("value", [0, 1, "True", None])
def test_flags_must_be_bool(value: object):
    assert check_flag(ConfigError, "flag", False) is False
    with pytest.raises(ConfigError, match="flag must be True or False, got"):
        check_flag(ConfigError, "flag", value)


@pytest.mark.parametrize("value", ["c", None, ["a"]])
def test_only_a_listed_choice_is_allowed(value: object):
    assert check_choice(ConfigError, "mode", "a", ("a", "b")) == "a"
    with pytest.raises(ConfigError, match="mode must be one of 'a', 'b', got"):
        check_choice(ConfigError, "mode", value, ("a", "b"))


def test_strings_must_be_encodable():
    assert check_strings(RequestError, "stop", ["é", "x"]) == ["é", "x"]
    with pytest.raises(RequestError, match="stop must be text that UTF-8 can encode"):
        check_strings(RequestError, "stop", ["a", "\ud800"])


@pytest.mark.parametrize("name", ["api_key", "api_keys", "--api-key", "hf_token"])
def test_secrets_are_not_quoted(name: str):
    with pytest.raises(ConfigError, match="must be") as refused:
        check_strings(ConfigError, name, ["hush", ""])
    assert "hush" not in f"{refused.value} {refused.value.value}"


def test_escaped_text_is_one_line():
    forged = "a\nINFO b\r\x1b[2J\x85\u2028\ud800 \u00e9"
    assert escaped(forged) == "a\\nINFO b\\r\\x1b[2J\\x85\\u2028\\ud800 \u00e9"
