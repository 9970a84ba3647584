"""`jaxspec.models.Gemma`, a Flax module of variables, equals HuggingFace's model."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec.models.gemma
from jaxspec.models import Gemma
from jaxspec.models.gemma.network import param_specs
from tests.support.oracles import (
    hf_logits,
    init_kv_pages,
    load_ours,
    make_hf_model,
    model_config,
    sequence_batch,
)

PROMPT = np.random.default_rng(1).integers(0, 96, 7)
PAGES = [5, 2, 7]


def make_module(reference: Any, dtype: Any = jnp.float32) -> Gemma:
    """Return a module whose parameters are those of a HuggingFace model."""
    module = Gemma(model_config(reference), jnp.dtype(dtype))
    loaded = load_ours(reference, dtype=dtype)
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        node = loaded
        for key in path:
            node = node[str(key)]
        variable[...] = getattr(node, "values", node)
        assert variable.shape == variable[...].shape
    return module


@pytest.mark.parametrize(("length", "is_tied"), [(7, True), (2, True), (7, False)])
def test_module_logits_equal_huggingface(length, is_tied):
    reference = make_hf_model(
        num_hidden_layers=2, sliding_window=3, tie_word_embeddings=is_tied
    )
    module = make_module(reference)
    pages = init_kv_pages(model_config(reference), 8, 4, jnp.float32)

    @nnx.jit
    def forward(module, batch, pages):
        output, pages = module.forward(batch, pages)
        return module.logits(output.hidden_states), output, pages

    tokens = PROMPT[:length]
    logits, output, after = forward(module, sequence_batch(tokens, PAGES), pages)
    assert np.abs(logits - hf_logits(reference, tokens)).max() <= 1e-4
    assert output.is_finite.shape == (length,)
    assert output.is_finite.all()
    assert [page.shape for page in after] == [page.shape for page in pages]


def test_module_parameters_have_names_and_axes():
    config: Any = model_config(make_hf_model(num_hidden_layers=2))
    module = nnx.eval_shape(lambda: Gemma(config, jnp.dtype(jnp.bfloat16)))
    found = {
        tuple(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }
    specs = param_specs(config)
    assert found.keys() == specs.keys()
    for path, spec in specs.items():
        assert isinstance(found[path], nnx.Param)
        assert (found[path].shape, found[path].dtype) == (spec.shape, jnp.bfloat16)
        assert found[path].get_metadata()["axes"] == spec.axes
        assert found[path].get_metadata()["unit"] == spec.unit
    kv_proj = module.layers[1].attention.kv_proj
    assert kv_proj.shape == (32, 48)
    assert module.config is config
    # The class has two lazy import paths.
    assert jaxspec.models.gemma.Gemma is Gemma
    with pytest.raises(AttributeError, match="no attribute 'Gemma3'"):
        _ = jaxspec.models.Gemma3  # pyright: ignore[reportAttributeAccessIssue]
