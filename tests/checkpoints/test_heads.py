"""Heads of every writer are recognized; a folder without a head is an error."""

import json

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.heads import (
    kind_of_head,
    open_head,
    read_head_config,
    write_head,
)

ONE = np.ones((2, 3), np.float32)


def write(folder, config, names):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: ONE for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (dict(speculators_model_type="eagle3"), "eagle3"),
        (dict(speculators_model_type="eagle"), "eagle"),
        (dict(architectures=["EagleLlamaForCausalLM"]), "eagle"),
        (dict(model_type="eagle"), "eagle"),
        (dict(architectures=["LlamaForCausalLM"], model_type="llama"), None),
        (dict(model_type="llama", num_hidden_layers=1), "eagle"),
        (dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama"), "eagle3"),
        (dict(architectures=["Eagle3LlamaForCausalLM"]), "eagle3"),
        (dict(model_type="medusa"), "medusa"),
        (dict(medusa_num_heads=3), "medusa"),
        (dict(model_type="mlp_speculator"), "mlp_speculator"),
        (dict(speculators_model_type="dflash"), "dflash"),
        (dict(architectures=["DFlashDraftModel"], model_type="qwen3"), "dflash"),
        (dict(architectures=["DFlash2DraftModel"]), "dflash2"),
        (dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"]), None),
        (dict(), None),
    ],
)
def test_kinds_of_heads_are_recognized(config, kind):
    assert kind_of_head(config) == kind


@pytest.mark.parametrize(
    ("config", "theirs", "ours"),
    [
        (
            dict(architectures=["LlamaForCausalLMEagle3"]),
            "midlayer.hidden_norm.weight fc.weight t2d "
            "midlayer.self_attn.rotary_emb.inv_freq",
            "layers.0.hidden_norm.weight fc.weight",
        ),
        (
            dict(speculators_model_type="eagle3"),
            "model.layers.0.hidden_norm.weight verifier_norm.weight",
            "layers.0.hidden_norm.weight",
        ),
        (
            dict(medusa_num_heads=1),
            "0.0.linear.weight 0.0.linear.bias 0.1.weight",
            "blocks.0.layers.0.weight blocks.0.layers.0.bias lm_heads.0.weight",
        ),
        # Only listed tensors are left unread: EAGLE lists `lm_head.weight`, which in a
        # Medusa head is a tensor.
        *(
            (dict(medusa_num_heads=1), name, name)
            for name in (
                *("lm_head.weight", "verifier_norm.bias"),
                "layers.0.rotary_emb.inv_freqs",
            )
        ),
    ],
)
def test_spellings_of_tensor_names_are_recognized(tmp_path, config, theirs, ours):
    found = open_head(write(tmp_path, config, theirs.split()))
    assert found.tensors.keys() == set(ours.split())
    assert all(tensor.whole().shape == (2, 3) for tensor in found.tensors.values())


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (
            dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"]),
            ["fc.weight"],
            "holds no head .*'gemma2'.*hidden states.*eagle, eagle3, medusa, dflash",
        ),
        (
            dict(speculators_model_type="dspark"),
            ["fc.weight"],
            "a head of kind 'dspark'",
        ),
        (
            dict(model_type="mlp_speculator"),
            ["speculator.emb.0.weight"],
            "removed.* 'eagle3', 'eagle' or 'medusa'",
        ),
        (
            dict(speculators_model_type="eagle3"),
            ["norm.weight", "model.norm.weight"],
            "'norm.weight' twice",
        ),
    ],
)
def test_folders_without_a_supported_head_are_refused(tmp_path, config, names, message):
    with pytest.raises(CheckpointError, match=message):
        open_head(write(tmp_path, config, names))


def test_models_and_pickles_are_no_heads(tmp_path):
    """A head of EAGLE's own code has a model's config.json, but also a tensor `fc`."""
    layer = dict(model_type="llama", num_hidden_layers=1)
    head = write(tmp_path / "head", layer, ["fc.weight", "layers.0.mlp.up_proj.weight"])
    assert read_head_config(head)[0] == "eagle"
    model = write(tmp_path / "model", layer, ["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match="holds no head"):
        read_head_config(model)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="medusa")))
    (tmp_path / "medusa_lm_head.pt").touch()
    with pytest.raises(CheckpointError, match="medusa_lm_head.pt, a pickle.*convert"):
        open_head(tmp_path)


def test_head_is_written_completely_or_not_at_all(tmp_path):
    config, name = dict(model_type="medusa"), "lm_head.weight"
    write_head(tmp_path / "head", config, {name: ONE.T})
    found = open_head(tmp_path / "head")
    np.testing.assert_array_equal(found.tensors[name].whole(), ONE.T)
    with pytest.raises(CheckpointError, match="exists already"):
        write_head(tmp_path / "head", config, {})
    with pytest.raises(SafetensorError, match="Unknown dtype"):
        write_head(tmp_path / "broken", config, {name: np.array(["one"])})
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
