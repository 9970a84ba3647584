"""Makes a network's parameters from canonical tensors: HuggingFace names, (out, in).

Loaded, random and abstract parameters all follow from `declare`. `jaxspec_checkpoints`
reads files and places each device's shard.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, UInt32
from tqdm.auto import tqdm

from jaxspec.config.model import ModelConfig
from jaxspec.models import cpu, quantized
from jaxspec.models.families import family_of
from jaxspec.models.matrices import DenseMatrix, Matrix
from jaxspec.models.network import functions_of
from jaxspec.models.params import ParamPath, Params, ParamSpec, Specs
from jaxspec.models.quantized import Quantized, scales_sharding
from jaxspec.models.stack import put, stacked_place
from jaxspec.models.trimmed import (
    put_token_id_forms,
    put_token_ids,
    trimmed_specs,
    with_kept_rows,
)
from jaxspec.sharding import TARGET_MESH_AXES, kv_copies, num_parts
from jaxspec_checkpoints import Sizes, Tensor, check_tensors
from jaxspec_checkpoints.layout import HEAD
from jaxspec_checkpoints.placement import place
from jaxspec_checkpoints.quantization import (
    QuantizedTensor,
    Scheme,
    quantize,
    shared_scheme,
)
from jaxspec_checkpoints.quantization import quantized as quantize_tensor
from jaxspec_kernels.rejection_sampling import noise

# Returns the values of one parameter, or their abstract shape.
Make = Callable[[ParamPath, ParamSpec, NamedSharding], Any]


def declare(
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
    are_bfloat16: bool | None = None,
    is_trained: bool = False,
) -> Specs:
    """Return the declarations of all parameters, as these devices store them.

    Args:
        are_bfloat16: As for `choose_forms`; None if the type in the model's files
            decides.
        is_trained: As for `choose_forms`.
    """
    parts = num_parts(mesh, mesh_axes)
    if are_bfloat16 is None:
        are_bfloat16 = config.stored_dtype == jnp.dtype(jnp.bfloat16).name
    specs = functions_of(config).param_specs(config)
    if not is_trained:
        specs = with_schemes(config, specs)
    return choose_forms(
        trimmed_specs(config, specs),
        dtype=dtype,
        mesh=mesh,
        copies=kv_copies(config.num_q_heads, config.num_kv_heads, parts),
        are_bfloat16=are_bfloat16,
        is_trained=is_trained,
    )


def with_schemes(config: ModelConfig, specs: Specs) -> Specs:
    """Return the declarations with each matrix's quantization scheme.

    Layers that share one stack of a scanned network share its scheme.
    """
    scheme = config.quantization
    if scheme is None:
        return specs
    stacks: dict[ParamPath, list[ParamPath]] = {}
    for path, spec in specs.items():
        if len(spec.shape) == 2:
            stacked = stacked_place(config, path)
            stacks.setdefault(stacked[0] if stacked else path, []).append(path)
    updated = dict(specs)
    for paths in stacks.values():
        shared = shared_scheme(
            [scheme.of_tensors(specs[path].tensors) for path in paths]
        )
        updated |= {path: replace(specs[path], scheme=shared) for path in paths}
    return updated


def choose_forms(
    specs: Specs,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    copies: int,
    are_bfloat16: bool = False,
    is_trained: bool = False,
) -> Specs:
    """Return the declarations with each parameter's storage format on these devices.

    Args:
        specs: With the schemes of quantized matrices.
        copies: Copies of every KV head.
        are_bfloat16: The values are exact in bfloat16, whatever `dtype` stores them.
        is_trained: Gradients are taken through the network.
    """
    num_bytes = sum(spec.num_values for spec in specs.values()) * dtype.itemsize
    platform, chosen = mesh.devices.flat[0].platform, Specs()
    is_cpu = platform == "cpu"
    for path, spec in specs.items():
        form: type[Matrix] = DenseMatrix
        if is_cpu:
            form = cpu.choose_form(
                dtype,
                num_devices=mesh.size,
                num_bytes=num_bytes,
                are_bfloat16=are_bfloat16,
                is_trained=is_trained,
            )
        if spec.scheme is not None:
            form = quantized.choose_form(spec.scheme, platform)
            if is_cpu:
                form = cpu.choose_quantized_form(form, num_devices=mesh.size)
        if len(spec.shape) == 2 and form.fits(spec.shape):
            spec = replace(spec, form=form)
        if spec.axes[0] == "kv_head":
            shape = spec.shape[0] * copies, *spec.shape[1:]
            spec = replace(spec, shape=shape, copies=copies)
        chosen[path] = spec
    return chosen


def load_params(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
    token_ids: Sequence[int] | None = None,
    progress: str | None = None,
    is_trained: bool = False,
) -> Params:
    """Read canonical tensors into their shards, cast to `dtype`; return the tree.

    Args:
        token_ids: The tokens that a trimmed head keeps, ascending.
        progress: Title of a progress bar; it appears on a terminal, when loading takes
            a while.
        is_trained: Gradients will be taken through the network.

    Raises:
        CheckpointError: A tensor is unknown or missing, or its shape is not the
            config's (nothing was read then), or its bytes are damaged.
    """
    specs = functions_of(config).param_specs(config)
    is_tied = all(HEAD not in spec.tensors for spec in specs.values())
    layout = family_of(config).layout
    check_tensors(layout, _sizes(config), tensors, is_tied=is_tied)
    tensors = with_kept_rows(config, specs, tensors, token_ids)
    with tqdm(
        total=sum(tensor.num_bytes for tensor in tensors.values()),
        desc=progress,
        unit="B",
        unit_scale=True,
        delay=1.0,  # none for a small model
        disable=True if progress is None else None,  # None: unless on a terminal
    ) as bar:
        params = _make_all(
            config,
            reader(tensors, dtype, on_bytes=bar.update),
            dtype=dtype,
            mesh=mesh,
            mesh_axes=mesh_axes,
            are_bfloat16=all(
                tensor.dtype == jnp.bfloat16
                for tensor in tensors.values()
                if len(tensor.shape) == 2 and not isinstance(tensor, QuantizedTensor)
            ),
            is_trained=is_trained,
        )
    if token_ids is not None:
        put_token_ids(params, token_ids, mesh)
    return params


def reader(
    tensors: Mapping[str, Tensor],
    dtype: jnp.dtype,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> Make:
    """Return a `Make` that reads parameters, cast to `dtype` or quantized."""

    def read(path: ParamPath, spec: ParamSpec, sharding: NamedSharding) -> Any:
        parts = [tensors[name] for name in spec.tensors]
        rows: Any = dict(block=spec.unit // len(spec.tensors), copies=spec.copies)
        if spec.scheme is None:
            kind = np.dtype(dtype)
            return place(
                parts, sharding=sharding, dtype=kind, on_bytes=on_bytes, **rows
            )
        quantized = [quantize_tensor(part, spec.scheme) for part in parts]
        # Read the values first: the scales of a tensor that is quantized while it is
        # read exist only after that.
        values = place(
            [one.values for one in quantized],
            sharding=sharding,
            dtype=spec.scheme.value_type,
            **rows,
        )
        scales = place(
            [one.scales for one in quantized],
            sharding=scales_sharding(sharding, quantized[0].scales.shape[1]),
            dtype=np.dtype(np.float32),
            **rows,
        )
        on_bytes(sum(part.num_bytes for part in parts))
        return Quantized(values=values, scales=scales, dtype=dtype)

    return read


def describer(dtype: jnp.dtype) -> Make:
    """Return a `Make` of shapes and placements."""

    def describe(path: ParamPath, spec: ParamSpec, sharding: NamedSharding) -> Any:
        form = partial(jax.ShapeDtypeStruct, spec.shape)
        if spec.scheme is None:
            return form(dtype, sharding=sharding)
        scales_shape = spec.scheme.scales_shape(spec.shape)
        scales = jax.ShapeDtypeStruct(
            scales_shape,
            jnp.float32,
            sharding=scales_sharding(sharding, scales_shape[1]),
        )
        values = form(spec.scheme.value_type, sharding=sharding)
        return Quantized(values=values, scales=scales, dtype=dtype)

    return describe


def make_each(
    specs: Specs, make: Make, *, mesh: Mesh, mesh_axes: tuple[str, ...]
) -> Iterator[tuple[ParamPath, Any]]:
    """Make the parameters one after the other, each as its device stores it."""
    for path, spec in specs.items():
        yield path, spec.wrap(make(path, spec, spec.sharding(mesh, mesh_axes)))


def _make_all(
    config: ModelConfig,
    make: Make,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...],
    are_bfloat16: bool | None = None,
    is_trained: bool = False,
) -> Params:
    """Make the tree of parameters, with layers separate or stacked as configured."""
    specs = declare(
        config,
        dtype=dtype,
        mesh=mesh,
        mesh_axes=mesh_axes,
        are_bfloat16=are_bfloat16,
        is_trained=is_trained,
    )
    flat: dict[ParamPath, Any] = {}
    for path, param in make_each(specs, make, mesh=mesh, mesh_axes=mesh_axes):
        stacked = stacked_place(config, path)
        if stacked is None:
            flat[path] = param
        else:
            stack, entry = stacked
            flat[stack] = put(flat.get(stack), param, entry, config.num_turns)
    return unflatten_dict(flat)


def _sizes(config: ModelConfig) -> Sizes:
    return Sizes(**{item.name: getattr(config, item.name) for item in fields(Sizes)})


def abstract_params(
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> Params:
    """Return parameters' shapes and placement, to compile before they are loaded."""
    params = _make_all(
        config, describer(dtype), dtype=dtype, mesh=mesh, mesh_axes=mesh_axes
    )
    if config.draft_vocab_size is not None:
        put_token_id_forms(params, config.draft_vocab_size, mesh)
    return params


def random_params(
    config: ModelConfig,
    *,
    seed: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
    token_ids: Sequence[int] | None = None,
) -> Params:
    """Make random parameters, placed like loaded ones, for tests and dummy weights.

    Each device makes only its own shards. The values are the same on any mesh, and
    exact in bfloat16 if the model's files are. Matrices, which are (out, in), have a
    standard deviation of 1/sqrt(in); vectors (norm weights) are zeros.

    Args:
        token_ids: As for `load_params`.
    """
    assert config.draft_vocab_size == (token_ids and len(token_ids))
    makers: dict[Any, Callable[[jax.Array], Any]] = {}
    numbers = itertools.count()

    def draw(path: ParamPath, spec: ParamSpec, sharding: NamedSharding) -> Any:
        number = next(numbers)
        if len(spec.shape) == 1:
            return jnp.zeros(spec.shape, dtype, device=sharding)
        kind = spec.shape, spec.unit, spec.copies, sharding, spec.scheme
        if kind not in makers:
            make = partial(
                _random_matrix,
                shape=spec.shape,
                dtype=dtype,
                stored=jnp.dtype(config.stored_dtype or dtype),
                block=spec.unit,
                copies=spec.copies,
            )
            placed: Any = sharding
            if spec.scheme is not None:
                make = _quantizing(make, spec.scheme)
                groups = spec.scheme.num_groups(spec.shape[1])
                placed = sharding, scales_sharding(sharding, groups)
            # Compiled, because only a compiled function allocates the shards without
            # the whole array.
            makers[kind] = jax.jit(make, out_shardings=placed)  # noqa: TID251
        key = jax.random.fold_in(jax.random.key(np.uint32(seed)), number)
        drawn = makers[kind](jax.random.key_data(key))
        if spec.scheme is None:
            return drawn
        return Quantized(values=drawn[0], scales=drawn[1], dtype=dtype)

    params = _make_all(
        config,
        draw,
        dtype=dtype,
        mesh=mesh,
        mesh_axes=mesh_axes,
    )
    if token_ids is not None:
        put_token_ids(params, token_ids, mesh)
    return params


def _quantizing(make: Callable[[Array], Array], scheme: Scheme) -> Callable[..., Any]:
    """Return `make` with its matrix quantized to values and scales."""
    return lambda words: quantize(make(words), scheme, jnp)


def _random_matrix(
    words: UInt32[Array, "2"],
    *,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    stored: jnp.dtype,
    block: int,
    copies: int,
) -> Array:
    """Make uniform values from a hash of their indices.

    XLA writes no array besides the result.

    Args:
        stored: Type that the values are rounded to.
        block: Rows that are repeated together, `copies` times.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    if copies > 1:
        row = row // (block * copies) * block + row % block
    unit = noise.uniform(words[0], words[1], row * jnp.uint32(shape[1]) + column)
    # The standard deviation of a uniform is its width over sqrt(12).
    values = (unit - 0.5) * jnp.float32((12 / shape[1]) ** 0.5)
    return values.astype(stored).astype(dtype)


def tensors_of(specs: Specs, params: Params) -> dict[str, np.ndarray]:
    """Return a tree's canonical tensors; the inverse of `load_params`.

    Args:
        params: With separate layers, in any placement that this process can read.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, spec in specs.items():
        node: Any = params
        for key in path:
            node = node[key]
        values = np.asarray(node if len(spec.shape) == 1 else node.values)
        assert spec.copies == 1, "KV heads are repeated"
        if len(spec.tensors) == 1:
            # `unit` may be that of the columns, and need not divide the rows.
            tensors[spec.tensors[0]] = np.ascontiguousarray(values)
            continue
        block = spec.unit // len(spec.tensors)
        rows = values.reshape(-1, len(spec.tensors), block, *values.shape[1:])
        for number, name in enumerate(spec.tensors):
            whole = rows[:, number].reshape(-1, *values.shape[1:])
            tensors[name] = np.ascontiguousarray(whole)
    return tensors
