"""Results of `benchmarks.control`: ratios, tokens per second, goals, tables."""

import json
from typing import Any

import pytest

from benchmarks.control import QUICK, kept_parts, make_parser
from benchmarks.control_rows import (
    ALIKE,
    PLAIN,
    Mark,
    Round,
    by_num_drafts,
    compare,
    misses,
    of_sets,
    rates,
    settle,
)
from jaxspec.config.speculation import ADAPTIVE

SPEEDS = {
    "plain": [100.0, 50.0, 100.0],
    "0": [99.0, 50.0, 101.0],
    "5": [150.0, 80.0, 160.0],
    "adaptive": [147.0, 79.0, 150.0],
}


def test_speeds_are_compared_repeat_by_repeat():
    found = compare(SPEEDS)
    assert found["best_num_drafts"] == 5
    # In the second repeat the machine was slow for all engines, so ratios are per
    # repeat.
    assert found["adaptive_by_best"] == pytest.approx(
        {"median": 147 / 150, "least": 150 / 160, "most": 79 / 80}
    )
    assert found["adaptive_by_plain"]["median"] == 1.5
    assert found["fixed_by_plain"]["median"] == 1.6
    slow = {"plain": [10.0], "0": [9.0], "5": [5.0], "adaptive": [9.9]}
    found = compare(slow)
    assert found["best_num_drafts"] == 0
    assert found["adaptive_by_best"]["median"] == pytest.approx(1.1)
    # `fixed_by_plain` compares the largest K, not the best K, with plain decoding.
    assert found["fixed_by_plain"]["median"] == 0.5


def round_of(ts: float, k: int, seconds: float, expected_s: float | None) -> Round:
    return Round(ts, k, 1, seconds, expected_s)


ROUNDS = [
    round_of(10.05, 0, 0.004, 0.004),
    round_of(10.06, 5, 0.010, None),
    round_of(10.25, 5, 0.012, 0.010),
    round_of(10.26, 1, 0.020, 0.010),
]


def test_tokens_belong_to_the_bin_of_their_time():
    marks = [Mark(0.05, 1), Mark(0.09, 4), Mark(0.15, 5), Mark(0.41, 9)]
    assert rates(marks, 0.5, 0.1) == [40, 10, 0, 0, 40]
    # Tokens after the end of the phase do not count.
    assert rates(marks, 0.4, 0.2) == [25, 0]


def test_phase_is_settled_once_its_speed_is_nearly_final():
    level, settle_s = settle([50, 50, 50, 60, 95, 105, 100, 100, 100, 100], 0.1)
    assert level == 100
    # The bins 95, 105 and 100 are the first three whose mean is at least 90.
    assert settle_s == pytest.approx(0.4)
    assert settle([100.0] * 10, 0.1) == (100, 0)
    # A phase whose first bins are faster than its last is settled from the start.
    assert settle([300.0, 200.0, *[100.0] * 8], 0.1) == (100, 0)


def row_of(**changes: Any) -> dict[str, Any]:
    counted = {"num_probes": 3, "num_stops": 0, "by_num_drafts": by_num_drafts(ROUNDS)}
    return {"batch": 1} | compare(SPEEDS) | counted | changes


def test_sets_of_engines_are_merged_into_one_row():
    """The spread is that between sets of engines, not within a set."""

    def row(alike: float, drafts: dict[str, Any]) -> dict[str, Any]:
        speeds = {
            PLAIN: [10.0, 20.0],
            ALIKE: [10 * alike, 20 * alike],
            "0": [9.0, 18.0],
        }
        counted = {"num_probes": 2, "num_stops": 0, "saved_s": 0.0, "lost_s": 0.5}
        adaptive = {ADAPTIVE: [8.0, 16.0]}
        found = compare(speeds | adaptive) | counted | {"num_compiles": 0}
        return found | {"by_num_drafts": drafts}

    rows = [row(1.1, {"0": {"rounds": 3}}), row(0.9, {"0": {"rounds": 4}})]
    found = of_sets([*rows, row(1.0, {"5": {"rounds": 1}})])
    assert found["alike_by_plain"] == pytest.approx(
        {"median": 1.0, "least": 0.9, "most": 1.1}
    )
    assert found["fixed_by_plain"] == pytest.approx(one(0.9))
    assert found["adaptive_by_plain"] == pytest.approx(one(0.8))
    assert found["tokens_per_s"][ALIKE]["most"] == pytest.approx(16.5)
    assert (found["num_probes"], found["lost_s"]) == (6, 1.5)
    assert found["by_num_drafts"] == {"0": {"rounds": 7}, "5": {"rounds": 1}}
    assert len(found["sets"]) == 3


def one(value: float) -> dict[str, float]:
    return {"median": value, "least": value, "most": value}


def test_missed_goals_are_reported():
    def phases(plain: float) -> list[dict[str, float | None]]:
        found = [(0.9, 100.0, 3.0), (0.0, 50.0, 1.0), (0.9, 100.0, 1.1)]
        names = "acceptance", "tokens_per_s", "settle_s"
        return [
            dict(zip(names, one, strict=True)) | {"plain_tokens_per_s": plain}
            for one in [*found, (0.0, 50.0, None)]
        ]

    reached: dict[str, Any] = {
        "cells": [row_of(acceptance=0.7)],
        "free": [row_of()],
        "foreign": [row_of(domain="math", temperature=0.0)],
        # The first phase is a warm-up, which has no goal.
        "step": [{"batch": 1, "phases": phases(50.0)[:2]}],
        "short": {"by_plain": [one(0.95)], "first_by_plain": [0.95, 1.2, 1.2]},
        "ramp": {"adaptive_by_plain": 0.98},
    }
    assert not misses(reached)
    assert misses({}) == []
    slow = {"adaptive_by_plain": one(0.96), "adaptive_by_best": one(0.94)}
    missed = {
        "cells": [row_of(acceptance=0.7, **slow)],
        "free": [row_of(adaptive_by_plain=one(0.98), fixed_by_plain=one(0.98))],
        "foreign": [row_of(domain="math", temperature=1.0, **slow)],
        "step": [{"batch": 8, "phases": phases(80.0)}],
        "short": {
            "by_plain": [one(1.2), one(0.93)],
            "first_by_plain": [0.94, 1.2, 1.2],
        },
        "ramp": {"adaptive_by_plain": 0.96},
    }
    assert misses(missed) == [
        "cells, batch 1, acceptance 0.7, adaptive / plain: 0.960, goal 0.97",
        "cells, batch 1, acceptance 0.7, adaptive / K = 5: 0.940, goal 0.95",
        "math, temperature 1, adaptive / plain: 0.960, goal 0.97",
        "free, batch 1, adaptive / plain: 0.980, goal 0.99",
        "free, batch 1, K = 0 / plain: 0.980, goal 0.99",
        "step, batch 8, phase 2, settled speed / plain: 0.625, goal 0.97",
        "step, batch 8, phase 3: settles after 1.1 s, goal 1",
        "step, batch 8, phase 4: settles after None s, goal 1",
        "step, batch 8, phase 4, settled speed / plain: 0.625, goal 0.97",
        "short, slowest prompt, adaptive / plain: 0.930, goal 0.95",
        "short, first request, adaptive / plain: 0.940, goal 0.95",
        "ramp, adaptive / plain: 0.960, goal 0.97",
    ]


def test_options_of_quick_runs_exist():
    assert vars(make_parser().parse_args([])).keys() >= QUICK.keys()


def test_parts_that_are_not_measured_keep_their_results(tmp_path):
    path = tmp_path / "found.json"
    assert kept_parts(path, ["free"]) == {"measured": {}}
    about = {"cells": {"date": "earlier"}, "free": {"date": "earlier"}}
    path.write_text(json.dumps({"cells": [1], "free": [2], "measured": about}))
    kept = {"cells": [1], "measured": {"cells": {"date": "earlier"}}}
    assert kept_parts(path, ["free"]) == kept
    assert kept_parts(path, ["free", "cells"]) == {"measured": {}}
