"""From canonical tensors (HuggingFace names, (out, in)) to the model's parameters.

Owns the correspondence of names and the placement on the mesh; reading files is
`jaxspec_checkpoints`' business.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxspec.config import ModelConfig
from jaxspec.errors import ConfigError
from jaxspec.models.gemma2 import Gemma2, gate_block
from jaxspec.sharding import TARGET_MESH_AXES, named_sharding

# Canonical name within a layer -> (path, place in a fused parameter).
_LAYER_NAMES: dict[str, tuple[tuple[str, ...], int | None]] = {
    "input_layernorm": (("input_norm",), None),
    "post_attention_layernorm": (("post_attention_norm",), None),
    "pre_feedforward_layernorm": (("pre_feed_forward_norm",), None),
    "post_feedforward_layernorm": (("post_feed_forward_norm",), None),
    "self_attn.q_proj": (("attention", "q_proj"), None),
    "self_attn.k_proj": (("attention", "kv_proj"), 0),
    "self_attn.v_proj": (("attention", "kv_proj"), 1),
    "self_attn.o_proj": (("attention", "o_proj"), None),
    "mlp.gate_proj": (("feed_forward", "gate_up_proj"), 0),
    "mlp.up_proj": (("feed_forward", "gate_up_proj"), 1),
    "mlp.down_proj": (("feed_forward", "down_proj"), None),
}

Params = dict[str, Any]
ParamPath = tuple[Any, ...]  # names, and the number of a layer


def abstract_model(config: ModelConfig, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Graph definition and abstract parameters of a model, nothing allocated."""
    model = nnx.eval_shape(lambda: Gemma2(config, dtype))
    return nnx.split(model)


def tensor_names(config: ModelConfig) -> list[str]:
    """The canonical tensors that a model is made of."""
    layers = [
        f"model.layers.{layer}.{part}.weight"
        for layer in range(config.num_layers)
        for part in _LAYER_NAMES
    ]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight"]


def param_path(name: str) -> tuple[ParamPath, int | None]:
    """Where the canonical tensor `name` goes: parameter path, index if it is fused."""
    if name == "model.embed_tokens.weight":
        return ("embedding",), None
    if name == "model.norm.weight":
        return ("final_norm",), None
    prefix, _, rest = name.partition(".layers.")
    number, _, part = rest.removesuffix(".weight").partition(".")
    is_layer = prefix == "model" and number.isdigit() and name.endswith(".weight")
    if not is_layer or part not in _LAYER_NAMES:
        raise ConfigError(f"tensor {name!r} is not part of Gemma 2")
    path, index = _LAYER_NAMES[part]
    return ("layers", int(number), *path), index


def load_params(
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> Params:
    """Place canonical tensors on the mesh, cast to `dtype`; returns the params tree.

    Raises:
        ConfigError: a tensor is unknown, missing, or has another shape than the
            config says.
    """
    _, state = abstract_model(config, dtype)
    declared = dict(nnx.to_flat_state(state))
    parts: dict[ParamPath, dict[int | None, np.ndarray]] = {}
    missing = dict.fromkeys(tensor_names(config))
    for name, tensor in tensors:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a copy of the embedding, written by some exporters
        path, index = param_path(name)
        if path not in declared:
            raise ConfigError(
                f"tensor {name!r} belongs to a layer that config.json "
                f"(num_hidden_layers={config.num_layers}) does not have"
            )
        rows, *columns = declared[path].shape
        expected = (rows if index is None else rows // 2, *columns)
        if tensor.shape != expected:
            raise ConfigError(
                f"tensor {name!r} has shape {tensor.shape}, config.json asks for "
                f"{expected}"
            )
        parts.setdefault(path, {})[index] = tensor
        missing.pop(name, None)
    if missing:
        first, *others = missing
        more = f" and {len(others)} more" if others else ""
        raise ConfigError(f"the checkpoint has no tensor {first!r}{more}")
    placed = {}
    for path, variable in declared.items():
        found = parts.pop(path)
        if None in found:
            whole = found[None]
        else:
            is_kv = path[-1] == "kv_proj"
            block = config.head_dim if is_kv else gate_block(config.intermediate_size)
            whole = interleave(found[0], found[1], block)
        sharding = _placement(variable, mesh, mesh_axes)
        placed[path] = jax.device_put(whole.astype(dtype), sharding)
    return nest(placed)


def interleave(first: np.ndarray, second: np.ndarray, block: int) -> np.ndarray:
    """Alternate `block` rows of each: the order of the fused projections."""
    columns = first.shape[1]
    pair = [part.reshape(-1, 1, block, columns) for part in (first, second)]
    return np.concatenate(pair, axis=1).reshape(-1, columns)


def random_params(
    config: ModelConfig,
    *,
    seed: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> Params:
    """Random parameters, placed like loaded ones: for tests and `load_format=dummy`."""
    state = nnx.state(Gemma2(config, dtype, nnx.Rngs(params=seed)))
    placed = {}
    for path, variable in dict(nnx.to_flat_state(state)).items():
        sharding = _placement(variable, mesh, mesh_axes)
        placed[path] = jax.device_put(variable[...], sharding)
    return nest(placed)


def _placement(variable: Any, mesh: Mesh, mesh_axes: tuple[str, ...]) -> NamedSharding:
    declared = variable.get_metadata()
    return named_sharding(
        mesh,
        declared["axes"],
        variable.shape,
        unit=declared["unit"],
        mesh_axes=mesh_axes,
    )


def nest(flat: dict[ParamPath, jax.Array]) -> Params:
    """Flat paths to nested dicts: a tree that jax flattens in C++."""
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return tree


def bind(config: ModelConfig, params: Params) -> Gemma2:
    """A model object over `params`; usable inside jit."""
    dtype = params["embedding"].dtype
    graph, state = abstract_model(config, dtype)
    flat = {}
    for path, variable in dict(nnx.to_flat_state(state)).items():
        node: Any = params
        for key in path:
            node = node[str(key)]
        flat[path] = variable.replace(node)
    return nnx.merge(graph, nnx.from_flat_state(flat))
