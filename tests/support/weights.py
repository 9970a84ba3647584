"""Canonical tensors of a Gemma 2 with two layers, and its parameters."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.config.engine import ModelConfig
from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import abstract_params, load_params, random_params
from jaxspec_checkpoints import in_memory
from tests.support.oracles import TINY, forms_of

FLOAT32 = jnp.dtype(jnp.float32)


def make_config(**changes: Any) -> Any:
    sizes = TINY | dict(num_hidden_layers=2, model_type="gemma2") | changes
    return config_from_hf(sizes)


# Names and shapes are written out here, so that the loader's are checked.
LAYER_TENSORS = {
    "input_layernorm": "model",
    "post_attention_layernorm": "model",
    "pre_feedforward_layernorm": "model",
    "post_feedforward_layernorm": "model",
    "self_attn.q_proj": "queries model",
    "self_attn.k_proj": "keys model",
    "self_attn.v_proj": "keys model",
    "self_attn.o_proj": "model queries",
    "mlp.gate_proj": "hidden model",
    "mlp.up_proj": "hidden model",
    "mlp.down_proj": "model hidden",
}


def make_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return tensors with distinct values."""
    sizes = dict(
        vocab=config.vocab_size,
        model=config.hidden_size,
        hidden=config.intermediate_size,
        queries=config.num_q_heads * config.head_dim,
        keys=config.num_kv_heads * config.head_dim,
    )
    shapes = {"model.embed_tokens": "vocab model", "model.norm": "model"}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: axes for name, axes in LAYER_TENSORS.items()}
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": rng.normal(
            size=[sizes[axis] for axis in axes.split()]
        ).astype(np.float32)
        for name, axes in shapes.items()
    }


def check_same_forms(
    config: ModelConfig, tensors: dict[str, np.ndarray], **options: Any
) -> list[Any]:
    """Return loaded, random and abstract parameters, which have the same forms."""
    options = dict(dtype=FLOAT32) | options
    made = [
        load_params(config, in_memory(tensors), **options),
        random_params(config, seed=3, **options),
        abstract_params(config, **options),
    ]
    assert forms_of(made[0]) == forms_of(made[1]) == forms_of(made[2])
    return made


CONFIG = make_config()
TENSORS = make_tensors(CONFIG)
