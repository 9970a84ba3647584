"""Heads' files are read completely and written unchanged; errors name what is wrong."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.heads.config import Eagle3Config, default_layers, read_head
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
D2T = torch.zeros(19, dtype=torch.int64)


@pytest.mark.parametrize("kind", HEADS)
def test_another_target_is_rejected(kind):
    HEADS[kind].check_target(target_config())
    for change, named in (
        (dict(hidden_size=48), "target_hidden_size=24, and the target has 48"),
        (dict(vocab_size=64), "vocab_size=50, and the target has 64"),
    ):
        expected = f"This {kind} head.* another.*{named}"
        with pytest.raises(ConfigError, match=expected):
            HEADS[kind].check_target(target_config(**change))
    if kind == "eagle3":
        target = target_config(num_hidden_layers=4)
        expected = r"layer_ids=\[2, 3, 5\], and 9B has 4 layers"
        with pytest.raises(ConfigError, match=expected):
            HEADS[kind].check_target(target, "9B")


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(42, (2, 21, 39)), (26, (2, 13, 23)), (6, (1, 3, 5)), (2, (1, 1, 1))],
)
def test_default_layers_of_a_head(num_layers, layers):
    assert default_layers(num_layers) == layers
    content = theirs.speculators_config(eagle_aux_hidden_state_layer_ids=None)
    config = Eagle3Config.from_file(content, ())
    target = target_config(num_hidden_layers=num_layers)
    assert config.layers_of(target) == layers
    # SpecForge counts layers from 0.
    found = Eagle3Config.from_file(theirs.specforge_config(), ())
    assert found.target_layers == (2, 3, 5)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (dict(norm_before_fc=True), "norm_before_fc must be False, got True"),
    (dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
    (dict(num_hidden_layers=2), "num_hidden_layers must be 1, got 2"),
    (dict(model_type="gemma3_text"), "'llama' or 'qwen3', got 'gemma3_text'"),
    (dict(partial_rotary_factor=0.25), "partial_rotary_factor must be 1.0"),
    (dict(rope_scaling=dict(rope_type="llama3")), "rope_type must be 'default'"),
    (dict(rope_parameters=dict(partial_rotary_factor=0.25)), "must be 1.0, got 0.25"),
    *(
        (dict(rope_parameters={kind: dict(rope_theta=9)}), "be one object for all")
        for kind in ("full_attention", "sliding_attention")
    ),
    (
        dict(layer_types=["sliding_attention"], sliding_window=4),
        "layer_types must be a list of num_hidden_layers=1 of 'full_attention'",
    ),
    (dict(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        dict(use_sliding_window=True, sliding_window=4),
        "layer_types must be .*, got None. use_sliding_window is true",
    ),
    (dict(layer_types=5), "layer_types must be a list of .*, got 5"),
    (dict(rms_norm_eps="a"), "rms_norm_eps must be a finite number.*, got 'a'"),
    (dict(head_dim="a"), "head_dim must be an integer"),
    # Files of other writers than speculators need all sizes.
    *(
        ({name: None}, f"{name} must be an integer.*got None")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    ),
    (dict(vocab_size=None), "vocab_size must be an integer.*got None"),
    (dict(draft_vocab_size=51), "draft_vocab_size must be an integer from 1 to 50"),
    *(
        (dict(eagle_aux_hidden_state_layer_ids=layers), "3 numbers of layers")
        for layers in ([1, 2], "all")
    ),
    (
        dict(draft_vocab_size=50, target_hidden_size=32),
        "no embed_tokens.weight.* must be 32",
    ),
    (dict(target_hidden_size=32), "no embed_tokens.weight.* must be 32"),
]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [(change, UnsupportedError, named) for change, named in UNSUPPORTED]
    + [(change, ConfigError, named) for change, named in WRONG],
)
def test_unsupported_variants_and_wrong_numbers_are_named(change, error, named):
    """A change to None removes the key."""
    content = theirs.specforge_config(**change)
    present = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(error, match=named):
        Eagle3Config.from_file(present, ())


def test_unknown_format_versions_are_named(tmp_path):
    def read(version: Any) -> Any:
        config = theirs.speculators_config(speculators_version=version)
        theirs.write(tmp_path, config, theirs.eagle3_tensors())
        return read_head(tmp_path)[0]

    for version in ("0.1.0", "0.7.0.dev80", "0.9"):
        assert read(version) == HEADS["eagle3"]
    for version in ("0.10.0", "1.0.0", "test", 0):
        with pytest.raises(UnsupportedError, match="version must be '0.1' to '0.9', g"):
            read(version)


def test_sizes_that_transformers_leaves_out_have_its_defaults():
    """Files of speculators contain only values that differ from the model type's."""
    sizes = dict(model_type="qwen3", hidden_size=5376, num_key_value_heads=16)
    content = dict(
        architectures=["Eagle3Speculator"],
        transformer_layer_config=sizes | dict(vocab_size=262208, intermediate_size=9),
    )
    config = Eagle3Config.from_file(content, ())
    found = config.num_q_heads, config.num_kv_heads, config.head_dim
    assert found == (32, 16, 128)
    assert config.rope_theta == 10000
    assert config.rms_norm_eps == 1e-6


def test_errors_name_the_folder(tmp_path):
    config = theirs.specforge_config(hidden_act="gelu")
    theirs.write(tmp_path, config, theirs.eagle3_tensors("midlayer."))
    with pytest.raises(
        UnsupportedError, match=f"config.json of {tmp_path}: hidden_act"
    ):
        read_head(tmp_path)
    with pytest.raises(ConfigError, match="nowhere has no config.json"):
        read_head(tmp_path / "nowhere")


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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", None, "no tensor 'd2t', which maps its 20"),
        ("norm.weight", None, "the head has no tensor 'norm.weight'"),
        ("fc.weight", torch.zeros(24, 48), r"'fc.weight' .*\(24, 48\), .* \(24, 72\)"),
        ("lm_head.weight", torch.zeros(50, 24), r"'lm_head.* \(20, 24\) .* to 20"),
        (
            "layers.1.mlp.up_proj.weight",
            torch.zeros(2, 2),
            "'layers.1.mlp.up_proj.weight' is not part of a eagle3 head",
        ),
        (
            "norm.weight",
            torch.zeros(24).long(),
            "'norm.weight' has type int64, expected",
        ),
        ("d2t", torch.full((20,), 40), "'d2t' has token id 50, .*vocab_size=50 - 1"),
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
