"""The pair that comes with the package is complete, loads, and fits together."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.families import config_from_folder
from jaxspec.models.heads.config import read_head
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import (
    BUNDLED_KINDS,
    bundled_draft,
    bundled_head,
    bundled_target,
    open_checkpoint,
)
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.trimming import read_token_map


def test_draft_is_smaller_and_has_the_tokenizer_of_the_target():
    folders = bundled_target(), bundled_draft()
    assert [folder.name for folder in folders] == ["target", "draft"]
    target, draft = map(open_checkpoint, folders)
    assert draft.num_parameters < target.num_parameters / 2
    for checkpoint in (target, draft):
        assert checkpoint.format == "hf"
        for name, tensor in checkpoint.tensors.items():
            assert np.isfinite(tensor.whole().astype(jnp.float32)).all(), name
    configs = [config_from_folder(folder) for folder in folders]
    assert configs[0].vocab_size == configs[1].vocab_size
    assert configs[0].eos_token_ids == configs[1].eos_token_ids
    tokenizers = [folder / "tokenizer.model" for folder in folders]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_draft_has_a_token_map():
    """The map has all tokens; those that a trimmed head must keep are first."""
    config = config_from_folder(bundled_draft())
    ids = read_token_map(bundled_draft() / TOKEN_MAP, config.vocab_size)
    assert sorted(ids) == list(range(config.vocab_size))
    tokenizer = Tokenizer.from_folder(bundled_draft())
    special = {*tokenizer.special_tokens.values(), *config.eos_token_ids}
    assert special <= set(ids[:6])


@pytest.mark.parametrize("kind", BUNDLED_KINDS)
def test_heads_are_small_and_for_the_bundled_target(kind):
    config, tensors = read_head(bundled_head(kind))
    assert config.kind == kind
    config.check_target(config_from_folder(bundled_target()))
    for name, tensor in tensors.items():
        assert np.isfinite(tensor.whole().astype(jnp.float32)).all(), name
    files = bundled_head(kind).iterdir()
    assert sum(path.stat().st_size for path in files) < 12e6 / len(BUNDLED_KINDS)
