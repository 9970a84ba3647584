"""Limits of a TPU's on-chip memories, checked before a kernel is compiled.

libtpu refuses a kernel that does not fit, but its error names neither the operation nor
the array that is too large.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# SMEM of a core; it is the same on every chip since v4 (jax's `pltpu.get_tpu_info`).
SMEM_BYTES = 2**20
# libtpu's default limit of the VMEM of one kernel, by jax's kind of the device. The
# chips have 128, 64, 128 and 64 MiB, of which XLA uses the rest.
SCOPED_VMEM_BYTES = {
    "TPU v5 lite": 16 * 2**20,
    "TPU v5": 16 * 2**20,
    "TPU v6 lite": 32 * 2**20,
    "TPU7x": 32 * 2**20,
}
# Sizes of a tile of 32-bit values in VMEM; smaller types have more rows per tile.
SUBLANES, LANES = 8, 128

# Shape, type, and number of copies of an array.
Buffer = tuple[tuple[int, ...], Any, int]


def vmem_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array in VMEM, where the last two axes fill whole tiles.

    Rows are only counted in whole tiles of 8, although smaller types may need more: the
    result is never too large.
    """
    *outer, rows, lanes = (1, 1, *shape)
    whole = -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES
    return math.prod(outer) * whole * jnp.dtype(dtype).itemsize


def check_vmem(
    operation: str, buffers: Mapping[str, Buffer], device_kind: str | None
) -> None:
    """Reject a kernel whose buffers alone exceed the limit of a device.

    Args:
        buffers: The kernel's arrays in VMEM, by name; a block that Pallas copies while
            another one is used counts twice.
        device_kind: As jax names it. Without it, or for an unknown one, nothing is
            checked.

    Raises:
        NotImplementedError: They do not fit.
    """
    limit = SCOPED_VMEM_BYTES.get(device_kind or "")
    if limit is None:
        return
    sizes = {
        name: copies * vmem_bytes(shape, dtype)
        for name, (shape, dtype, copies) in buffers.items()
    }
    total = sum(sizes.values())
    if total <= limit:
        return
    name = max(sizes, key=sizes.__getitem__)
    shape, dtype, copies = buffers[name]
    raise NotImplementedError(
        f"{operation} needs {_mib(total)} of VMEM, but a kernel on {device_kind} may "
        f"use {_mib(limit)}: {name} has shape {shape} of {jnp.dtype(dtype)} and takes "
        f"{_mib(sizes[name])} in {copies} copies"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
