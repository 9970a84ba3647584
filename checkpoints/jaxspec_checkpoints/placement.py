"""Moves a tensor from its file to the devices that hold its shards.

File -> blocks of rows -> cast -> one host buffer per different shard -> devices. At any
time the host holds one parameter's shards and one block, however large the model is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxspec_checkpoints.tensor import Tensor

Index = tuple[tuple[int, int], ...]  # start and stop along every axis


def place(
    parts: Sequence[Tensor],
    *,
    sharding: NamedSharding,
    dtype: np.dtype,
    block: int = 1,
    copies: int = 1,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> jax.Array:
    """Read one parameter and put every device's shard where it belongs.

    Args:
        parts: The tensors that the parameter consists of, all of one shape. Several
            tensors are fused: their rows alternate, `block` rows of each at a time.
        sharding: Which device gets which rows and columns; devices with the same
            index get copies of one buffer.
        dtype: Type to cast values to.
        block: Rows of one part that are kept together.
        copies: Number of times each block is repeated, together with those of the other
            parts: a head's keys and values, for several devices.
        on_bytes: Called with the number of bytes after each read.

    Raises:
        CheckpointError: A file is damaged.
    """
    rows, *columns = parts[0].shape
    shape = (rows * len(parts) * copies, *columns)
    # A shard is identified by its bounds: devices that hold copies share one buffer.
    owners: dict[Index, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        owners.setdefault(_bounds(index, shape), []).append(device)
    buffers = {
        index: np.empty([stop - start for start, stop in index], dtype)
        for index in owners
    }
    for place_in_block, part in enumerate(parts):
        for start, values in part.blocks():
            source = np.arange(start, start + len(values))
            for copy in range(copies):
                ids = source // block * copies + copy
                ids = (ids * len(parts) + place_in_block) * block + source % block
                for index, buffer in buffers.items():
                    _copy(values, ids, index, buffer)
            on_bytes(values.nbytes)
    # One shard at a time: the host's copy is freed before the next one is sent.
    shards = []
    for index, devices in owners.items():
        buffer = buffers.pop(index)
        shards += [jax.device_put(buffer, device) for device in devices]
        jax.block_until_ready(shards[-len(devices) :])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


def _copy(
    values: np.ndarray, ids: np.ndarray, index: Index, buffer: np.ndarray
) -> None:
    """Copy the rows that belong to one shard; `ids` are their parameter's rows."""
    (first, stop), *columns = index
    kept = slice(*np.searchsorted(ids, (first, stop)))
    if kept.start == kept.stop:
        return
    window = (kept, *(slice(*bounds) for bounds in columns))
    targets = ids[kept] - first
    if targets[-1] - targets[0] == len(targets) - 1:
        buffer[targets[0] : targets[-1] + 1] = values[window]
    else:
        buffer[targets] = values[window]
