"""GGUF metadata give the config.json that the model had before it was converted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec_checkpoints import CheckpointError
from jaxspec_checkpoints.gguf.config import read_config
from jaxspec_checkpoints.gguf.file import GgufFile, read_gguf
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.models import FAMILIES, tiny_config

SIZES = {
    "context_length": 32768,
    "embedding_length": 640,
    "block_count": 18,
    "feed_forward_length": 2048,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 512,
    "rope.freq_base": 1e6,
}


def config_of(
    architecture: str = "gemma3", **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the configs of a header with the given metadata; None removes a key."""
    metadata: dict[str, Any] = {
        f"{architecture}.{key}": value for key, value in SIZES.items()
    } | {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in changes.items():
        key = key.replace("__", ".")
        is_general = key.startswith(("general.", "tokenizer."))
        metadata[key if is_general else f"{architecture}.{key}"] = value
    present = {key: value for key, value in metadata.items() if value is not None}
    path = Path("m.gguf")
    return read_config(GgufFile(path=path, version=3, metadata=present, tensors={}))


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_gemma2_survives_the_conversion(tmp_path, family):
    config = tiny_config(family, vocab_size=8192)
    write_gguf(tmp_path / "m.gguf", config)
    found, generation = read_config(read_gguf(tmp_path / "m.gguf"))
    # The writer's files have two layers, and only 46 layers identify a 27B, which has
    # another query_pre_attn_scalar. The config has the base model's end token; the
    # tokenizer adds the one that ends a chat turn.
    config |= {"query_pre_attn_scalar": config["head_dim"], "eos_token_id": 1}
    config |= {"rope_scaling": None, "tie_word_embeddings": True}
    del config["hidden_act"]
    assert {name: found.get(name, "absent") for name in config} == config
    assert generation == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def test_config_of_gemma3_is_read():
    expected = {
        "model_type": "gemma3_text",
        "vocab_size": 4,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": 1,
    }
    changes = {"general__sampling__top_k": 64, "general__sampling__top_p": 0.95}
    config, generation = config_of(**changes)
    assert {name: config[name] for name in expected} == expected
    assert (generation["top_k"], generation["top_p"]) == (64, 0.95)
    assert generation["do_sample"] and "temperature" not in generation


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "heads", "key_length", "expected"),
    [
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
        ("gemma3", 48, 3840, 16, 256, 256),
        # The number of layers and the architecture together identify the size.
        ("gemma3", 46, 4608, 32, 128, 128),
    ],
)
def test_attention_scale_equals_llama_cpps(
    architecture, layers, width, heads, key_length, expected
):
    sizes = dict(block_count=layers, embedding_length=width)
    sizes |= dict(attention__head_count=heads, attention__key_length=key_length)
    config, _ = config_of(architecture, attention__value_length=key_length, **sizes)
    assert config["query_pre_attn_scalar"] == expected


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, 8.0),
        ({"rope__scaling__factor": 8.0}, 8.0),
        ({"rope__scale_linear": 8.0}, 8.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 8.0}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "yarn"}, None),
    ],
)
def test_position_scaling_is_read(changes, factor):
    expected = factor and {"rope_type": "linear", "factor": factor}
    assert config_of(**changes)[0]["rope_scaling"] == expected


def test_missing_values_default_to_llama_cpps():
    attention = ("head_count_kv", "key_length", "value_length", "sliding_window")
    missing = {f"attention__{name}": None for name in attention}
    config, _ = config_of(
        "gemma2", rope__freq_base=None, embedding_length=1024, **missing
    )
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 256
    assert config["sliding_window"] == 4096 and config["rope_theta"] == 10000.0
    assert config["attn_logit_softcapping"] == 50.0
    assert config["final_logit_softcapping"] == 30.0
    given: Any = dict(rope__freq_base_swa=500.0, final_logit_softcapping=20.0)
    config, _ = config_of(attention__sliding_window_pattern=3, **given)
    assert config["sliding_window_pattern"] == 3
    assert config["rope_local_base_freq"] == 500.0
    assert config["final_logit_softcapping"] == 20.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer__ggml__eos_token_id": 3}, [1, 3]),
        ({"tokenizer__ggml__eot_token_id": 3}, [1, 3]),
        ({"tokenizer__ggml__eos_token_id": None}, 1),
    ],
)
def test_end_tokens_are_read(changes, expected):
    config, generation = config_of(**changes)
    assert config["eos_token_id"] == generation["eos_token_id"] == expected


def test_values_for_each_layer_must_agree():
    heads = np.full(18, 4, np.uint32)
    config, _ = config_of(attention__head_count=heads)
    assert config["num_attention_heads"] == 4
    heads[3] = 8
    with pytest.raises(CheckpointError, match="head_count' must be the same integer"):
        config_of(attention__head_count=heads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "'gemma3.block_count' must be an integer, got nothing"),
        ({"block_count": "many"}, "must be an integer, got 'many'"),
        ({"block_count": True}, "must be an integer, got True"),
        ({"attention__head_count": 0}, "head_count' must be at least 1, got 0"),
        ({"attention__head_count": -4}, "must be an integer of at least 0, got -4"),
        ({"attention__value_length": 128}, "must be 256, as key_length, got 128"),
        ({"general__architecture": None}, "general.architecture' must be a string"),
        ({"general__architecture": "gemma4"}, "'gemma2' or 'gemma3', got 'gemma4'"),
        *(
            ({"general__architecture": name}, f"got '{name}'")
            for name in ("gemma3n", "gemma-embedding", "llama")
        ),
        ({"attention__sliding_window": None}, "sliding_window' must be an integer"),
        ({"tokenizer__ggml__tokens": None}, "no tensor 'token_embd.weight'"),
        ({"rope__freq_base": [1.0]}, "freq_base' must be a number"),
    ],
)
def test_unusable_metadata_are_an_error(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)
