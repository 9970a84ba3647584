"""Gemma 3 configs: every spelling of config.json is read as transformers reads it."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig

from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.families import config_from_hf, family_of, published_config
from jaxspec.models.gemma.config import Gemma2Config, Gemma3Config, Rope

LOCAL, GLOBAL = "sliding_attention", "full_attention"
KINDS_34 = [GLOBAL if layer % 6 == 5 else LOCAL for layer in range(34)]
# The parts of gemma-3-4b-it's config.json: the text model's, and the others.
TEXT_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
OUTER_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
NESTED_4B = OUTER_4B | {"text_config": TEXT_4B}


def published(size: str) -> dict[str, Any]:
    config = published_config(f"google/gemma-3-{size}-it")
    assert config is not None
    return config


def flat_4b(**changes: Any) -> dict[str, Any]:
    """Return the config of the published 4B without layer types and rotary keys."""
    left_out = ("rope_scaling", "rope_theta", "rope_local_base_freq")
    left_out += ("sliding_window_pattern",)
    config = {k: v for k, v in published("4b").items() if k not in left_out}
    return config | {"torch_dtype": "bfloat16"} | changes


def nested_4b(**changes: Any) -> dict[str, Any]:
    return OUTER_4B | {"text_config": TEXT_4B | changes}


READ_4B = config_from_hf(published("4b") | {"torch_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("size", "scale", "window", "positions", "factor", "num_global"),
    [
        ("270m", 0.0625, 512, 32768, 1.0, 3),
        ("1b", 0.0625, 512, 32768, 1.0, 4),
        ("4b", 0.0625, 1024, 131072, 8.0, 5),
        ("12b", 0.0625, 1024, 131072, 8.0, 8),
        # 27B scales by its width over its number of heads, not by 1 / sqrt(128).
        ("27b", 0.0771517, 1024, 131072, 8.0, 10),
    ],
)
def test_published_configs_are_read(size, scale, window, positions, factor, num_global):
    check_as_transformers(published(size))
    config = config_from_hf(published(size))
    assert type(config) is Gemma3Config
    assert family_of(config).layout.title == "Gemma 3"
    assert config.query_pre_attn_scalar**-0.5 == pytest.approx(scale, rel=1e-6)
    assert (config.vocab_size, config.max_position_embeddings) == (262144, positions)
    caps = config.attn_logit_softcapping, config.final_logit_softcapping
    assert caps == (None, None)
    kinds = [config.window(layer) for layer in range(config.num_layers)]
    assert kinds.count(None) == num_global
    assert kinds[:7] == [window] * 5 + [None, window]
    assert config.rope(0) == Rope(theta=10_000.0)
    assert config.rope(5) == Rope(theta=1_000_000.0, factor=factor)
    assert config.eos_token_ids == (1, 106)


def check_as_transformers(file: dict[str, Any]) -> None:
    ours = config_from_hf(file)
    theirs: Any = Gemma3TextConfig(**file)
    windows = [ours.window(layer) is not None for layer in range(ours.num_layers)]
    assert windows == [kind == LOCAL for kind in theirs.layer_types]
    for kind, rope in ((LOCAL, ours.local_rope), (GLOBAL, ours.global_rope)):
        expected = theirs.rope_parameters[kind]
        assert rope.theta == expected["rope_theta"]
        assert rope.factor == expected.get("factor", 1.0)
    for name in ("sliding_window", "query_pre_attn_scalar", "head_dim", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(NESTED_4B, id="nested, as published"),
        pytest.param(nested_4b(eos_token_id=1), id="end tokens"),
        pytest.param(nested_4b(dtype="bfloat16") | {"dtype": "bfloat16"}, id="dtype"),
        pytest.param(
            nested_4b(vocab_size=262208, pad_token_id=None), id="262,208 rows"
        ),
        pytest.param(
            # HuggingFace's Gemma 3 ignores this soft cap as well.
            published("4b")
            | {"torch_dtype": "bfloat16", "attn_logit_softcapping": 50.0},
            id="soft cap of attention",
        ),
        pytest.param(
            flat_4b(rope_scaling={"type": "linear", "factor": 8}), id="older rotations"
        ),
        pytest.param(
            flat_4b(
                layer_types=KINDS_34,
                sliding_window_pattern=2,
                rope_parameters={
                    GLOBAL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                    LOCAL: dict(rope_type="default", rope_theta=1e4),
                },
            ),
            id="newer rotations, layers one by one",
        ),
        pytest.param(
            flat_4b(
                _sliding_window_pattern=6,
                rope_parameters={GLOBAL: {"rope_type": "default"}},
                rope_scaling={"type": "linear", "factor": 8.0},
                rope_theta=1_000_000,
            ),
            id="both rotations, pattern with an underscore",
        ),
    ],
)
def test_every_spelling_gives_the_same_config(file):
    assert config_from_hf(file) == READ_4B


def test_end_tokens_of_the_generation_config_count():
    file = NESTED_4B | {"eos_token_id": None}
    assert config_from_hf(file).eos_token_ids == (1,)
    assert config_from_hf(file, {"eos_token_id": [1, 106]}).eos_token_ids == (1, 106)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(layer_types=KINDS_34),
        dict(sliding_window_pattern=4),
        dict(rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=5e5),
        dict(rope_local_base_freq=2e4),
        dict(rope_parameters={GLOBAL: None, LOCAL: dict(rope_type="linear", factor=2)}),
    ],
)
def test_rotary_and_layer_settings_match_transformers(changes):
    check_as_transformers(flat_4b(**changes))


def test_only_layer_types_decide_which_layers_are_local():
    """Local layers need `layer_types`: VaultGemma has a window and no local layer."""
    config = config_from_hf(flat_4b(layer_types=[GLOBAL] * 34))
    assert [config.window(layer) for layer in range(34)] == [None] * 34
    assert config.period == 1
    uneven = [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL]
    config = config_from_hf(flat_4b(layer_types=uneven, num_hidden_layers=5))
    windows = [config.window(layer) for layer in range(5)]
    assert windows == [1024, None, 1024, 1024, None]
    # Other sizes of vocabularies are kept.
    assert config_from_hf(flat_4b(vocab_size=262209)).vocab_size == 262209


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(use_bidirectional_attention=True), "EmbeddingGemma"),
        (dict(text_config=TEXT_4B, use_bidirectional_attention=True), "EmbeddingGemma"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor.*0.5"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 8.0}), "'linear'.*'yarn'"),
        (dict(hidden_activation="silu"), "gelu_pytorch_tanh"),
        (dict(layer_types=["chunked_attention"] * 34), "layer_types.0.*chunked"),
        (dict(model_type="gemma3n"), "'gemma3n'.*Gemma 3n"),
        (dict(model_type="gemma3n_text"), "Gemma 3n has layers of another kind"),
        (dict(model_type="gemma4"), "'gemma4'.*Gemma 4"),
    ],
)
def test_other_networks_are_rejected_by_name(changes, expected):
    with pytest.raises(UnsupportedError, match=expected):
        config_from_hf(flat_4b(**changes))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (OUTER_4B | {"text_config": [1]}, "text_config must be an object"),
        (flat_4b(sliding_window_pattern=0), "sliding_window_pattern.* got 0"),
        (flat_4b(sliding_window_pattern=10**9), "sliding_window_pattern.*1 to 1024"),
        (flat_4b(layer_types=KINDS_34[:5]), "a list of num_hidden_layers=34 kinds"),
        (flat_4b(rope_scaling=8), "rope_scaling must be an object"),
        (flat_4b(rope_scaling={"rope_type": "linear"}), "rope factor.*above 0.*None"),
        (flat_4b(rope_scaling={"type": "linear", "factor": 0}), "rope factor.*above 0"),
        (flat_4b(rope_parameters={"rope_theta": 1.0}), "rope_parameters.*'sliding_att"),
        (flat_4b(sliding_window="abc"), "sliding_window.*'abc'"),
        (flat_4b(rope_local_base_freq=0), "rope_theta.*above 0"),
        (flat_4b(rope_scaling={"factor": 8.0}), "rope_scaling must be an object with"),
        (flat_4b(rope_scaling={GLOBAL: {}}), "rope_scaling must be an object with"),
        (
            OUTER_4B | {"text_config": TEXT_4B | {"model_type": "gemma3n_text"}},
            "text_config.model_type must be 'gemma3_text'",
        ),
    ],
)
def test_bad_files_are_rejected(file, expected):
    with pytest.raises(ConfigError, match=expected):
        config_from_hf(file)


def test_gemma_2_uses_the_same_network():
    config = config_from_hf(published_config("google/gemma-2-9b-it") or {})
    assert type(config) is Gemma2Config
    assert config.local_rope == config.global_rope == Rope(theta=10_000.0)
    assert (config.period, config.has_qk_norm) == (2, False)
