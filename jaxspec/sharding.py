"""Owns the device mesh, and the mapping of logical axes to mesh axes.

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

# Logical axes of arrays that are split over devices. All other logical axes are
# replicated, also "model": the features, not the mesh axis of that name.
SPLIT_AXES = ("vocab", "q_head", "kv_head", "hidden")
# The draft's axis first: a device's shard of the target's vocabulary is then within its
# shard of the draft's.
TARGET_MESH_AXES = ("model", "replica")
DRAFT_MESH_AXES = ("model",)


def make_mesh(
    tensor_parallel_size: int,
    draft_tensor_parallel_size: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Make a mesh of `tensor_parallel_size` devices, factored for the draft's shards.

    Args:
        devices: Devices, or descriptions of devices, of which to use the first ones.

    Raises:
        ConfigError: There are fewer devices, or jax finds none.
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
    """Return the devices of one of several engines: consecutive groups of equal size.

    Raises:
        ConfigError: The engines need more devices than there are.
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
    """Return the number of shards along these mesh axes."""
    return int(np.prod([mesh.shape[name] for name in mesh_axes], dtype=np.int64))


def kv_copies(num_q_heads: int, num_kv_heads: int, parts: int) -> int:
    """Return the number of copies of each KV head, so that every device has its own.

    With more devices than KV heads, the query heads of a device all use the same KV
    head, so each device stores a copy of only that head. Returns 1 if the heads cannot
    be divided evenly among the devices.
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
    """Return the sharding of an array with these logical axes.

    An axis whose size is not divisible is replicated.

    Args:
        unit: Elements of a sharded axis that must not be separated: head_dim for heads.
    """
    parts = num_parts(mesh, mesh_axes)
    spec = [
        mesh_axes if axis in SPLIT_AXES and size % (parts * unit) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def put(values: Any, sharding: NamedSharding) -> Any:
    """Copy host arrays to the devices of a sharding.

    With several processes, every process has the same values and copies its own shards.
    `jax.device_put` would compare the values between processes in a collective per
    array: 3.4 ms instead of 0.1 ms (two processes on one CPU).

    Args:
        values: A pytree of numpy arrays.
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
    """Return the sharding with a full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
