"""Tables of computed costs and of measured drafts."""

from typing import Any

from benchmarks.draft_tables import cost_table, real_drafts_table
from tests.bench.workloads import cell


def test_rows_with_equal_numbers_are_joined():
    row: dict[str, Any] = {
        "target": "4b",
        "device": "v5e-1",
        "drafter": "270m model",
        "fits": True,
        "weight_bytes": 536_000_000,
        "cost_ratio": 0.0701,
        "break_even": {"1": 0.07},
        "best": {
            n: {a: (3, 1.5) for a in ("0.5", "0.7", "0.8", "0.9")}
            for n in ("1", "8", "32")
        },
        "context": 1024,
    }
    slower = row | {"device": "v5e-4", "cost_ratio": 0.2, "break_even": {"1": None}}
    none = {"target": "4b", "device": "t4", "drafter": "DFlash", "fits": False}
    rows = [row, row | {"device": "h100"}, slower, none]
    lines = cost_table({"rows": rows, "commit": "abc"}).splitlines()
    assert lines[2].startswith(
        "| 4b | v5e-1, h100 | 270m model | 0.54 | 0.070 | 0.07 | 1.50, K = 3 |"
    )
    assert lines[3].startswith("| 4b | v5e-4 | 270m model | 0.54 | 0.200 | none |")
    assert lines[4].startswith("| 4b | t4 | DFlash | does not fit |")
    assert {line.count("|") for line in lines[:5]} == {13}


def test_measured_drafts_are_compared_with_the_goals():
    ngram: dict[str, Any] = {"name": "ngram", "num_levels": 2}
    ngram["speculative_config"] = {"method": "ngram"}
    ngram["points"] = [cell("qa", 1.3, 1.35), cell("copying", 2.6, 2.5)]
    ngram["points"] += [cell("qa", 1.3, 1.3, batch_size=4)]
    head: dict[str, Any] = {"name": "head", "num_levels": 4}
    head["speculative_config"] = {"method": "eagle3", "model": "head"}
    head["points"] = [cell("qa", 0.96, 1.2), cell("copying", 0.98, 1.1)]
    head["points"] += [cell("qa", 1.3, 1.5, batch_size=4)]
    machine = {"cpu": "a CPU", "cores": 2, "load_average": [0.5]}
    found = real_drafts_table(
        {
            "methods": [ngram, head],
            "arguments": {"num_prompts": 3, "output_len": 48},
            "machine": machine,
            "runs": [{"machine": machine, "commit": "abc"}],
            "device": {"dtype": "bfloat16"},
            "versions": {"jax": "0"},
            "date": "2026-11-28T00:00:00",
        }
    )
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
