"""Exactly one constraint of the right type is allowed; errors give the reason."""

from typing import Any

import pytest

from jaxspec.config.structured_outputs import StructuredOutputsConfig
from jaxspec.errors import ArgumentError, RequestError
from jaxspec.sampling_params import SamplingParams, StructuredOutputsParams

CHOICES = "choice must be a list of at least one string"
CONTRADICTION = {"whitespace_pattern": " ", "disable_any_whitespace": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "choice": ["b"]}, r"exactly one of .* got \{'regex': 'a', 'ch"),
        ({"whitespace_pattern": " "}, r"got \{'whitespace_pattern': ' '\}"),
        ({"json": 3}, "json must be a JSON schema, got 3"),
        ({"json": ""}, "json must be a JSON schema"),
        ({"regex": ""}, "regex must be a regular expression, got ''"),
        ({"choice": []}, rf"{CHOICES}, got \[\]"),
        ({"choice": "yes"}, CHOICES),
        ({"choice": ["a", 1]}, CHOICES),
        ({"grammar": 1}, "grammar must be a grammar in Lark's or GBNF's notation"),
        ({"structural_tag": ""}, "structural_tag must be a structural tag, got ''"),
        ({"json_object": False}, "json_object must be True, got False"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be"),
        ({"regex": "a", "whitespace_pattern": 7}, "whitespace_pattern must be"),
        ({"json_object": True} | CONTRADICTION, "contradict each other"),
    ],
)
def test_rejects_bad_params(arguments: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**arguments)


def test_sampling_params_check_changed_attributes():
    wrong: Any = {"regex": "a"}
    with pytest.raises(RequestError, match="must be StructuredOutputsParams, got"):
        SamplingParams(structured_outputs=wrong)
    form = StructuredOutputsParams(regex="a")
    params = SamplingParams(structured_outputs=form)
    form.choice = ["b"]
    with pytest.raises(RequestError, match="exactly one of"):
        params.validate_for(16)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"backend": "guidance"}, {"backend": "guidance"}),
        ({"backend": "xgrammar"}, {"backend": "xgrammar"}),
        ({"disable-any-whitespace": True}, {"disable_any_whitespace": True}),
        ({"whitespace_pattern": " ?"}, {"whitespace_pattern": " ?"}),
        (StructuredOutputsConfig(backend="guidance"), {"backend": "guidance"}),
    ],
)
def test_accepts_engine_settings(given: Any, expected: dict[str, Any]):
    assert StructuredOutputsConfig.read(given) == StructuredOutputsConfig(**expected)


def test_other_backends_are_replaced_with_a_warning(caplog: pytest.LogCaptureFixture):
    StructuredOutputsConfig(backend="guidance")
    assert not caplog.messages
    StructuredOutputsConfig(backend="xgrammar")
    assert "backend='xgrammar' has no effect: llguidance" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("auto", "must be a dict with keys among backend, disable_fallback,"),
        ({"disable_whitespace": True}, "did you mean disable_any_whitespace"),
        ({"xyz": 1}, "no key 'xyz'.*known: "),
        ({"backend": "xgramar"}, "backend must be one of 'auto', .*'xgrammar', got"),
        ({"reasoning_parser": "x"}, "does not mark its reasoning"),
        ({"reasoning_parser_plugin": "x"}, "does not mark its reasoning"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace must be True or"),
        ({"enable_in_reasoning": "no"}, "enable_in_reasoning must be True or"),
        ({"whitespace_pattern": 7}, "whitespace_pattern must be"),
        (CONTRADICTION, "contradict each other"),
    ],
)
def test_rejects_engine_settings(given: Any, message: str):
    with pytest.raises(ArgumentError, match=message) as caught:
        StructuredOutputsConfig.read(given)
    assert str(caught.value).startswith("structured_outputs_config")
