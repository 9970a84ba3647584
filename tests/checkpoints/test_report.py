"""`inspect` reports sizes and replicated weights; the bundled pair is complete."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.families import config_from_folder, config_from_hf
from jaxspec.models.gemma.network import param_specs
from jaxspec.models.heads.config import read_head
from jaxspec.models.weights import load_params
from jaxspec.sharding import make_mesh
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import (
    BUNDLED_KINDS,
    Sizes,
    bundled_draft,
    bundled_head,
    bundled_target,
    open_checkpoint,
)
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.report import describe, replicated, size
from jaxspec_checkpoints.trimming import read_token_map
from tests.checkpoints.models import FAMILIES, tiny_config, write_tiny


def test_bundled_target_is_described():
    lines = describe(open_checkpoint(bundled_target())).splitlines()
    found = {line[:12].strip(): line[14:] for line in lines}
    assert found["format"] == "hf (HuggingFace safetensors)"
    assert found["layers"] == "6, sliding window 128"
    assert found["heads"] == "6 query, 2 KV, of 64"
    assert found["parameters"] == "16,131,456"
    assert found["bytes"] == "32,262,912 (32.3 MB)"
    assert found["dtype"] == "bfloat16"
    assert "tokenizer.model" in found["files"]
    # The model has 6 query heads, 2 KV heads, 12 gate blocks, 1536 feed-forward rows
    # and 8192 tokens.
    assert "6 query heads" in found["on 4 devices"]
    assert "2 KV heads (1.18 MB)" in found["on 4 devices"]
    assert "replicated: norms" in found["on 2 devices"]
    assert "KV heads" not in found["on 2 devices"]


@pytest.mark.parametrize("shape", [{}, dict(intermediate_size=192, vocab_size=508)])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_reported_replication_equals_the_engines(tmp_path, family, num_devices, shape):
    write_tiny(tmp_path, family=family, num_hidden_layers=1, **shape)
    checkpoint = open_checkpoint(tmp_path)
    config = config_from_hf(checkpoint.config)
    form: Any = dict(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(num_devices))
    params = load_params(config, checkpoint.tensors, **form)
    whole = replicated(checkpoint.sizes, num_devices)
    for path, spec in param_specs(config).items():
        node = params
        for key in path:
            node = node[key]
        leaf = jax.tree.leaves(node)[0]
        assert isinstance(leaf, jax.Array)
        is_whole = leaf.sharding.is_fully_replicated
        for name in spec.tensors:
            if num_devices > 1:
                assert is_whole == (name.split(".")[-2] in whole), name


def test_sizes_and_unevenly_split_heads_are_readable():
    changes = dict(num_attention_heads=12, num_key_value_heads=3)
    sizes = Sizes.from_config(tiny_config("2b") | changes)
    assert replicated(sizes, 4)["k_proj"] == "3 KV heads"
    for name, hidden in (("2b", 9216), ("9b", 14336)):
        config = tiny_config(name) | dict(vocab_size=256000, intermediate_size=hidden)
        assert set(replicated(Sizes.from_config(config), 8).values()) == {"norms"}
    for num_bytes, text in (
        *((0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (5.2287e9, "5.23 GB")),
        *((54_454_256_640, "54.5 GB"), (1_234_000_000_000, "1234 GB")),
    ):
        assert size(num_bytes) == text


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
