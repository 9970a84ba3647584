"""The mesh, and which logical axis goes to which mesh axis: one table.

The target's tensor parallelism spans `model x replica`, the draft's only `model`, so
that a draft can have fewer shards than the target on the same devices.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.jax_settings import find_devices

MESH_AXES = ("data", "replica", "model")

# Every logical axis that is split; the others ("model") are whole on every device.
SPLIT_AXES = ("vocab", "q_head", "kv_head", "hidden")
# The draft's axis first: a device's part of the target's vocabulary then lies within
# its part of the draft's.
TARGET_MESH_AXES = ("model", "replica")
DRAFT_MESH_AXES = ("model",)


def make_mesh(
    tensor_parallel_size: int,
    draft_tensor_parallel_size: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of `tensor_parallel_size` devices, factored for the draft's shards.

    Args:
        devices: Those to take of, or what stands for them.

    Raises:
        ConfigError: there are fewer devices than that, or jax finds none.
    """
    devices = find_devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}, but {len(devices)} "
            f"{devices[0].platform} device(s) are present: lower it to at most "
            f"{len(devices)}"
        )
    chosen = np.array(devices[:tensor_parallel_size])
    draft = draft_tensor_parallel_size or tensor_parallel_size
    return Mesh(chosen.reshape(1, tensor_parallel_size // draft, draft), MESH_AXES)


def own_devices(
    devices: Sequence[Any],
    tensor_parallel_size: int,
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
) -> Sequence[Any]:
    """The devices of one of several engines: each has as many, one after the other.

    Raises:
        ConfigError: All of them together have more than there are.
    """
    if data_parallel_size == 1:
        return devices
    needed = data_parallel_size * tensor_parallel_size
    if needed > len(devices):
        raise ConfigError(
            f"data_parallel_size={data_parallel_size} engines of tensor_parallel_size="
            f"{tensor_parallel_size} need {needed} devices, and {len(devices)} "
            f"{devices[0].platform} device(s) are present: lower data_parallel_size to "
            f"at most {max(len(devices) // tensor_parallel_size, 1)}.",
            parameter="data_parallel_size",
            value=data_parallel_size,
        )
    first = data_parallel_rank * tensor_parallel_size
    return devices[first : first + tensor_parallel_size]


def num_parts(mesh: Mesh, mesh_axes: tuple[str, ...]) -> int:
    """How many devices these axes split something over."""
    return int(np.prod([mesh.shape[name] for name in mesh_axes], dtype=np.int64))


def kv_copies(num_q_heads: int, num_kv_heads: int, parts: int) -> int:
    """How often each KV head is laid out, so that every device holds those it reads.

    Where there are more devices than KV heads, a device's query heads share one, and it
    holds a copy of that one instead of all. 1 where that does not come out even.
    """
    is_even = parts % num_kv_heads == 0 and num_q_heads % parts == 0
    return parts // num_kv_heads if is_even and parts > num_kv_heads else 1


def named_sharding(
    mesh: Mesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    *,
    unit: int = 1,
    mesh_axes: tuple[str, ...] = TARGET_MESH_AXES,
) -> NamedSharding:
    """Placement of an array with these logical axes.

    An axis that the mesh does not divide is replicated.

    Args:
        unit: Elements of the split axis that stay together: head_dim for heads.
    """
    parts = num_parts(mesh, mesh_axes)
    spec = [
        mesh_axes if axis in SPLIT_AXES and size % (parts * unit) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def put(values: Any, sharding: NamedSharding) -> Any:
    """Bring host arrays to where a sharding says, those of this process alone.

    Where devices are others' too, every process has the same values and brings its own
    parts. `jax.device_put` would compare them between processes in a collective of its
    own, for each array: 3.4 ms in place of 0.1 (two processes of one CPU).

    Args:
        values: A tree of numpy's arrays.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(
        lambda value: jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index]
        ),
        values,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
