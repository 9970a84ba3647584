"""A head's tensors are read completely, on any mesh, and written unchanged."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError
from jaxspec.models.heads.weights import (
    abstract_head,
    init_head,
    load_head,
    save_head,
    tensor_shapes,
)
from jaxspec.models.trimmed import TOKEN_IDS
from jaxspec.sharding import make_mesh
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import HEADS, load, target_config

FLOAT32 = jnp.dtype(jnp.float32)

NAMES: dict[str, Any] = {"target_name": "tiny", "architecture": "Gemma2ForCausalLM"}


@pytest.fixture(name="folder")
def _folder(tmp_path):
    tensors = theirs.eagle3_tensors()
    return theirs.write(tmp_path / "head", theirs.speculators_config(), tensors)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
def test_written_head_is_read_bit_for_bit(tmp_path, kind, dtype):
    config, mesh = HEADS[kind], make_mesh(1)
    ids = np.random.default_rng(1).permutation(theirs.VOCAB)[: theirs.DRAFT_VOCAB]
    params = init_head(config, seed=1, mesh=mesh, token_ids=ids)
    # With zeros, swapped matrices would go unnoticed.
    params = jax.tree.map(
        lambda leaf: leaf + 0.5 if leaf.dtype == FLOAT32 else leaf, params
    )
    save_head(tmp_path / "head", config, params, dtype=jnp.dtype(dtype), **NAMES)
    read, found = load(tmp_path / "head", dtype=jnp.dtype(dtype))
    assert read == config
    forms = abstract_head(config, dtype=jnp.dtype(dtype), mesh=mesh)
    assert jax.tree.structure(found) == jax.tree.structure(forms)
    for leaf, form in zip(jax.tree.leaves(found), jax.tree.leaves(forms), strict=True):
        assert (leaf.shape, leaf.dtype) == (form.shape, form.dtype)
    # On a CPU, float32 matrices have two storage layouts, and loading may choose
    # another than `init_head` did: compare the values.
    for name in ("fc", "lm_head") if kind == "eagle3" else ():
        wanted = params[name].values.astype(dtype)
        np.testing.assert_array_equal(found[name].values, wanted)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored.keys() - {"d2t", "t2d"} == tensor_shapes(config).keys()
    if kind == "eagle3":
        np.testing.assert_array_equal(found[TOKEN_IDS], np.sort(ids))
        np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), np.sort(ids))


def test_tensor_names_survive_a_round_trip(folder, tmp_path):
    config, params = load(folder)
    save_head(tmp_path / "again", config, params, dtype=FLOAT32, **NAMES)
    first, again = (
        load_file(one / "model.safetensors") for one in (folder, tmp_path / "again")
    )
    assert first.keys() == again.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name, strict=True)


def test_width_need_not_be_a_multiple_of_head_dim(tmp_path):
    """Gemma 3 270M has a width of 640, and heads of 256."""
    config = replace(HEADS["eagle3"], head_dim=16)
    params = init_head(config, seed=1, mesh=make_mesh(1), token_ids=np.arange(20))
    save_head(tmp_path / "head", config, params, dtype=FLOAT32, **NAMES)
    _, found = load(tmp_path / "head")
    for name in ("q_proj", "kv_proj", "o_proj"):
        ours, again = (one["layer"]["attention"][name] for one in (params, found))
        np.testing.assert_array_equal(again.values, ours.values)


def test_a_head_is_split_over_devices(folder):
    _, whole = load(folder)
    _, split = load(folder, mesh=make_mesh(2))
    q_proj = split["layer"]["attention"]["q_proj"].values
    assert {shard.data.shape for shard in q_proj.addressable_shards} == {(16, 48)}
    assert split["lm_head"].values.addressable_shards[0].data.shape == (10, 24)
    for name in ("fc", "lm_head"):
        np.testing.assert_array_equal(split[name].values, whole[name].values)


D2T = torch.zeros(19, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", None, "no tensor 'd2t', which maps its 20"),
        ("norm.weight", None, "the head has no tensor 'norm.weight'"),
        (
            "fc.weight",
            torch.zeros(24, 48),
            r"'fc.weight' has shape \(24, 48\), but config.json requires \(24, 72\)",
        ),
        (
            "lm_head.weight",
            torch.zeros(50, 24),
            r"requires \(20, 24\) \(a vocabulary trimmed to 20\)",
        ),
        (
            "layers.1.mlp.up_proj.weight",
            torch.zeros(2, 2),
            "'layers.1.mlp.up_proj.weight' is not part of a eagle3 head",
        ),
        (
            "norm.weight",
            torch.zeros(24, dtype=torch.int64),
            "'norm.weight' has type int64, expected a float type",
        ),
        (
            "d2t",
            torch.full((20,), 40),
            "'d2t' has token id 50, but ids go from 0 to vocab_size=50 - 1",
        ),
        ("d2t", -torch.arange(20), "'d2t' has a token id of the target twice"),
        ("d2t", D2T, r"'d2t' has type int64 and shape \(19,\)"),
    ],
)
def test_a_wrong_tensor_is_named(folder, name, value, message):
    tensors = theirs.eagle3_tensors() | {name: value}
    present = {key: one for key, one in tensors.items() if one is not None}
    theirs.write(folder, theirs.speculators_config(), present)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("first", "others", "extra", "message"),
    [
        (0, 0, {}, None),
        (49, -1, {}, "'d2t' maps token 0 to 49, but the head has all 50 tokens"),
        (0, 0, {"scale": torch.tensor(1.0)}, "'scale' is not part of a eagle3 head"),
    ],
)
def test_table_of_a_whole_vocabulary_must_change_nothing(
    folder, first, others, extra, message
):
    """A vocabulary trimmed to the target's is whole without the file's pad rows."""
    sizes = dict(vocab_size=theirs.VOCAB + 1, draft_vocab_size=theirs.VOCAB)
    tensors = theirs.eagle3_tensors("midlayer.", pad_rows=1) | extra
    tensors["lm_head.weight"] = torch.ones(theirs.VOCAB, theirs.HIDDEN)
    tensors["d2t"] = torch.tensor([first] + [others] * (theirs.VOCAB - 1))
    theirs.write(folder, theirs.gemma3_config(**sizes), tensors)
    target = target_config(model_type="gemma3_text")
    options: Any = dict(dtype=FLOAT32, mesh=make_mesh(1))
    if message is None:
        assert not load_head(folder, target, **options)[0].is_trimmed
        return
    with pytest.raises(ConfigError, match=message):
        load_head(folder, target, **options)


def test_another_target_is_rejected_before_reading(folder):
    options: Any = dict(dtype=FLOAT32, mesh=make_mesh(1), target_name="27B")
    with pytest.raises(ConfigError, match="and 27B has 48"):
        load_head(folder, target_config(hidden_size=48), **options)
