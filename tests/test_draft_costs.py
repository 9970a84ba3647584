"""Acceptance that drafts need, computed from the bytes that rounds read."""

import pytest

from benchmarks.draft_costs import TRAINED_DEVICES, acceptance_for, needed_acceptance


def speed(cost: float, acceptance: float, most: int) -> tuple[int, float]:
    """Return the best K and its speed, if a draft pass costs this part of a round."""
    speeds = [
        sum(acceptance**i for i in range(k + 1)) / (1 + k * cost)
        for k in range(most + 1)
    ]
    k = max(range(most + 1), key=speeds.__getitem__)
    return k, speeds[k]


@pytest.mark.parametrize(
    ("cost", "most", "expected"),
    [
        # One draft: (1 + a) / 1.1 is 1 at 0.1, where plain decoding is as fast and K
        # is 0, and 1.4 at 0.54.
        (0.1, 1, {"1.0": 0.11, "1.4": 0.54}),
        # At acceptance 1, one draft makes 2 / 1.5 as fast.
        (0.5, 1, {"1.0": 0.51, "1.4": None}),
        (1.5, 1, {"1.0": None, "1.4": None}),
        # Free drafts: 1 / (1 - a) is 1.4 at 0.286.
        (0.0, 40, {"1.0": 0.01, "1.4": 0.29}),
    ],
)
def test_lowest_acceptance_for_a_speed_up(cost, most, expected):
    assert acceptance_for(lambda a: speed(cost, a, most)) == expected


def test_trained_drafts_need_more_acceptance_the_more_they_read():
    shared = {"draft_vocab_size": 4096}
    runs = [
        {"name": "model", "settings": {"method": "draft", "keep_layers": [0, 17]}},
        {"name": "head", "settings": {"method": "eagle3"}},
        {
            "name": "block",
            "settings": {"method": "dflash", "block_size": 4, "num_hidden_layers": 1},
        },
    ]
    for run in runs:
        run["settings"] |= shared
    rows = needed_acceptance(runs)
    names = [run["name"] for run in runs]
    assert [(row["name"], row["device"]) for row in rows] == [
        (name, device) for name in names for device in TRAINED_DEVICES
    ]
    found = {row["name"]: row for row in rows if row["device"] == TRAINED_DEVICES[0]}
    # Two layers, 640 x 2,048 feed-forward and 4 heads of 256, and 4,096 rows of output,
    # against 18 layers and 262,144 rows; keys and values are the rest.
    layer = 640 * (2 * 1024 + 2 * 256) + 3 * 640 * 2048
    ratio = (2 * layer + 4096 * 640) / 268_098_176
    assert found["model"]["cost_ratio"] == pytest.approx(ratio, rel=0.05)
    for name in ("model", "head"):
        row = found[name]
        k_and_speed = speed(row["cost_ratio"], row["acceptance"]["1.4"], 8)
        assert 1.4 <= k_and_speed[1] < 1.43
    head, block = found["head"], found["block"]
    # One pass makes all three drafts of the block.
    tokens = sum(block["acceptance"]["1.4"] ** i for i in range(4))
    assert 1.4 <= tokens / (1 + block["cost_ratio"]) < 1.43
    assert block["acceptance"]["1.4"] < head["acceptance"]["1.4"]
