"""Make folders with only a model's config, and engine configurations from them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import (
    EngineArgs,
)

TINY: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, **changes: Any) -> str:
    return write_config(folder, TINY | changes)


def write_config(folder: Path, content: Mapping[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def configure(model: str, **arguments: Any) -> EngineConfig:
    return EngineArgs(model=model, **arguments).create_engine_config()
