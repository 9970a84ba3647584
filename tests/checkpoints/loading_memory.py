"""Loads a checkpoint onto 8 simulated devices; prints the host's peak memory.

`python loading_memory.py FOLDER`. Counts anonymous memory: pages of the mapped file
belong to the system's cache, which gives them back when memory is short.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from jaxspec.models.families import config_from_hf
from jaxspec.models.weights import load_params
from jaxspec.sharding import make_mesh
from jaxspec_checkpoints import open_checkpoint


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class Peak(threading.Thread):
    """Records the largest anonymous memory of the process while it runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.num_bytes = 0
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.is_set():
            self.num_bytes = max(self.num_bytes, anonymous_bytes())
            time.sleep(0.001)


def main(folder: str) -> None:
    mesh = make_mesh(8)
    # Do not count the memory that jax allocates at its first transfer.
    jax.block_until_ready(jax.device_put(jnp.zeros(8), mesh.devices.flat[7]))
    checkpoint = open_checkpoint(folder)
    config = config_from_hf(checkpoint.config)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    params = load_params(
        config, checkpoint.tensors, dtype=jnp.dtype(jnp.bfloat16), mesh=mesh
    )
    jax.block_until_ready(params)
    peak.is_done.set()
    peak.join()
    per_device = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            per_device[shard.device] += shard.data.nbytes
    device_bytes = sum(per_device.values())
    found = dict(
        num_devices=len(per_device),
        checkpoint_bytes=checkpoint.num_bytes,
        largest_tensor_bytes=max(t.num_bytes for t in checkpoint.tensors.values()),
        device_bytes=device_bytes,
        largest_device_bytes=max(per_device.values()),
        peak_bytes=peak.num_bytes - before,
        host_bytes=peak.num_bytes - before - device_bytes,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
