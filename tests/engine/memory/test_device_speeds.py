"""How long sums over devices take, by hand."""

import pytest

from jaxspec.engine.described import MEMORY_BYTES
from jaxspec.engine.memory.device_speeds import SPEEDS, speeds_of

US = 1e-6


@pytest.mark.parametrize(
    ("kind", "num_devices", "expected"),
    [
        # Nothing to sum, and no time.
        ("v5e", 1, 0.0),
        # 5 us, 2, 4 or 8 hops of 1 us, and 2 x 7/8 of 1 MB at 100 GB/s.
        ("v5e", 2, 5 + 2 + 10),
        ("v5e", 4, 5 + 4 + 15),
        ("v5e", 8, 5 + 8 + 17.5),
        ("v6e", 8, 5 + 8 + 8.75),
        # A switch: no hops; 1.75 MB at 450 GB/s.
        ("h100", 8, 9 + 1.75 / 0.45),
        ("h200", 2, 9 + 1 / 0.45),
    ],
)
def test_a_sum_starts_hops_and_sends(kind: str, num_devices: int, expected: float):
    speeds = speeds_of(kind)
    assert speeds is not None
    found = speeds.all_reduce_s(10**6, num_devices)
    assert found == pytest.approx(expected * US)


def test_devices_that_can_be_named_have_speeds():
    # Of the others nobody has published how long sums take.
    unknown = {"t4", "l4", "a100-40gb", "a100-80gb", "b200"}
    for name in MEMORY_BYTES:
        assert (speeds_of(name) in SPEEDS.values()) == (name not in unknown), name
    assert speeds_of("TPU v5 lite") is speeds_of("v5e")
    assert speeds_of("cpu") is None
