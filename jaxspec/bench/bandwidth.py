"""Owns the speed of a device's memory, as a copy measures it, and its ridge."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Beyond every cache of a CPU; a fraction of an accelerator's memory.
COPIED_BYTES = 256 * 2**20
REPEATS = 8
# By jax's name of a device: operations/s in bfloat16 without sparsity, and bytes/s of
# its memory, as their makers state them.
PEAKS = {
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
    "TPU v5 lite": (197e12, 819e9),
    "TPU v6 lite": (918e12, 1640e9),
}


def ridge(kind: str, dtype: str) -> float | None:
    """Operations per byte from which arithmetic sets the pace; None where not known."""
    if kind not in PEAKS or dtype != "bfloat16":
        return None
    operations, num_bytes = PEAKS[kind]
    return operations / num_bytes


def copy_bandwidth(
    device: Any,
    *,
    num_bytes: int = COPIED_BYTES,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes/s read and written together, of the fastest of several copies.

    The fastest: what else a machine does can only slow a copy down.
    """
    count = num_bytes // 4
    array = jax.device_put(jnp.ones(count, jnp.float32), device)
    # In place: a CPU would spend its time on pages of new memory. And not `copy`, which
    # may do nothing.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    seconds = []
    for _ in range(repeats + 1):
        jax.block_until_ready(array)
        start = clock()
        array = jax.block_until_ready(negate(array))
        seconds.append(clock() - start)
    return 2 * 4 * count / min(seconds[1:])  # the first one is compiled
