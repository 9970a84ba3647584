"""From canonical tensors (HuggingFace names, (out, in)) to the model's parameters.

Owns the correspondence of names and the shardings; reading files and bringing each
device its shard is `jaxspec_checkpoints`' business.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, UInt32
from tqdm.auto import tqdm

from jaxspec.config import ModelConfig
from jaxspec.models import panels
from jaxspec.models.backend import Backend
from jaxspec.models.gemma2 import Gemma2, gate_block
from jaxspec.sharding import TARGET_MESH_AXES, kv_copies, named_sharding, num_parts
from jaxspec_checkpoints import Sizes, Tensor, check_tensors, tensor_shapes
from jaxspec_checkpoints.placement import place
from jaxspec_kernels.rejection_sampling import noise

# Canonical name within a layer -> (path, place among the parts of a fused parameter).
_LAYER_PATHS: dict[str, tuple[tuple[str, ...], int]] = {
    "input_layernorm.weight": (("input_norm",), 0),
    "post_attention_layernorm.weight": (("post_attention_norm",), 0),
    "pre_feedforward_layernorm.weight": (("pre_feed_forward_norm",), 0),
    "post_feedforward_layernorm.weight": (("post_feed_forward_norm",), 0),
    "self_attn.q_proj.weight": (("attention", "q_proj"), 0),
    "self_attn.k_proj.weight": (("attention", "kv_proj"), 0),
    "self_attn.v_proj.weight": (("attention", "kv_proj"), 1),
    "self_attn.o_proj.weight": (("attention", "o_proj"), 0),
    "mlp.gate_proj.weight": (("feed_forward", "gate_up_proj"), 0),
    "mlp.up_proj.weight": (("feed_forward", "gate_up_proj"), 1),
    "mlp.down_proj.weight": (("feed_forward", "down_proj"), 0),
}

Params = dict[str, Any]
ParamPath = tuple[Any, ...]  # names, and the number of a layer


def abstract_model(
    config: ModelConfig,
    dtype: jnp.dtype,
    backend: Backend = Backend(),  # noqa: B008 frozen
) -> tuple[Any, Any]:
    """Graph definition and abstract parameters of a model, nothing allocated."""
    model = nnx.eval_shape(lambda: Gemma2(config, dtype, backend=backend))
    return nnx.split(model)


def laid_out(config: ModelConfig, params: Params) -> ModelConfig:
    """The config of a network whose KV heads are repeated for the devices.

    To the network they are heads like others, each with fewer queries.
    """
    rows = params["layers"]["0"]["attention"]["kv_proj"].shape[0]
    return replace(config, num_kv_heads=rows // (2 * config.head_dim))


def _for_mesh(
    config: ModelConfig, mesh: Mesh, mesh_axes: tuple[str, ...]
) -> tuple[ModelConfig, int]:
    """The config that `laid_out` will find, and copies of each KV head."""
    parts = num_parts(mesh, mesh_axes)
    copies = kv_copies(config.num_q_heads, config.num_kv_heads, parts)
    return replace(config, num_kv_heads=config.num_kv_heads * copies), copies


def param_path(name: str) -> tuple[ParamPath, int]:
    """Where the canonical tensor `name` goes: parameter path, place within it."""
    if name == "model.embed_tokens.weight":
        return ("embedding",), 0
    if name == "model.norm.weight":
        return ("final_norm",), 0
    number, _, part = name.removeprefix("model.layers.").partition(".")
    path, index = _LAYER_PATHS[part]
    return ("layers", int(number), *path), index


def load_params(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
    progress: str | None = None,
) -> Params:
    """Read canonical tensors into their shards, cast to `dtype`; the params tree.

    Args:
        progress: Title of a progress bar; it appears when loading takes a while.

    Raises:
        CheckpointError: A tensor is unknown, missing, or has another shape than the
            config says (nothing was read then), or its bytes are damaged.
    """
    check_tensors(_sizes(config), tensors)
    spread, copies = _for_mesh(config, mesh, mesh_axes)
    _, state = abstract_model(spread, dtype)
    parts: dict[ParamPath, dict[int, Tensor]] = {}
    for name in tensor_shapes(_sizes(config)):
        path, index = param_path(name)
        parts.setdefault(path, {})[index] = tensors[name]
    placed = {}
    with tqdm(
        total=sum(tensor.num_bytes for tensor in tensors.values()),
        desc=progress,
        unit="B",
        unit_scale=True,
        delay=1.0,  # a small model is there before anyone wonders
        disable=progress is None,
    ) as bar:
        for path, variable in dict(nnx.to_flat_state(state)).items():
            found = [parts[path][index] for index in sorted(parts[path])]
            is_kv = path[-1] == "kv_proj"
            block = config.head_dim if is_kv else gate_block(config.intermediate_size)
            placed[path] = place(
                found,
                sharding=_placement(variable, mesh, mesh_axes),
                dtype=np.dtype(dtype),
                block=block if len(found) > 1 else 1,
                copies=copies if is_kv else 1,
                on_bytes=bar.update,
            )
    return nest(placed)


def _sizes(config: ModelConfig) -> Sizes:
    return Sizes(**{item.name: getattr(config, item.name) for item in fields(Sizes)})


def abstract_params(
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> Params:
    """Shapes and placement of parameters, for compiling before there are any."""
    spread, _ = _for_mesh(config, mesh, mesh_axes)
    _, declared = abstract_model(spread, dtype)
    return nest(
        {
            path: jax.ShapeDtypeStruct(
                variable.shape, dtype, sharding=_placement(variable, mesh, mesh_axes)
            )
            for path, variable in dict(nnx.to_flat_state(declared)).items()
        }
    )


def random_params(
    config: ModelConfig,
    *,
    seed: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> Params:
    """Random parameters, placed like loaded ones: for tests and `load_format=dummy`.

    Each is made where it stays, its shards alone and nothing beside them, and has the
    same values on any mesh. Matrices, which are (out, in), have a standard deviation of
    1/sqrt(in); vectors (norm weights) are zeros.
    """
    spread, copies = _for_mesh(config, mesh, mesh_axes)
    _, declared = abstract_model(spread, dtype)
    makers: dict[Any, Callable[[jax.Array], jax.Array]] = {}
    placed = {}
    for number, (path, variable) in enumerate(nnx.to_flat_state(declared)):
        shape, placement = variable.shape, _placement(variable, mesh, mesh_axes)
        if len(shape) == 1:
            placed[path] = jnp.zeros(shape, dtype, device=placement)
            continue
        repeats = copies if path[-1] == "kv_proj" else 1
        form = shape, repeats, placement
        if form not in makers:
            make = partial(
                _random_matrix,
                shape=shape,
                dtype=dtype,
                block=2 * config.head_dim,
                copies=repeats,
            )
            # Only a compiled function makes nothing but the shards.
            makers[form] = jax.jit(make, out_shardings=placement)  # noqa: TID251
        key = jax.random.fold_in(jax.random.key(np.uint32(seed)), number)
        placed[path] = makers[form](jax.random.key_data(key))
    return nest(placed)


def _random_matrix(
    words: UInt32[Array, "2"],
    *,
    shape: tuple[int, int],
    dtype: jnp.dtype,
    block: int,
    copies: int,
) -> Array:
    """Uniform values by a hash of where they stand: XLA writes nothing but them.

    Args:
        block: Rows that are repeated together, `copies` times.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    if copies > 1:
        row = row // (block * copies) * block + row % block
    unit = noise.uniform(words[0], words[1], row * jnp.uint32(shape[1]) + column)
    # The standard deviation of a uniform is its width over sqrt(12).
    return ((unit - 0.5) * jnp.float32((12 / shape[1]) ** 0.5)).astype(dtype)


def suit_devices(params: Params, mesh: Mesh) -> None:
    """Add in place the forms in which these devices multiply matrices fastest."""
    if panels.are_wanted(mesh, params):
        panels.add_panels(params, mesh)


def _placement(variable: Any, mesh: Mesh, mesh_axes: tuple[str, ...]) -> NamedSharding:
    declared = variable.get_metadata()
    return named_sharding(
        mesh,
        declared["axes"],
        variable.shape,
        unit=declared["unit"],
        mesh_axes=mesh_axes,
    )


def nest(flat: dict[ParamPath, Any]) -> Params:
    """Flat paths to nested dicts: a tree that jax flattens in C++."""
    tree: Params = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return tree


def bind(
    config: ModelConfig,
    params: Params,
    backend: Backend = Backend(),  # noqa: B008 frozen
) -> Gemma2:
    """A model object over `params`; usable inside jit."""
    dtype = params["embedding"].dtype
    graph, state = abstract_model(laid_out(config, params), dtype, backend)
    flat = {}
    for path, variable in dict(nnx.to_flat_state(state)).items():
        node: Any = params
        for key in path:
            node = node[str(key)]
        flat[path] = variable.replace(node)
    return nnx.merge(graph, nnx.from_flat_state(flat))
