"""A named implementation is the one that runs, or an error; None takes the best."""

import logging

import pytest

from jaxspec_kernels import dispatch


def reference() -> str:
    return "reference"


def tpu() -> str:
    return "tpu"


@pytest.fixture(autouse=True)
def _forget_choices():
    dispatch._log_choice.cache_clear()


def test_none_takes_the_reference():
    assert dispatch.choose("op", {"reference": reference}, None) is reference


def test_named_implementation_is_taken():
    available = {"reference": reference, "tpu": tpu}
    assert dispatch.choose("op", available, "tpu") is tpu
    assert dispatch.choose("op", available, "reference") is reference


@pytest.mark.parametrize("name", ["pallas", "", "Reference"])
def test_unknown_name_says_what_is_allowed(name):
    with pytest.raises(ValueError, match="of op: choose one of reference, tpu, gpu"):
        dispatch.choose("op", {"reference": reference}, name)


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_missing_implementation_is_not_replaced(name):
    expected = f"op has no '{name}' implementation yet; available: reference"
    with pytest.raises(NotImplementedError, match=expected):
        dispatch.choose("op", {"reference": reference}, name)


def test_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "jaxspec_kernels"):
        for _ in range(3):
            dispatch.choose("op", {"reference": reference}, None)
        dispatch.choose("other", {"reference": reference}, None)
    assert [record.getMessage() for record in caplog.records] == [
        "op: reference implementation",
        "other: reference implementation",
    ]
