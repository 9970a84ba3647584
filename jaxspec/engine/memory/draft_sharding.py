"""Chooses the number of the target's devices that share a copy of the draft model.

With many devices per copy, each reads less of the weights, but every layer ends in an
all-reduce. With few, several devices store and read the same weights. The estimate uses
published speeds of devices; none was measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Sequences of the estimated pass; larger batches have fewer drafts or none.
TYPICAL_SEQS = 16
# All-reduces of one pass, as in `benchmarks/results/aot_memory.json`: in each layer
# after attention and after the feed-forward part; one for the embedding, and eleven of
# few values to sample a token of a sharded vocabulary.
LAYER_SUMS, OTHER_SUMS = 2, 12
# Hidden rows are summed in float32.
SUM_BYTES = 4
# With fewer devices than the target's, a pass must take less time by this share, and
# this share of the pages that fit with all devices must fit: the estimate is rough, and
# fewer pages mean fewer requests.
MIN_GAIN, MIN_PAGES = 0.1, 0.9


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Published speeds of one device.

    Attributes:
        operations: bfloat16 operations per second, without sparsity.
        memory: Memory bandwidth in bytes/s.
        link: Bytes/s that it sends in an all-reduce.
        start_s: Latency of an all-reduce of any size, in seconds.
        hop_s: Additional latency per hop; 0 if a switch connects all devices.
        devices_per_chip: Devices that share a chip, and its links to other chips.

    References:
        TPUs: docs.cloud.google.com/tpu/docs/v5e, v6e and tpu7x; a chip at the edge of a
        slice has two ports (of four; of six on a TPU7x), which send half of what both
        directions carry. Of a TPU7x chip, each of two devices has half of the memory,
        bandwidth and operations; the link between them is six times as fast as a port,
        so that sums leave the chip once. A hop takes about 1 us, and a gather of three
        took 8 on a v5e: jax-ml.github.io/scaling-book/sharding. Hopper: NVLink sends
        450 GB/s (jax-ml.github.io/scaling-book/gpus); 4 kB took 9 us over 2, 4 and 8
        H100 (github.com/sgl-project/sglang/pull/2904). Blackwell: NVLink sends 900 GB/s
        and 8 TB/s are read; no latency has been published, so it is Hopper's.
    """

    operations: float
    memory: float
    link: float
    start_s: float
    hop_s: float = 0.0
    devices_per_chip: int = 1

    def all_reduce_s(self, num_bytes: int, num_devices: int) -> float:
        """Return the seconds of an all-reduce of `num_bytes`.

        Values travel to every device and back: between the corners of a slice that is
        two chips wide, n chips are n / 2 hops apart. Every device sends 2 (n - 1) / n
        of the bytes, as in a ring.
        """
        if num_devices == 1:
            return 0.0
        num_chips = -(-num_devices // self.devices_per_chip)
        hops = 2 * (num_chips // 2)
        sent = 2 * (num_devices - 1) / num_devices * num_bytes
        return self.start_s + hops * self.hop_s + sent / self.link


# By jax's `device_kind`.
SPEEDS = {
    "TPU v5 lite": Speeds(
        operations=197e12, memory=819e9, link=2 * 50e9, start_s=5e-6, hop_s=1e-6
    ),
    "TPU v6 lite": Speeds(
        operations=918e12, memory=1640e9, link=2 * 100e9, start_s=5e-6, hop_s=1e-6
    ),
    "TPU7x": Speeds(
        operations=2307e12 / 2,
        memory=7380e9 / 2,
        link=2 * 100e9,
        start_s=5e-6,
        hop_s=1e-6,
        devices_per_chip=2,
    ),
    "NVIDIA H100 80GB HBM3": Speeds(
        operations=989e12, memory=3.35e12, link=450e9, start_s=9e-6
    ),
    "NVIDIA H200": Speeds(operations=989e12, memory=4.8e12, link=450e9, start_s=9e-6),
    "NVIDIA B200": Speeds(operations=2250e12, memory=8e12, link=900e9, start_s=9e-6),
}
# Maps common names of devices to the names that jax reports.
_KINDS = {
    "v5e": "TPU v5 lite",
    "v6e": "TPU v6 lite",
    "v7x": "TPU7x",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}


def speeds_of(kind: str) -> Speeds | None:
    """Return the speeds of a device, by jax's or its common name; None if unknown."""
    return SPEEDS.get(_KINDS.get(kind, kind))


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    """Estimates if `devices` devices share a copy of the draft model.

    Attributes:
        read_s: Seconds per pass to read a device's weights.
        sum_s: Seconds per pass of all-reduces.
        num_pages: Pages that fit each device; None if the weights do not fit.
    """

    devices: int
    read_s: float
    sum_s: float
    num_pages: int | None

    @property
    def pass_s(self) -> float:
        """Seconds of one pass, which makes one draft token for every sequence."""
        return self.read_s + self.sum_s


def estimate(
    speeds: Speeds,
    *,
    devices: int,
    read_bytes: int,
    num_layers: int,
    hidden_size: int,
    num_seqs: int,
    num_pages: int | None,
) -> DraftSize:
    """Estimate a pass of a draft model that `devices` devices share.

    Args:
        read_bytes: Bytes of weights that one device reads in every pass.
        num_seqs: Size of the largest batch.
        num_pages: As in `DraftSize`.
    """
    rows = min(num_seqs, TYPICAL_SEQS)
    count = LAYER_SUMS * num_layers + OTHER_SUMS
    all_reduce_s = speeds.all_reduce_s(SUM_BYTES * rows * hidden_size, devices)
    return DraftSize(
        devices=devices,
        read_s=read_bytes / speeds.memory,
        sum_s=count * all_reduce_s,
        num_pages=num_pages,
    )


@dataclass(frozen=True, kw_only=True)
class DraftSharding:
    """The choice of the draft model's devices.

    Attributes:
        sizes: The estimates that were compared, the one with the most devices first.
        devices: The choice.
        is_given: Whether the user has set the number of devices.
    """

    sizes: tuple[DraftSize, ...]
    devices: int
    is_given: bool = False

    @property
    def reason(self) -> str:
        """Reason for the choice, in words."""
        if self.is_given:
            return "as given"
        best = min(self.sizes, key=lambda one: one.pass_s)
        if best.devices == self.devices:
            return "the fastest by estimate"
        if _has_pages(best, self.sizes[0]):
            return "as no other is clearly faster by estimate"
        return (
            f"because {best.devices}, estimated to be faster, would leave too few pages"
        )

    def line(self) -> str:
        """Describe the choice, with the times and pages that were compared."""
        parts = []
        for size in self.sizes:
            units = ("", "") if parts else (" ms a pass", " pages")
            pages = "does not fit"
            if size.num_pages is not None:
                pages = f"{size.num_pages:,}{units[1]}"
            parts.append(f"{size.devices}: {1e3 * size.pass_s:.2f}{units[0]}, {pages}")
        plural = "" if self.devices == 1 else "s"
        return (
            f"The draft model is spread over {self.devices} device{plural}, "
            f"{self.reason} ({'; '.join(parts)})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        sizes = [
            {
                "devices": size.devices,
                "read_s": size.read_s,
                "sum_s": size.sum_s,
                "num_pages": size.num_pages,
            }
            for size in self.sizes
        ]
        return {"devices": self.devices, "reason": self.reason, "sizes": sizes}


def _has_pages(size: DraftSize, largest: DraftSize) -> bool:
    if size.num_pages is None or largest.num_pages is None:
        return False
    return size.num_pages >= MIN_PAGES * largest.num_pages


def choose(sizes: Sequence[DraftSize]) -> DraftSharding:
    """Choose the fastest size that leaves enough pages.

    Args:
        sizes: The first has all of the target's devices; it is chosen unless another
            one is faster by `MIN_GAIN`.
    """
    largest = sizes[0]
    enough_s = (1 - MIN_GAIN) * largest.pass_s
    able = [
        size for size in sizes if size.pass_s <= enough_s and _has_pages(size, largest)
    ]
    chosen = min([largest, *able], key=lambda size: size.pass_s)
    return DraftSharding(sizes=tuple(sizes), devices=chosen.devices)
