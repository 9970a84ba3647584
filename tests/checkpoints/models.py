"""Tiny random Gemma folders: of Gemma 2 the published sizes over 32, heads kept."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec_checkpoints import Sizes, Tensor, bundled_target
from jaxspec_checkpoints.gemma.published import LAYOUTS

# Differences of the three sizes are preserved: the number of heads, queries narrower or
# wider than the model, 27B's half heads and its own query_pre_attn_scalar.
_NAMES = ("hidden_size", "intermediate_size", "num_attention_heads")
_NAMES += ("num_key_value_heads", "head_dim", "query_pre_attn_scalar")
FAMILIES: dict[str, dict[str, int]] = {
    "2b": dict(zip(_NAMES, (72, 288, 8, 4, 8, 8), strict=True)),
    "9b": dict(zip(_NAMES, (112, 448, 16, 8, 8, 8), strict=True)),
    "27b": dict(zip(_NAMES, (144, 1152, 32, 16, 4, 5), strict=True)),
}
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


FACTS = json.loads((Path(__file__).parent / "data" / "published.json").read_text())


def check_tensors(found: Mapping[Any, Any], tensors: Mapping[Any, Any]) -> None:
    """Check the names, shapes, types and bytes of tensors or arrays."""
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        one = found[name]
        one = one.whole() if isinstance(one, Tensor) else one
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype), name
        assert one.tobytes() == expected.tobytes(), name


def published_shapes(name: str, names: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a published size by the "hf" or "flax" names."""
    facts = FACTS[name]
    return {
        path.format(layer): tuple(shape)
        for path, shape in facts[names].items()
        for layer in range(facts["num_layers"] if "{}" in path else 1)
    }


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the content of a `config.json`, with `changes` to its fields."""
    config: dict[str, Any] = dict(architectures=["Gemma2ForCausalLM"])
    config |= dict(model_type="gemma2", attention_bias=False)
    config |= dict(vocab_size=512, num_hidden_layers=2, max_position_embeddings=8192)
    config |= dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    config |= dict(sliding_window=8, rms_norm_eps=1e-6, rope_theta=10000.0)
    config |= dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
    config |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=[1, 107])
    return config | FAMILIES[family] | changes


def tiny_gemma3(**changes: Any) -> dict[str, Any]:
    """Return the content of a flat `config.json` of a Gemma 3 with one KV head."""
    config: dict[str, Any] = dict(architectures=["Gemma3ForCausalLM"])
    config |= dict(model_type="gemma3_text", vocab_size=512, num_hidden_layers=8)
    config |= dict(zip(_NAMES, (40, 128, 4, 1, 16, 7), strict=True))
    config |= dict(sliding_window=8, sliding_window_pattern=6)
    config |= dict(rope_theta=1000000.0, rope_local_base_freq=10000.0)
    config |= dict(rope_scaling=dict(rope_type="linear", factor=8.0))
    config |= dict(max_position_embeddings=131072, eos_token_id=[1, 106])
    return config | changes


def tiny_tensors(
    config: dict[str, Any], *, dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random weights by canonical name; every layer changes the logits."""
    random = np.random.default_rng(seed)
    tensors = {}
    shapes = LAYOUTS[config["model_type"]].tensor_shapes(Sizes.from_config(config))
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        values = scale * random.standard_normal(shape, np.float32)
        tensors[name] = values.astype(DTYPES[dtype])
    return tensors


def write_tiny(
    folder: Path,
    *,
    family: str,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Write a model in HuggingFace's format and return its tensors.

    The tokenizer is the bundled one. Its ids fit a `vocab_size` of 8192; the default
    one is smaller, for tests that do not encode text.

    Args:
        folder: Folder to make.
        family: A size of Gemma 2, or "gemma3".
        shards: Number of files with the tensors; several files have an index.
        changes: Changed fields of `config.json`.
    """
    make = tiny_gemma3 if family == "gemma3" else partial(tiny_config, family)
    config = make(torch_dtype=dtype, **changes)
    tensors = tiny_tensors(config, dtype=dtype, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"eos_token_id": [1, 107], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(bundled_target() / name, folder / name)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        _write_shards(folder, tensors, shards)
    return tensors


def _write_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = {name: tensors[name] for name in names[shard::shards]}
        save_file(held, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
