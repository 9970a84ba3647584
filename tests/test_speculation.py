"""Methods of drafting, and which keys go with which."""

from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.speculation import SpeculativeConfig

LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


@pytest.mark.parametrize(
    ("method", "keys", "has_lookup", "has_draft_model"),
    [
        ("draft_model", {"model": "draft"}, False, True),
        ("ngram", LOOKUP, True, False),
        ("ngram+draft_model", LOOKUP | {"model": "draft"}, True, True),
    ],
)
def test_methods(method: str, keys: dict, *, has_lookup: bool, has_draft_model: bool):
    config = SpeculativeConfig(method=method, **keys)
    assert config.has_lookup is has_lookup
    assert config.has_draft_model is has_draft_model


@pytest.mark.parametrize("method", ["eagle", "medusa", "ngram,draft_model", None])
def test_other_methods_are_not_supported(method: Any):
    with pytest.raises(NotImplementedError, match=f"'draft_model', got {method!r}"):
        SpeculativeConfig(model="draft", method=method)


@pytest.mark.parametrize(
    ("keys", "texts"),
    [
        ({}, ["model must be a folder", "got None"]),
        ({"method": "ngram+draft_model"} | LOOKUP, ["model must be a folder"]),
        (
            {"method": "ngram", "model": "draft"} | LOOKUP,
            ["model must be left out", "'draft'", "'ngram+draft_model'"],
        ),
        (
            {"model": "draft", "prompt_lookup_max": 4},
            ["prompt_lookup_max must be left out", "got 4", "method 'ngram'"],
        ),
        ({"method": "ngram"}, ["prompt_lookup_max must be an integer from 1 to 32"]),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_max": 33},
            ["prompt_lookup_max", "from 1 to 32, got 33"],
        ),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_min": 0},
            ["prompt_lookup_min", "from 1 to 32, got 0"],
        ),
        (
            {"method": "ngram"} | LOOKUP | {"prompt_lookup_min": 5},
            ["prompt_lookup_min must be at most prompt_lookup_max=4, got 5"],
        ),
    ],
)
def test_keys_of_another_method(keys: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**keys)
    for text in texts:
        assert text in str(caught.value)
