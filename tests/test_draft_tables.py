"""What drafts cost and need: tables of computed costs, measurements and training."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training
from benchmarks.draft_costs import TRAINED_DEVICES, acceptance_for, needed_acceptance
from benchmarks.draft_tables import REAL_DRAFTS_FILE, cost_table, real_drafts_table
from tests.bench.workloads import cell

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_costs_name_drafts_that_never_pay_or_do_not_fit():
    """The rest of the table is that of the committed result, in docs/drafts.md."""
    never = dict.fromkeys(("0.5", "0.7", "0.8", "0.9"), (0, 1.0))
    slow: dict[str, Any] = {
        "target": "4b",
        "device": "v5e-4",
        "drafter": "270m model",
        "fits": True,
        "weight_bytes": 536_000_000,
        "cost_ratio": 0.2,
        "break_even": {"1": None},
        "best": dict.fromkeys(("1", "8", "32"), never),
        "context": 1024,
    }
    large = {"target": "4b", "device": "t4", "drafter": "DFlash", "fits": False}
    lines = cost_table({"rows": [slow, large], "commit": "abc"}).splitlines()
    assert lines[2].startswith(
        "| 4b | v5e-4 | 270m model | 0.54 | 0.200 | none | 1.00 |"
    )
    assert lines[3].startswith("| 4b | t4 | DFlash | does not fit |")
    assert {line.count("|") for line in lines[:4]} == {13}


def test_measured_drafts_are_compared_with_the_goals():
    ngram: dict[str, Any] = {"name": "ngram", "num_levels": 2}
    ngram["speculative_config"] = {"method": "ngram"}
    ngram["points"] = [cell("qa", 1.3, 1.35), cell("copying", 2.6, 2.5)]
    ngram["points"] += [cell("qa", 1.3, 1.3, batch_size=4)]
    head: dict[str, Any] = {"name": "head", "num_levels": 4}
    head["speculative_config"] = {"method": "eagle3", "model": "head"}
    head["points"] = [cell("qa", 0.96, 1.2), cell("copying", 0.98, 1.1)]
    head["points"] += [cell("qa", 1.3, 1.5, batch_size=4)]
    measured = json.loads((RESULTS / REAL_DRAFTS_FILE).read_text())
    found = real_drafts_table(measured | {"methods": [ngram, head]})
    assert "| qa | 0 | 1 | 1.30 (1.35) | 0.96 (1.20) | 1.35, missed: 1.4 |" in found
    assert "| copying | 0 | 1 | 2.60 (2.50) | 0.98 (1.10) | 2.60, met: 2.5 |" in found
    assert "| qa | 0 | 4 | 1.30 (1.30) | 1.30 (1.50) | 1.50 |" in found
    assert "best fixed K of 0, 1, 2 and 4;" in found
    assert "fixed K of the best method in 1 of 3 cells." in found
    assert "0.97 of plain decoding in 1 of 6 cells." in found
    assert "\n- head, qa, temperature 0, batch 4: 0.87\n" in found
    assert "\n- head, qa, temperature 0, batch 1: 0.96\n" in found
    # Round times are the lookup's, whose largest K is 2. A round with K = 2 takes 1.25
    # plain rounds: 1.4 times that many tokens are needed, the number that acceptance
    # 0.5 gives: 1 + 0.5 + 0.25.
    assert "| a lookup | 0.000 | " in found
    assert "1.75 tokens, acceptance 0.50 |" in found


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


def test_even_acceptance_yields_the_same_tokens_per_round():
    entry = {"sampled": [0.5, 0.4, 0.25]}
    assert training.tokens_per_round(entry) == pytest.approx(1 + 0.5 + 0.2 + 0.05)
    rate = training.even_acceptance(entry)
    assert rate + rate**2 + rate**3 == pytest.approx(0.75)
    for num_drafts in (1, 2, 5):
        same = {"sampled": [0.3] * num_drafts}
        assert training.even_acceptance(same) == pytest.approx(0.3)


def test_fit_says_how_much_text_an_acceptance_needs():
    points = [(tokens, 0.05 * math.log2(tokens / 1000)) for tokens in (2000, 8000)]
    rise, start = training.fit_curve(points)
    assert rise == pytest.approx(0.05)
    assert start + rise * math.log2(4000) == pytest.approx(0.1)
    assert training.tokens_for(points, 0.2) == pytest.approx(16_000)
    flat = [(2000, 0.3), (8000, 0.3)]
    falling = [(2000, 0.3), (8000, 0.2)]
    assert training.tokens_for(flat, 0.4) is training.tokens_for(falling, 0.4) is None


def test_table_has_the_last_step_of_all_texts():
    def run(num_tokens: int, *rates: float) -> dict[str, object]:
        log = [
            {"step": 10 * i, "loss": 1.0, "held_out_loss": 2.0, "sampled": [rate]}
            for i, rate in enumerate(rates)
        ]
        texts = {"num_tokens": num_tokens, "num_rows": num_tokens // 200}
        return {"name": "head", "settings": {"rows": 4}, "texts": texts, "log": log}

    speeds = [1 + i / 100 for i in range(101)]
    needed = {"name": "head", "acceptance": {"1.4": 0.4}, "speed_ups": speeds}
    result = {
        "by_text": [run(4000, 0.9, 0.3, 0.9), run(2000, 0.9, 0.2)],
        "needed": {"rows": [needed]},
    }
    rows = [
        line for line in training.text_table(result).splitlines() if "| head |" in line
    ]
    assert rows == [
        "| head | 2,000 | 10 | 4.0 | 1.00 | 2.00 | 0.200 | 0.200 | 1.20 |",
        "| head | 4,000 | 10 | 2.0 | 1.00 | 2.00 | 0.300 | 0.300 | 1.30 |",
        "| head | 0.100 | 0.40 | 0.30 | 8,000 |",
    ]
