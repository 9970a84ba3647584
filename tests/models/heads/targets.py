"""The target of the heads in these tests, and other targets."""

from typing import Any

from jaxspec.models.families import config_from_hf
from tests.models.heads import torch_heads as theirs


def target_config(**changes: Any) -> Any:
    sizes = dict(
        model_type="gemma2",
        vocab_size=theirs.VOCAB,
        hidden_size=theirs.HIDDEN,
        intermediate_size=32,
        num_hidden_layers=theirs.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return config_from_hf(sizes | changes)
