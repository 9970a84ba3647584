"""Heads' config.json files; errors name a head of another target or kind."""

import json
from typing import Any

import pytest

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.heads.config import CONFIGS, Eagle3Config, default_layers, read_head
from tests.models.heads import torch_heads as theirs
from tests.models.heads.targets import HEADS, target_config


@pytest.mark.parametrize("kind", HEADS)
def test_written_config_is_read_back(kind):
    config = HEADS[kind]
    content = json.loads(json.dumps(config.to_file()))
    assert CONFIGS[kind].from_file(content, ()) == config


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
    (
        dict(model_type="gemma3_text"),
        "model_type must be 'llama' or 'qwen3', got 'gemma3_text'",
    ),
    (dict(partial_rotary_factor=0.25), "partial_rotary_factor must be 1.0"),
    (dict(rope_scaling=dict(rope_type="llama3")), "rope_type must be 'default'"),
    (
        dict(rope_parameters=dict(partial_rotary_factor=0.25)),
        "partial_rotary_factor must be 1.0, got 0.25",
    ),
    *(
        (
            dict(rope_parameters={kind: dict(rope_theta=1e6)}),
            "rope_parameters must be one object for all layers",
        )
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
    (
        dict(rms_norm_eps="a"),
        "rms_norm_eps must be a finite number of at least 0, got 'a'",
    ),
    (dict(head_dim="a"), "head_dim must be an integer"),
    (dict(hidden_size=None), "hidden_size must be an integer"),
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
    with pytest.raises(error, match=named):
        Eagle3Config.from_file(theirs.specforge_config(**change), ())


@pytest.mark.parametrize(
    ("version", "is_read"),
    [("0.1.0", True), ("0.7.0.dev80", True), ("0.9", True)]
    + [(version, False) for version in ("0.10.0", "1.0.0", "test", 0)],
)
def test_unknown_format_versions_are_named(tmp_path, version, is_read):
    config = theirs.speculators_config(speculators_version=version)
    theirs.write(tmp_path, config, theirs.eagle3_tensors())
    if is_read:
        assert read_head(tmp_path)[0] == HEADS["eagle3"]
        return
    message = "speculators_version must be '0.1' to '0.9', got"
    with pytest.raises(UnsupportedError, match=message):
        read_head(tmp_path)


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


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_files_of_other_writers_need_all_sizes(name):
    content = theirs.specforge_config()
    del content[name]
    with pytest.raises(ConfigError, match=f"{name} must be an integer.*got None"):
        Eagle3Config.from_file(content, ())


def test_errors_name_the_folder(tmp_path):
    config = theirs.specforge_config(hidden_act="gelu")
    theirs.write(tmp_path, config, theirs.eagle3_tensors("midlayer."))
    with pytest.raises(
        UnsupportedError, match=f"config.json of {tmp_path}: hidden_act"
    ):
        read_head(tmp_path)
    with pytest.raises(ConfigError, match="nowhere has no config.json"):
        read_head(tmp_path / "nowhere")
