"""Flax trees of canonical weights, by the formulas of the references, saved by Orbax.

An oracle: nothing here is taken from `flax_layout`.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxspec_checkpoints.storage import StoredArray

PAD_ROWS = 128


def stored(
    shape: tuple[int, ...], name: str = "array", dtype: Any = "float16"
) -> StoredArray:
    """Return an array without memory for its values."""
    return StoredArray(
        name=name,
        folder=Path("folder"),
        shape=shape,
        dtype=np.dtype(dtype),
        chunks=shape,
        spec={},
    )


def flax_layer(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    layer: int,
    *,
    is_model_first: bool,
) -> dict[str, np.ndarray]:
    """Return the arrays of one layer by their path within it."""
    heads, dim = config["num_attention_heads"], config["head_dim"]
    kv_heads, model = config["num_key_value_heads"], config["hidden_size"]

    def of(name: str) -> np.ndarray:
        return tensors[f"model.layers.{layer}.{name}.weight"]

    kv = np.stack([of("self_attn.k_proj"), of("self_attn.v_proj")])
    gating = np.stack([of("mlp.gate_proj"), of("mlp.up_proj")])
    norms = {}
    if f"model.layers.{layer}.self_attn.q_norm.weight" in tensors:
        norms["attn/_query_norm/scale"] = of("self_attn.q_norm")
        norms["attn/_key_norm/scale"] = of("self_attn.k_norm")
    return norms | {
        "pre_attention_norm/scale": of("input_layernorm"),
        "post_attention_norm/scale": of("post_attention_layernorm"),
        "pre_ffw_norm/scale": of("pre_feedforward_layernorm"),
        "post_ffw_norm/scale": of("post_feedforward_layernorm"),
        "attn/q_einsum/w": (
            of("self_attn.q_proj").reshape(heads, dim, model).transpose(0, 2, 1)
        ),
        "attn/kv_einsum/w": (kv.reshape(2, kv_heads, dim, model).transpose(0, 1, 3, 2)),
        "attn/attn_vec_einsum/w": (
            of("self_attn.o_proj").reshape(model, heads, dim).transpose(1, 2, 0)
        ),
        "mlp/gating_einsum": gating.transpose(0, 2, 1) if is_model_first else gating,
        "mlp/linear": of("mlp.down_proj").T,
    }


def flax_leaves(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    is_model_first: bool,
    num_stacks: int = 0,
    pad_rows: int = PAD_ROWS,
) -> dict[str, np.ndarray]:
    """Return every array by its path; padding rows are NaN: they must not be read.

    Args:
        pad_rows: Rows of the embedding after the vocabulary.
        num_stacks: Stack layer i with those of the same i modulo this; 0 for no stacks.
    """
    layers = [
        flax_layer(tensors, config, layer, is_model_first=is_model_first)
        for layer in range(config["num_hidden_layers"])
    ]
    embedding = tensors["model.embed_tokens.weight"]
    pads = np.full((pad_rows, embedding.shape[1]), np.nan, embedding.dtype)
    leaves = {
        "embedder/input_embedding": np.concatenate([embedding, pads]),
        "final_norm/scale": tensors["model.norm.weight"],
    }
    if not num_stacks:
        for number, layer in enumerate(layers):
            leaves |= {f"layer_{number}/{path}": array for path, array in layer.items()}
    for number in range(num_stacks):
        for path in layers[0]:
            stack = np.stack([layer[path] for layer in layers[number::num_stacks]])
            leaves[f"stacked_layers/attention_type_{number}/{path}"] = stack
    return {path: np.ascontiguousarray(array) for path, array in leaves.items()}


def flat(leaves: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return the tree as on Kaggle: a dict by path, of dicts by the last name."""
    tree: dict[str, dict[str, np.ndarray]] = {}
    for path, array in leaves.items():
        outer, _, inner = path.rpartition("/")
        if outer.endswith("/mlp") or outer == "mlp":
            outer, inner = path, "w"
        tree.setdefault(f"transformer/{outer}", {})[inner] = array
    return tree


def nested(leaves: Mapping[str, np.ndarray], root: str = "") -> dict[str, Any]:
    """Return the tree of the gemma library: nested dicts, one per part of a path."""
    tree: dict[str, Any] = {}
    for path, array in leaves.items():
        *outer, inner = f"{root}{path}".split("/")
        place = tree
        for key in outer:
            place = place.setdefault(key, {})
        place[inner] = array
    return tree


FORMS = {
    "flat": flat,
    "nested": nested,
    "nested below a root": lambda leaves: nested(leaves, "transformer/"),
}


def save(folder: Path, tree: Mapping[str, Any], **options: Any) -> None:
    """Save a tree with Orbax; `options` are arguments of its tree handler."""
    handler = ocp.PyTreeCheckpointHandler(**options)
    with warnings.catch_warnings(), ocp.Checkpointer(handler) as checkpointer:
        warnings.simplefilter("ignore")
        checkpointer.save(folder.absolute(), tree)


def restore(folder: Path) -> dict[str, Any]:
    """Return the arrays of a folder, read by Orbax."""
    with warnings.catch_warnings(), ocp.PyTreeCheckpointer() as checkpointer:
        warnings.simplefilter("ignore")
        return checkpointer.restore(folder.absolute())
