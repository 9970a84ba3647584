"""What devices do in a second, and how long a sum over several of them takes.

Owns figures that others have published: of arithmetic and memory what their makers
state, of sums what has been measured. None of them is a measurement of ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of one device.

    Attributes:
        operations: In bfloat16 without sparsity, per second.
        memory: Bytes/s of its memory.
        link: Bytes/s that it sends in a sum over devices.
        start_s: Of a sum, however little is summed.
        hop_s: What every step to a neighbour adds; 0 where a switch joins all devices.

    References:
        TPUs: docs.cloud.google.com/tpu/docs/v5e and v6e; of four ports, a chip at the
        edge of a slice has two, which send half of what both directions carry. A hop
        takes about 1 us, and a gather of three took 8 on a v5e:
        jax-ml.github.io/scaling-book/sharding. Hopper: NVLink sends 450 GB/s
        (jax-ml.github.io/scaling-book/gpus); 4 kB took 9 us over 2, 4 and 8 H100
        (github.com/sgl-project/sglang/pull/2904).
    """

    operations: float
    memory: float
    link: float
    start_s: float
    hop_s: float = 0.0

    def all_reduce_s(self, num_bytes: int, num_devices: int) -> float:
        """How long a sum of `num_bytes` over a group of devices takes.

        Numbers go to every device and back: between the corners of a slice that is two
        chips wide there are half as many hops as it has chips. Every device sends
        2 (n - 1) / n of the bytes, as in a ring.
        """
        if num_devices == 1:
            return 0.0
        hops = 2 * (num_devices // 2)
        sent = 2 * (num_devices - 1) / num_devices * num_bytes
        return self.start_s + hops * self.hop_s + sent / self.link


# By jax's name of a device.
SPEEDS = {
    "TPU v5 lite": Speeds(
        operations=197e12, memory=819e9, link=2 * 50e9, start_s=5e-6, hop_s=1e-6
    ),
    "TPU v6 lite": Speeds(
        operations=918e12, memory=1640e9, link=2 * 100e9, start_s=5e-6, hop_s=1e-6
    ),
    "NVIDIA H100 80GB HBM3": Speeds(
        operations=989e12, memory=3.35e12, link=450e9, start_s=9e-6
    ),
    "NVIDIA H200": Speeds(operations=989e12, memory=4.8e12, link=450e9, start_s=9e-6),
}
# What users call them.
_KINDS = {
    "v5e": "TPU v5 lite",
    "v6e": "TPU v6 lite",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
}


def speeds_of(kind: str) -> Speeds | None:
    """Those of a device, by jax's name or the users'; None where they are unknown."""
    return SPEEDS.get(_KINDS.get(kind, kind))
