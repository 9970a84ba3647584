"""Quantization settings, for a model and for a file that is already quantized."""

from typing import Any

import pytest

from jaxspec.config.quantization import check_quantization, quantize_model
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.families import config_from_hf
from jaxspec_checkpoints.quantization import named_scheme
from tests.support.oracles import TINY

MODEL = config_from_hf(TINY | dict(model_type="gemma2", hidden_size=128, head_dim=128))


def quantize(model, kind, **changes):
    given: dict[str, Any] = dict(
        has_embedding=False, argument="quantization", folder="model"
    )
    return quantize_model(model, kind, **given | changes)


@pytest.mark.parametrize("kind", [None, "int8", "int4", "fp8", "awq", "gptq"])
def test_known_names_are_accepted(kind):
    check_quantization("quantization", kind)


@pytest.mark.parametrize("kind", ["int3", "bitsandbytes", 8, "INT8"])
def test_rejects_other_names(kind):
    message = "quantization must be None or one of 'int8', .*'gptq'.*got "
    with pytest.raises(UnsupportedError, match=message):
        check_quantization("quantization", kind)


def test_model_gets_the_requested_quantization():
    assert quantize(MODEL, None).quantization is None
    assert quantize(MODEL, "int8").quantization == named_scheme("int8")
    with_rows = quantize(MODEL, "fp8", has_embedding=True).quantization
    assert with_rows is not None and with_rows.has_embedding


def test_quantized_checkpoint_keeps_its_quantization():
    model = quantize(MODEL, "int8")
    assert quantize(model, None).quantization == named_scheme("int8")
    with pytest.raises(ConfigError, match="left out for model.*quantized already"):
        quantize(model, "int4")


def test_rejects_method_of_unquantized_checkpoint():
    with pytest.raises(ConfigError, match="are not quantized"):
        quantize(MODEL, "awq")
