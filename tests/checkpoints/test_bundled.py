"""The pair that comes with the package is complete, loads, and fits together."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import ModelConfig
from jaxspec.models.weights import tensor_names
from jaxspec_checkpoints import bundled_draft, bundled_target, read_tensors

FOLDERS = {"target": bundled_target, "draft": bundled_draft}


@pytest.mark.parametrize("role", FOLDERS)
def test_folder_holds_one_model(role):
    folder = FOLDERS[role]()
    assert folder.name == role
    config = ModelConfig.from_folder(folder)
    tensors = dict(read_tensors(folder))
    assert sorted(tensors) == sorted(tensor_names(config))
    for name, tensor in tensors.items():
        assert np.isfinite(tensor.astype(jnp.float32)).all(), name


def test_pair_shares_its_tokens():
    target, draft = bundled_target(), bundled_draft()
    configs = [ModelConfig.from_folder(folder) for folder in (target, draft)]
    assert configs[0].vocab_size == configs[1].vocab_size
    assert configs[0].eos_token_ids == configs[1].eos_token_ids
    tokenizers = [folder / "tokenizer.model" for folder in (target, draft)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_draft_is_the_smaller_model():
    sizes = [
        sum(tensor.size for _, tensor in read_tensors(folder))
        for folder in (bundled_draft(), bundled_target())
    ]
    assert sizes[0] < sizes[1] / 2
