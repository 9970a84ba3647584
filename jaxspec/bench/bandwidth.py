"""Owns the speed of a device's memory, as a copy measures it, and its ridge."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.engine.memory.draft_sharding import speeds_of
from jaxspec.jax_settings import own_settings

# Beyond every cache of a CPU; a fraction of an accelerator's memory.
COPIED_BYTES = 256 * 2**20
REPEATS = 8


def ridge(kind: str, dtype: str) -> float | None:
    """Operations per byte from which arithmetic sets the pace; None where not known."""
    speeds = speeds_of(kind)
    if speeds is None or dtype != "bfloat16":
        return None
    return speeds.operations / speeds.memory


@own_settings()
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
