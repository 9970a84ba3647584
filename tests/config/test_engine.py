import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig, GivenSizes, SpeculativeConfig
from jaxspec.errors import ConfigError, UnsupportedError
from jaxspec.models.families import (
    config_from_folder,
    config_from_hf,
    published_config,
)
from jaxspec.models.gemma.config import Gemma2Config
from tests.support.defaults import DEFAULTS

PUBLISHED = published_config("google/gemma-2-2b-it")
assert PUBLISHED is not None
GEMMA_2_2B_IT: dict[str, Any] = PUBLISHED | {"torch_dtype": "bfloat16"}
REQUIRED = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "head_dim"}
REQUIRED |= {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"}


def read(generation: Any = None, **changes: Any) -> Gemma2Config:
    return config_from_hf(GEMMA_2_2B_IT | changes, generation)


def engine_config(**changes: Any) -> EngineConfig:
    names = ("model", "tokenizer", "served_model_name")
    given: dict[str, Any] = DEFAULTS | dict.fromkeys(names, "target")
    given |= dict(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64)
    given |= dict(page_size=16, num_pages=28, tensor_parallel_size=1)
    given |= dict(dtype="auto", seed=0, model_config=read())
    return EngineConfig(**given | changes)


def with_draft(draft: Any = (), speculative: Any = (), **changes: Any) -> EngineConfig:
    changes["speculative"] = SpeculativeConfig(model="draft", **dict(speculative))
    return engine_config(draft_model_config=read(**dict(draft)), **changes)


def test_reads_published_config():
    config = read()
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (26, 8, 4)
    assert config.eos_token_ids == (1, 107)
    assert config.query_pre_attn_scalar == 256.0
    assert config.attn_logit_softcapping == 50.0
    assert config.tie_word_embeddings
    assert [config.window(layer) for layer in range(4)] == [4096, None] * 2
    # Keys and values of 26 layers with 4 heads of 256, two bytes each.
    assert config.kv_bytes_per_token(2) == 2 * 26 * 4 * 256 * 2


def test_layers_keep_only_their_window_where_that_is_possible():
    def kept(**changes: Any) -> str:
        config = dict(sliding_window=32) | changes.pop("config", {})
        made = engine_config(model_config=read(**config), **changes)
        assert (made.local_window is None) == made.kept_tokens.startswith("All layers")
        return made.kept_tokens

    off = "disable_hybrid_kv_cache_manager"
    assert kept() == kept(**{off: False})
    assert kept() == "Layers with a sliding window keep only 32 tokens"
    assert f"all tokens: {off}=True" in kept(**{off: True})
    assert "only one kind of layers" in kept(config=dict(num_hidden_layers=1))
    assert "window of 100 tokens" in kept(config=dict(sliding_window=100))
    # A sequence takes at most seven pages of either kind.
    enough, few = (
        dict(num_pages=count, given=GivenSizes(num_pages=count)) for count in (14, 13)
    )
    assert kept(**enough) == kept()
    assert "num_gpu_blocks_override=13 is less than the 14 pages" in kept(**few)
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        kept(**few, **{off: False})


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
def test_end_tokens_of_both_files_are_joined(in_config, in_generation, expected):
    config = read({"eos_token_id": in_generation}, eos_token_id=in_config)
    assert config.eos_token_ids == expected


def test_missing_keys_get_the_format_defaults():
    # The end tokens and the type of the weights have no default in the format.
    kept = REQUIRED | {"eos_token_id", "torch_dtype"}
    assert config_from_hf({key: GEMMA_2_2B_IT[key] for key in kept}) == read()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"final_logit_softcapping": None}, {"final_logit_softcapping": None}),
        ({"tie_word_embeddings": None}, {"tie_word_embeddings": True}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        ({"use_bidirectional_attention": None}, {}),
        ({"use_bidirectional_attention": False}, {}),
        ({"attention_bias": None}, {}),
    ],
)
def test_reads_null_and_false(changes: dict[str, Any], expected: dict[str, Any]):
    assert read(**changes) == dataclasses.replace(read(), **expected)


def test_reads_newer_layout():
    config = {key: GEMMA_2_2B_IT[key] for key in GEMMA_2_2B_IT if key != "rope_theta"}
    config |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    assert config_from_hf(config).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ConfigError, {"model_type": "llama"}, "'gemma2'.*got 'llama'"),
        (ConfigError, {"head_dim": None}, "needs.*head_dim"),
        (ConfigError, {"vocab_size": 0}, "at least 1, got 0"),
        (ConfigError, {"head_dim": 255}, "even.*got 255"),
        (ConfigError, {"num_key_value_heads": 3}, "num_key_value_heads=3, got 8"),
        (ConfigError, {"eos_token_id": 256000}, "0 to 255999, got 256000"),
        (ConfigError, {"rms_norm_eps": 0}, "above 0, got 0"),
        (ConfigError, {"attn_logit_softcapping": -1}, "above 0.*got -1"),
        (ConfigError, {"query_pre_attn_scalar": 10**400}, "a finite number.*got inf"),
        (ConfigError, {"rope_theta": "abc"}, "above 0.*got 'abc'"),
        (ConfigError, {"rope_theta": 10**400}, "rope_theta.*a finite number"),
        (ConfigError, {"rope_parameters": [1]}, r"an object.*got \[1\]"),
        (ConfigError, {"eos_token_id": [[1]]}, r"an integer.*got \[1\]"),
        (ConfigError, {"tie_word_embeddings": "no"}, "tie_word_embeddings.*'no'"),
        (UnsupportedError, {"attention_bias": True}, "False.*got True"),
        (
            UnsupportedError,
            {"hidden_activation": "silu"},
            "'gelu_pytorch_tanh'.*got 'silu'",
        ),
        (UnsupportedError, {"rope_scaling": {"type": "x"}}, "'default'.*got 'x'"),
        (UnsupportedError, {"layer_types": ["full_attention"]}, "'sliding_.*'full_"),
        (UnsupportedError, {"layer_types": 5}, "'sliding_attention'.*got 5"),
        (UnsupportedError, {"use_bidirectional_attention": True}, "False.*got True"),
    ],
)
def test_rejects_bad_model_config(error: Any, changes: dict[str, Any], message: str):
    with pytest.raises(error, match=message):
        read(**changes)


def test_folder_is_read_with_its_generation_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_2_2B_IT))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert config_from_folder(tmp_path).eos_token_ids == (1, 107, 106)


def test_folder_errors_name_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"found: no such folder"):
        config_from_folder(tmp_path / "none")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"no checkpoint: .*found: weights\.bin"):
        config_from_folder(tmp_path)
    for content in ("{", "[]", '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            config_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "'bfloat16', got 'float16'"),
        ({"max_num_seqs": 0}, "at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "at least 1, got 0"),
        ({"page_size": 512}, "from 1 to 256, got 512"),
        ({"num_pages": 6}, "at least 7, got 6"),
        ({"seed": -1}, "from 0 to 4294967295, got -1"),
        ({"tensor_parallel_size": 0}, "at least 1, got 0"),
    ],
)
def test_rejects_bad_engine_size(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        engine_config(**changes)


def test_pages_and_drafts_are_derived():
    # 100 tokens fill six pages of 16 and begin a seventh.
    assert engine_config(num_pages=7).pages_per_seq == 7
    assert engine_config(max_model_len=96, num_pages=6).pages_per_seq == 6
    assert engine_config().max_draft_tokens == 0
    assert with_draft(speculative={"num_speculative_tokens": 3}).max_draft_tokens == 3
    lookup = SpeculativeConfig(method="ngram", prompt_lookup_max=4, prompt_lookup_min=2)
    config = engine_config(speculative=lookup)
    assert (config.draft_model_config, config.max_draft_tokens) == (None, 5)


def test_rejects_draft_that_does_not_fit_target():
    with pytest.raises(ConfigError, match=r"256000 tokens, the draft 8192"):
        with_draft({"vocab_size": 8192})
    for target, draft in ((4, 3), (2, 4)):
        message = f"tensor_parallel_size={target}, got {draft}"
        devices = {"draft_tensor_parallel_size": draft}
        with pytest.raises(ConfigError, match=message):
            with_draft(speculative=devices, tensor_parallel_size=target)
