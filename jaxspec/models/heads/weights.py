"""A head's parameters: declared, read, random, abstract, and written to a folder.

With a trimmed vocabulary the tree also has `token_ids`, int32: the target's token for
each of the head's.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError
from jaxspec.models.families import family_of
from jaxspec.models.heads.config import (
    Eagle3Config,
    HeadConfig,
    LayerConfig,
    read_head,
)
from jaxspec.models.params import ParamPath, Params, ParamSpec, Specs
from jaxspec.models.trimmed import TOKEN_IDS, put_token_id_forms, put_token_ids
from jaxspec.models.weights import (
    Make,
    choose_forms,
    describer,
    make_each,
    reader,
    tensors_of,
)
from jaxspec.sharding import DRAFT_MESH_AXES, kv_copies, num_parts, put
from jaxspec_checkpoints import CheckpointError, Tensor
from jaxspec_checkpoints.heads import DFLASH, EAGLE3, write_head

# Tensors that map the head's token ids to the target's: as offsets from the head's ids,
# or as the ids themselves.
_OFFSETS, _IDS = "d2t", "token_map"
# Kinds of heads that are written as the library speculators does.
_SPECULATORS = (EAGLE3, DFLASH)


def functions_of_head(config: HeadConfig) -> Any:
    """Return the network module of a kind of head; both have the same name."""
    return importlib.import_module(f"jaxspec.models.heads.{config.kind}")


def declare_head(
    config: HeadConfig, *, dtype: jnp.dtype, mesh: Mesh, mesh_axes: tuple[str, ...]
) -> Specs:
    """Return the declarations of all parameters, as these devices store them."""
    copies = 1
    if isinstance(config, LayerConfig):
        parts = num_parts(mesh, mesh_axes)
        copies = kv_copies(config.num_q_heads, config.num_kv_heads, parts)
    specs = functions_of_head(config).param_specs(config)
    return choose_forms(specs, dtype=dtype, mesh=mesh, copies=copies)


def load_head(
    folder: str | Path,
    target: ModelConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = DRAFT_MESH_AXES,
    target_name: str = "the target",
) -> tuple[HeadConfig, Params]:
    """Read the head in a folder into its shards, cast to `dtype`.

    Raises:
        ConfigError: The folder holds no head, or one for another target, or its tensors
            do not match its config.json; nothing was read then.
        NotImplementedError: A variant that the network does not compute.
    """
    config, tensors = read_head(folder)
    config, tensors = _without_pads(config, target, tensors)
    config.check_target(target, target_name)
    specs = declare_head(config, dtype=dtype, mesh=mesh, mesh_axes=mesh_axes)
    try:
        token_ids = _read_token_ids(config, tensors)
        _check_tensors(config, tensors)
        read = reader(tensors, dtype)
        return config, _make_head(specs, read, token_ids, mesh, mesh_axes)
    except CheckpointError as error:
        message = f"{folder}: {error}"
        raise ConfigError(message, parameter="model", value=str(folder)) from error


def _without_pads(
    config: HeadConfig, target: ModelConfig, tensors: dict[str, Tensor]
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Leave out rows after the target's vocabulary: see `HeadConfig.without_pads`."""
    cut = config.without_pads(target, family_of(target).layout.pad_rows)
    if cut == config:
        return config, tensors
    return cut, {
        name: tensor.head(cut.vocab_size)
        if tensor.shape[:1] == (config.vocab_size,)
        else tensor
        for name, tensor in tensors.items()
    }


def _make_head(
    specs: Specs,
    make: Make,
    token_ids: np.ndarray | None,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
) -> Params:
    """Make a tree of parameters with `make`, and the ids of a trimmed vocabulary."""
    params: Params = unflatten_dict(
        dict(make_each(specs, make, mesh=mesh, mesh_axes=mesh_axes))
    )
    if token_ids is not None:
        put_token_ids(params, token_ids, mesh)
    return params


def _read_token_ids(
    config: HeadConfig, tensors: dict[str, Tensor]
) -> np.ndarray | None:
    """Remove the table of a trimmed vocabulary from the tensors and return its ids.

    A head with the target's whole vocabulary may have a table that changes nothing.
    """
    name = _OFFSETS if config.kind in _SPECULATORS else _IDS
    table = tensors.pop(name, None)
    if table is None and not config.is_trimmed:
        return None
    if table is None:
        raise CheckpointError(
            f"the head has no tensor {name!r}, which maps its "
            f"{config.draft_vocab_size} tokens to the target's {config.vocab_size}"
        )
    if table.shape != (config.draft_vocab_size,) or table.dtype.kind != "i":
        raise CheckpointError(
            f"tensor {name!r} has type {table.dtype.name} and shape {table.shape}, "
            f"expected integers of shape {(config.draft_vocab_size,)}"
        )
    ids = table.whole().astype(np.int64)
    if name == _OFFSETS:
        ids += np.arange(len(ids))
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise CheckpointError(
            f"tensor {name!r} has token id {wrong[0]}, but ids go from 0 to "
            f"vocab_size={config.vocab_size} - 1"
        )
    if len(np.unique(ids)) < len(ids):
        raise CheckpointError(f"tensor {name!r} has a token id of the target twice")
    if config.is_trimmed:
        return ids.astype(np.int32)
    moved = np.flatnonzero(ids != np.arange(len(ids)))
    if moved.size:
        raise CheckpointError(
            f"tensor {name!r} maps token {moved[0]} to {ids[moved[0]]}, but the head "
            f"has all {config.vocab_size} tokens of the target in the target's order"
        )
    return None


def _check_tensors(config: HeadConfig, tensors: dict[str, Tensor]) -> None:
    shapes = tensor_shapes(config)
    trimmed = config.draft_vocab_size, config.target_hidden_size
    for name, tensor in tensors.items():
        if name not in shapes:
            raise CheckpointError(
                f"tensor {name!r} is not part of a {config.kind} head of these sizes "
                f"({tensor.source})"
            )
        if tensor.shape != shapes[name]:
            hint = ""
            if "lm_head" in name and shapes[name] == trimmed:
                hint = f" (a vocabulary trimmed to {config.draft_vocab_size})"
            raise CheckpointError(
                f"tensor {name!r} has shape {tensor.shape}, but config.json requires "
                f"{shapes[name]}{hint} ({tensor.source})"
            )
        if tensor.dtype.kind in "iub":
            raise CheckpointError(
                f"tensor {name!r} has type {tensor.dtype.name}, expected a float "
                f"type ({tensor.source})"
            )
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the head has no tensor {missing[0]!r}{more}: it is incomplete, fetch or "
            "export it again"
        )


def tensor_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weight tensors in a head's file, by vLLM's names."""
    return {
        name: (spec.shape[0] // len(spec.tensors), *spec.shape[1:])
        for spec in functions_of_head(config).param_specs(config).values()
        for name in spec.tensors
    }


def abstract_head(
    config: HeadConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = DRAFT_MESH_AXES,
) -> Params:
    """Return parameters' shapes and placement, to compile before they are loaded."""
    specs = declare_head(config, dtype=dtype, mesh=mesh, mesh_axes=mesh_axes)
    params = _make_head(specs, describer(dtype), None, mesh, mesh_axes)
    if config.is_trimmed:
        put_token_id_forms(params, config.draft_vocab_size, mesh)
    return params


def init_head(
    config: HeadConfig,
    *,
    seed: int,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = DRAFT_MESH_AXES,
    token_ids: np.ndarray | None = None,
) -> Params:
    """Make initial float32 parameters for training, as plain matrices.

    Matrices have a standard deviation of 1/sqrt(in). Those of Medusa's blocks are
    zeros, so that every head starts with the target's own output. Norm weights are
    neutral.

    Args:
        token_ids: The target's tokens that a trimmed vocabulary keeps.
    """
    draw, ids = _drawer(seed), None

    def make(path: ParamPath, spec: ParamSpec, sharding: NamedSharding) -> Array:
        is_shift = len(spec.shape) == 1 and path[-1] == "bias"
        if is_shift or (len(spec.shape) > 1 and path[0] == "blocks"):
            return put(np.zeros(spec.shape, np.float32), sharding)
        return put(draw(spec), sharding)

    if config.is_trimmed:
        assert token_ids is not None and token_ids.shape == (config.draft_vocab_size,)
        ids = np.sort(token_ids).astype(np.int32)
    specs = functions_of_head(config).param_specs(config)
    return _make_head(specs, make, ids, mesh, mesh_axes)


def random_head(
    config: HeadConfig,
    *,
    seed: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = DRAFT_MESH_AXES,
) -> Params:
    """Make random parameters, placed like loaded ones, for `load_format="dummy"`.

    A trimmed vocabulary keeps the first tokens.
    """
    draw, ids = _drawer(seed), None

    def make(path: ParamPath, spec: ParamSpec, sharding: NamedSharding) -> Array:
        return put(draw(spec).astype(dtype), sharding)

    if config.is_trimmed:
        ids = np.arange(config.draft_vocab_size, dtype=np.int32)
    specs = declare_head(config, dtype=dtype, mesh=mesh, mesh_axes=mesh_axes)
    return _make_head(specs, make, ids, mesh, mesh_axes)


def _drawer(seed: int) -> Callable[[ParamSpec], np.ndarray]:
    """Return a function that draws random matrices, and makes vectors of ones.

    Matrices have a standard deviation of 1/sqrt(in).
    """
    random = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        if len(spec.shape) == 1:
            return np.ones(spec.shape, np.float32)
        values = random.standard_normal(spec.shape, np.float32)
        return values / np.float32(spec.shape[1] ** 0.5)

    return draw


def save_head(
    folder: str | Path,
    config: HeadConfig,
    params: Params,
    *,
    dtype: jnp.dtype,
    target_name: str,
    architecture: str,
    is_specforge: bool = False,
) -> None:
    """Write a head of plain matrices as vLLM reads it; `load_head` reads it back.

    Args:
        is_specforge: Write an EAGLE-3 head as SpecForge does, which SGLang reads.
        target_name: Name of the target, recorded in the config.
        architecture: HuggingFace's class name of the target.

    Raises:
        CheckpointError: The folder exists already.
    """
    specs = functions_of_head(config).param_specs(config)
    arrays: dict[str, np.ndarray] = {
        name: values.astype(dtype) for name, values in tensors_of(specs, params).items()
    }
    content = config.to_file()
    if is_specforge:
        assert isinstance(config, Eagle3Config), config.kind
        content = config.to_specforge()
        arrays = {
            name.replace("layers.0.", "midlayer."): array
            for name, array in arrays.items()
        }
    elif config.kind in _SPECULATORS:
        count = config.max_draft_tokens or 3
        content["speculators_config"] = dict(
            algorithm=config.kind,
            default_proposal_method="greedy",
            proposal_methods=[dict(proposal_type="greedy", speculative_tokens=count)],
            verifier=dict(name_or_path=target_name, architectures=[architecture]),
        )
    if config.is_trimmed:
        ids = np.asarray(params[TOKEN_IDS]).astype(np.int64)
        if config.kind in _SPECULATORS:
            arrays[_OFFSETS] = ids - np.arange(len(ids))
            arrays["t2d"] = np.isin(np.arange(config.vocab_size), ids)
        else:
            arrays[_IDS] = ids
    content["torch_dtype"] = jnp.dtype(dtype).name
    write_head(folder, content, arrays)
