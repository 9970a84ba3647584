"""The number of devices that a draft model is sharded over equals hand calculations."""

import re
from typing import Any

import pytest

from jaxspec.engine.memory.device_descriptions import MEMORY_BYTES
from jaxspec.engine.memory.draft_sharding import (
    MIN_GAIN,
    MIN_PAGES,
    OTHER_SUMS,
    SPEEDS,
    DraftSharding,
    DraftSize,
    Speeds,
    choose,
    estimate,
    speeds_of,
)

US = 1e-6
V5E = speeds_of("v5e")
# A 2B draft in bfloat16 on this number of devices, with the pages of a 27B target, on a
# v5e-8.
WEIGHT_BYTES = {8: 684_679_680, 4: 1_307_533_824, 2: 2_614_583_808, 1: 5_228_683_776}
NUM_PAGES = {8: 4000, 4: 3456, 2: 1728, 1: None}


def of_2b(devices: int, speeds: Speeds | None = V5E, **changes: Any) -> DraftSize:
    assert speeds is not None
    values: dict[str, Any] = dict(
        devices=devices,
        read_bytes=WEIGHT_BYTES[devices],
        num_layers=26,
        hidden_size=2304,
        num_seqs=8,
        num_pages=NUM_PAGES[devices],
    )
    return estimate(speeds, **(values | changes))


def size(devices: int, pass_ms: float, num_pages: int | None = 100) -> DraftSize:
    read_s = 1e-3 * pass_ms
    return DraftSize(devices=devices, read_s=read_s, sum_s=0.0, num_pages=num_pages)


def test_a_pass_of_2b_on_a_v5e_8():
    count = 2 * 26 + OTHER_SUMS
    # Weights are read at 819 GB/s. An all-reduce sends 73,728 bytes: 8 rows of 2,304
    # float32 values.
    eight = of_2b(8)
    assert eight.read_s == pytest.approx(684_679_680 / 819e9)
    sent_us = 2 * 7 / 8 * 73_728 / 100e3
    assert eight.sum_s == pytest.approx(count * (5 + 8 + sent_us) * 1e-6)
    whole = of_2b(1)
    assert (whole.pass_s, whole.sum_s) == (pytest.approx(6.3842e-3, rel=1e-4), 0)
    assert eight.sum_s < of_2b(8, num_seqs=16).sum_s
    assert of_2b(8, num_seqs=16) == of_2b(8, num_seqs=256)
    chosen = choose([of_2b(devices) for devices in (8, 4, 2, 1)])
    assert (chosen.devices, chosen.reason) == (8, "the fastest by estimate")


@pytest.mark.parametrize(
    ("sizes", "devices", "reason"),
    [
        # If all sizes have enough pages, the fastest is chosen.
        ([size(8, 1), size(4, 2), size(2, 3)], 8, "the fastest"),
        ([size(8, 3), size(4, 1), size(2, 2)], 4, "the fastest"),
        ([size(8, 3), size(4, 2), size(2, 1)], 2, "the fastest"),
        # A size that is faster by less than MIN_GAIN is not chosen; by more, it is.
        ([size(8, 1), size(4, 1 - MIN_GAIN + 0.01)], 8, "no other is clearly"),
        ([size(8, 1), size(4, 1 - MIN_GAIN - 0.01)], 4, "the fastest"),
        # The fastest size leaves too few pages: the next fastest is chosen, if any has
        # enough.
        (
            [size(8, 3), size(4, 2), size(2, 1, 50)],
            4,
            "2, estimated to be faster, .* too few pages",
        ),
        (
            [size(8, 3), size(4, 2, 0), size(2, 1, None)],
            8,
            "2, estimated to be faster, .* too few",
        ),
        ([size(8, 3), size(4, 1, int(100 * MIN_PAGES))], 4, "the fastest"),
        ([size(8, 3), size(4, 1, int(100 * MIN_PAGES) - 1)], 8, "too few pages"),
        # No size fits: return the target's number of devices, for the error that
        # follows.
        ([size(8, 3, None), size(1, 1, None)], 8, "too few pages"),
    ],
)
def test_chooses_the_fastest_size_that_leaves_pages(
    sizes: list[DraftSize], devices: int, reason: str
):
    found = choose(sizes)
    assert found.devices == devices
    assert found.sizes == tuple(sizes)
    assert re.search(reason, found.reason), found.reason


def test_decision_is_described_in_one_line():
    sizes = size(2, 1.5, 3776), size(1, 6.384, None)
    made = DraftSharding(sizes=sizes, devices=2)
    assert made.line() == (
        "The draft model is spread over 2 devices, the fastest by estimate "
        "(2: 1.50 ms a pass, 3,776 pages; 1: 6.38, does not fit)"
    )
    given = DraftSharding(sizes=sizes, devices=1, is_given=True)
    assert given.line().startswith(
        "The draft model is spread over 1 device, as given (2: 1.50 ms"
    )
    values = given.as_dict()
    assert (values["devices"], values["reason"]) == (1, "as given")
    assert values["sizes"][1] == {
        "devices": 1,
        "read_s": pytest.approx(6.384e-3),
        "sum_s": 0,
        "num_pages": None,
    }


@pytest.mark.parametrize(
    ("kind", "num_devices", "expected"),
    [
        # One device needs no all-reduce, which therefore takes no time.
        ("v5e", 1, 0.0),
        # An all-reduce of 1 MB over n devices takes 5 us, plus n hops of 1 us, plus the
        # time of 2 - 2/n MB at 100 GB/s.
        ("v5e", 2, 5 + 2 + 10),
        ("v5e", 4, 5 + 4 + 15),
        ("v5e", 8, 5 + 8 + 17.5),
        ("v6e", 8, 5 + 8 + 8.75),
        # GPUs are connected by a switch, so there are no hops: 1.75 MB at 450 GB/s.
        ("h100", 8, 9 + 1.75 / 0.45),
        ("h200", 2, 9 + 1 / 0.45),
        ("b200", 8, 9 + 1.75 / 0.9),
        # Two devices share a chip: eight are on four chips, two hops apart; two need no
        # hop.
        ("v7x", 8, 5 + 4 + 8.75),
        ("v7x", 2, 5 + 5),
    ],
)
def test_all_reduce_time_has_latency_hops_and_bytes(
    kind: str, num_devices: int, expected: float
):
    speeds = speeds_of(kind)
    assert speeds is not None
    found = speeds.all_reduce_s(10**6, num_devices)
    assert found == pytest.approx(expected * US)


def test_named_devices_have_speeds():
    # No time of an all-reduce has been published for these devices.
    unknown = {"t4", "l4", "a100-40gb", "a100-80gb"}
    for name in MEMORY_BYTES:
        assert (speeds_of(name) in SPEEDS.values()) == (name not in unknown), name
    assert speeds_of("TPU v5 lite") is speeds_of("v5e")
    assert speeds_of("cpu") is None
