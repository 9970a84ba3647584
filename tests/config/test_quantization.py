"""Quantization settings, for a model and for a file that is already quantized."""

from typing import Any

import pytest

from jaxspec.config.quantization import check_quantization, quantize_model
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.families import config_from_hf
from jaxspec_checkpoints.quantization import named_scheme
from tests.support.oracles import TINY

MODEL = config_from_hf(TINY | dict(model_type="gemma2", hidden_size=128, head_dim=128))


def quantize(model: Any, kind: str | None, *, has_embedding: bool = False) -> Any:
    named: dict[str, Any] = dict(argument="quantization", folder="model")
    return quantize_model(model, kind, has_embedding=has_embedding, **named)


def test_only_known_names_are_accepted():
    for kind in (None, "int8", "int4", "fp8", "awq", "gptq"):
        check_quantization("quantization", kind)
    for kind in ("int3", "bitsandbytes", 8, "INT8"):
        message = "quantization must be None or one of 'int8', .*'gptq'.*got "
        with pytest.raises(UnsupportedError, match=message):
            check_quantization("quantization", kind)


def test_quantization_is_set_by_argument_or_checkpoint():
    assert quantize(MODEL, None).quantization is None
    assert quantize(MODEL, "fp8", has_embedding=True).quantization.has_embedding
    model = quantize(MODEL, "int8")
    assert model.quantization == named_scheme("int8")
    assert quantize(model, None).quantization == named_scheme("int8")
    with pytest.raises(ConfigError, match="left out for model.*quantized already"):
        quantize(model, "int4")
    with pytest.raises(ConfigError, match="are not quantized"):
        quantize(MODEL, "awq")
