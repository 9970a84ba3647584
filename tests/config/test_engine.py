import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.engine import (
    EngineConfig,
    SpeculativeConfig,
)
from jaxspec.errors import ConfigError
from jaxspec.models.families import config_from_folder, config_from_hf
from jaxspec.models.gemma.config import Gemma2Config
from tests.support.defaults import DEFAULTS

# The config.json of google/gemma-2-2b-it, as published.
GEMMA_2_2B_IT: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}


def model_config(**changes: Any) -> Gemma2Config:
    return dataclasses.replace(config_from_hf(GEMMA_2_2B_IT), **changes)


def engine_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = DEFAULTS | {
        "model": "target",
        "tokenizer": "target",
        "served_model_name": "target",
        "dtype": "auto",
        "max_model_len": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": 28,
        "seed": 0,
        "tensor_parallel_size": 1,
        "model_config": model_config(),
    }
    return EngineConfig(**values | changes)


def with_draft(**changes: Any) -> EngineConfig:
    draft = model_config(**changes.pop("draft", {}))
    speculative = SpeculativeConfig(model="draft", **changes.pop("speculative", {}))
    return engine_config(speculative=speculative, draft_model_config=draft, **changes)


def test_published_config_is_read():
    config = config_from_hf(GEMMA_2_2B_IT)
    assert config.num_layers == 26
    assert config.num_q_heads == 8
    assert config.num_kv_heads == 4
    assert config.eos_token_ids == (1, 107)
    assert config.query_pre_attn_scalar == 256.0
    assert config.attn_logit_softcapping == 50.0
    assert config.tie_word_embeddings


def test_even_layers_are_local():
    config = model_config(sliding_window=64)
    assert [config.window(layer) for layer in range(4)] == [64, None, 64, None]


def test_kv_bytes_of_a_token():
    # Bytes of one token: keys and values of 26 layers with 4 heads of 256, two bytes
    # each.
    assert model_config().kv_bytes_per_token(2) == 2 * 26 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (1, [1, 107], (1, 107)),
        ([1, 107], 1, (1, 107)),
        (1, None, (1,)),
        (None, 107, (107,)),
        (None, None, (1,)),
    ],
)
def test_end_tokens_of_both_files_are_joined(
    in_config: Any, in_generation: Any, expected: tuple[int, ...]
):
    config = GEMMA_2_2B_IT | {"eos_token_id": in_config}
    read = config_from_hf(config, {"eos_token_id": in_generation})
    assert read.eos_token_ids == expected


def test_missing_keys_get_the_format_defaults():
    required = {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    }
    short = {key: GEMMA_2_2B_IT[key] for key in required}
    short["eos_token_id"] = [1, 107]
    # Unknown keys get no invented values.
    short["torch_dtype"] = GEMMA_2_2B_IT["torch_dtype"]
    assert config_from_hf(short) == config_from_hf(GEMMA_2_2B_IT)


def test_null_soft_cap_means_no_soft_cap():
    config = GEMMA_2_2B_IT | {"final_logit_softcapping": None}
    assert config_from_hf(config).final_logit_softcapping is None


def test_newer_config_layout_is_read():
    config = {key: GEMMA_2_2B_IT[key] for key in GEMMA_2_2B_IT if key != "rope_theta"}
    config |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    read = config_from_hf(config)
    assert read.rope_theta == 5000.0


@pytest.mark.parametrize(
    ("changes", "given", "allowed"),
    [
        ({"model_type": "llama"}, "'llama'", "'gemma2'"),
        ({"model_type": None}, "None", "'gemma2'"),
        ({"head_dim": None}, "head_dim", "needs"),
        ({"vocab_size": 0}, "got 0", "at least 1"),
        ({"vocab_size": "big"}, "'big'", "an integer"),
        ({"head_dim": 255}, "255", "even"),
        ({"num_key_value_heads": 3}, "got 8", "num_key_value_heads=3"),
        ({"eos_token_id": 256000}, "256000", "0 to 255999"),
        ({"rms_norm_eps": 0}, "got 0", "above 0"),
        ({"attn_logit_softcapping": -1}, "-1", "above 0"),
        ({"attn_logit_softcapping": True}, "True", "above 0"),
        ({"query_pre_attn_scalar": 10**400}, "inf", "a finite number"),
        ({"rope_theta": "abc"}, "'abc'", "above 0"),
        ({"rope_theta": 10**400}, "rope_theta", "a finite number"),
        ({"rope_parameters": [1]}, "[1]", "an object"),
        ({"eos_token_id": [[1]]}, "[1]", "an integer"),
        ({"eos_token_id": {}}, "{}", "an integer"),
    ],
)
def test_rejects_bad_model_config(changes: dict[str, Any], given: str, allowed: str):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(GEMMA_2_2B_IT | changes)
    assert given in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "given", "allowed"),
    [
        ({"attention_bias": True}, "True", "False"),
        ({"hidden_activation": "silu"}, "'silu'", "'gelu_pytorch_tanh'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear'", "'default'"),
        ({"layer_types": ["full_attention"]}, "'full_", "'sliding_attention'"),
        ({"layer_types": 5}, "5", "'sliding_attention'"),
        ({"use_bidirectional_attention": True}, "True", "False"),
    ],
)
def test_rejects_unsupported_variant(changes: dict[str, Any], given: str, allowed: str):
    with pytest.raises(NotImplementedError) as caught:
        config_from_hf(GEMMA_2_2B_IT | changes)
    assert given in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("value", "is_tied"), [(None, True), (True, True), (False, False)]
)
def test_null_tie_word_embeddings_is_the_default(value: object, is_tied: bool):
    config = config_from_hf(GEMMA_2_2B_IT | {"tie_word_embeddings": value})
    assert config.tie_word_embeddings is is_tied


def test_rejects_tie_word_embeddings_that_is_not_boolean():
    with pytest.raises(ConfigError, match="tie_word_embeddings must be .*'no'"):
        config_from_hf(GEMMA_2_2B_IT | {"tie_word_embeddings": "no"})


@pytest.mark.parametrize("name", ["use_bidirectional_attention", "attention_bias"])
@pytest.mark.parametrize("value", [None, False])
def test_accepts_variant_that_is_turned_off(name: str, value: object):
    config = GEMMA_2_2B_IT | {name: value}
    assert config_from_hf(config) == config_from_hf(GEMMA_2_2B_IT)


def test_folder_is_read_with_its_generation_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_2_2B_IT))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert config_from_folder(tmp_path).eos_token_ids == (1, 107, 106)


def test_folder_without_config_names_found_files(tmp_path: Path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"no checkpoint: .*found: weights\.bin"):
        config_from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"found: no such folder"):
        config_from_folder(tmp_path / "none")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
def test_unusable_file_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        config_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "given", "allowed"),
    [
        ({"num_speculative_tokens": 0}, "got 0", "from 1 to 8"),
        ({"num_speculative_tokens": 9}, "got 9", "from 1 to 8"),
        ({"num_speculative_tokens": True}, "True", "an integer"),
        ({"rejection_sample_method": "typicl"}, "'typicl'", "'block'"),
        ({"draft_sample_method": "best"}, "'best'", "'probabilistic', 'greedy'"),
        ({"disable_by_batch_size": 1}, "got 1", "at least 2"),
        ({"max_model_len": 0}, "got 0", "at least 1"),
        ({"draft_tensor_parallel_size": 0}, "got 0", "at least 1"),
    ],
)
def test_rejects_bad_speculation(changes: dict[str, Any], given: str, allowed: str):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(model="draft", **changes)
    assert given in str(caught.value)
    assert allowed in str(caught.value)


def test_too_many_drafts_names_the_largest_number():
    with pytest.raises(ConfigError, match="The largest number for method"):
        SpeculativeConfig(model="draft", num_speculative_tokens=9)


@pytest.mark.parametrize(
    ("changes", "given", "allowed"),
    [
        ({"dtype": "float16"}, "'float16'", "'bfloat16'"),
        ({"max_model_len": 8193}, "8193", "from 1 to 8192"),
        ({"max_num_seqs": 0}, "got 0", "at least 1"),
        ({"max_num_batched_tokens": 0}, "got 0", "at least 1"),
        ({"page_size": 24, "num_pages": 90}, "24", "power of two"),
        ({"page_size": 512}, "512", "from 1 to 256"),
        ({"num_pages": 6}, "got 6", "at least 7"),
        ({"seed": -1}, "-1", "from 0 to 4294967295"),
        ({"tensor_parallel_size": 0}, "got 0", "at least 1"),
    ],
)
def test_rejects_bad_engine_size(changes: dict[str, Any], given: str, allowed: str):
    with pytest.raises(ConfigError) as caught:
        engine_config(**changes)
    assert given in str(caught.value)
    assert allowed in str(caught.value)


def test_pages_of_one_sequence():
    # 100 tokens fill six pages of 16 and begin a seventh.
    assert engine_config(num_pages=7).pages_per_seq == 7
    assert engine_config(max_model_len=96, num_pages=6).pages_per_seq == 6


def test_draft_tokens_per_step():
    assert engine_config().num_draft_tokens == 0
    assert with_draft(speculative={"num_speculative_tokens": 3}).num_draft_tokens == 3


def test_lookup_drafts_need_no_model():
    lookup = SpeculativeConfig(method="ngram", prompt_lookup_max=4, prompt_lookup_min=2)
    config = engine_config(speculative=lookup)
    assert config.draft_model_config is None
    assert config.num_draft_tokens == 5


def test_different_vocabularies_are_rejected_with_both_sizes():
    with pytest.raises(ConfigError, match=r"256000 tokens, the draft 8192"):
        with_draft(draft={"vocab_size": 8192})


@pytest.mark.parametrize(("target", "draft"), [(4, 3), (2, 4)])
def test_draft_devices_divide_target_devices(target: int, draft: int):
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size={target}, got {draft}"
    ):
        with_draft(
            tensor_parallel_size=target,
            speculative={"draft_tensor_parallel_size": draft},
        )


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine_config().seed = 3  # pyright: ignore[reportAttributeAccessIssue]
