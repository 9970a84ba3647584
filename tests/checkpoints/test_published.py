"""The three sizes are those that were published, field by field."""

import dataclasses

import pytest

from jaxspec_checkpoints import Sizes, tensor_shapes
from jaxspec_checkpoints.gemma.published import GEMMA2, published_config
from tests.checkpoints.models import FACTS, published_shapes

NAMES = ("2b", "9b", "27b")


@pytest.mark.parametrize("name", NAMES)
def test_published_sizes_have_their_config_and_tensors(name):
    facts = FACTS[name]["config"]
    # Tuned models have the same config, except that 107 also ends their texts.
    assert published_config(name) == facts | {"eos_token_id": [1, 107]}
    sizes = Sizes.from_config(facts)
    assert GEMMA2.published_name(sizes) == name
    assert GEMMA2.is_model_first(sizes) == (name == "2b")
    assert tensor_shapes(sizes) == published_shapes(name, "hf")


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Sizes)])
def test_any_other_number_is_no_published_size(field):
    sizes = Sizes.from_config(FACTS["2b"]["config"])
    other = dataclasses.replace(sizes, **{field: getattr(sizes, field) * 2})
    assert GEMMA2.published_name(other) is None
    assert not GEMMA2.is_model_first(other)
