"""The benchmark of full-size models, run with tiny ones: every part of it works."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import by_kernel, h200
from benchmarks.step_times import Setting

QUICK = ["--dry-run", "--batches", "1", "--num-drafts", "1", "--acceptances", "0"]


def options_of(*more: str) -> argparse.Namespace:
    return h200.make_parser().parse_args([*QUICK, *more])


@pytest.mark.slow
def test_a_pair_is_measured_in_all_ways():
    rows = list(h200.run_part("9b-2b", options_of("--context", "16")))
    by_kind = {}
    for row in rows:
        json.dumps(row)
        by_kind.setdefault(row["what"], []).append(row)
    assert list(by_kind) == ["copy", "plain", "verify", "round", "profile"]
    plain = {row["model"]: row for row in by_kind["plain"]}
    assert plain.keys() == {"9b", "2b"}
    assert plain["9b"]["bytes_read"] == plain["2b"]["bytes_read"] > 64 * 512 * 2
    assert all(row["share_of_bandwidth"] > 0 for row in plain.values())
    (verify,) = by_kind["verify"]
    assert verify["verify_over_plain"] > 0
    forced, real = by_kind["round"]
    assert (forced["acceptance"], real["acceptance"]) == ("synthetic", "standard")
    # 3 steps of a draft, twice. Random models with tied embeddings repeat their last
    # token, so that a real rule keeps their drafts; a forced chance of 0 keeps none.
    assert (forced["drafted"], forced["accepted"]) == (6, 0)
    assert forced["tokens_per_round"] == 1
    assert forced["ceiling"] < 1
    assert real["tokens_per_round"] > 1.5
    (profile,) = by_kind["profile"]
    assert profile["num_rounds"] == 6
    assert profile["device_s"] > 0
    assert sum(one["share"] for one in profile["kernels"]) <= 1.001


def test_ceiling_of_a_draft_that_costs_nothing():
    assert h200.ceiling(0.5, 2, 0.0) == 1.75
    assert h200.ceiling(0.5, 2, 0.25) == 1.75 / 1.5
    assert h200.ceiling(1.0, 4, 0.0) == 5


def test_full_shapes_are_the_published_ones():
    options = h200.make_parser().parse_args([])
    assert h200.config_of("27b", options)["hidden_size"] == 4608
    assert h200.setting_of(options).context == 1024
    assert h200.config_of("27b", options_of())["hidden_size"] == 64
    pool = Setting(context=100, steps=10).pool(8, 512, 4)
    # Pages for the context and five tokens of every step, and of one more.
    assert pool.max_model_len >= 100 + 11 * 5
    assert pool.num_pages == 8 * pool.table_len


def test_what_was_measured_is_kept_when_a_part_fails(tmp_path, monkeypatch):
    output = tmp_path / "result.json"
    seen = []

    def child(name, seconds, arguments):
        del arguments
        yield {"what": "first"}
        seen.append((name, seconds, len(json.loads(output.read_text())["rows"])))
        yield {"what": "ended early", "code": 1}

    monkeypatch.setattr(h200, "run_child", child)
    more = ["--parts", "27b-2b", "hf-2b", "--seconds", "100", "--output", str(output)]
    h200.main([*QUICK, *more])
    result = json.loads(output.read_text())
    found = [(row["part"], row["what"]) for row in result["rows"]]
    assert found == [
        ("27b-2b", "first"),
        ("27b-2b", "ended early"),
        ("hf-2b", "first"),
        ("hf-2b", "ended early"),
    ]
    assert [name for name, _, _ in seen] == ["27b-2b", "hf-2b"]
    assert [count for _, _, count in seen] == [1, 3]
    assert all(0 < seconds <= 100 for _, seconds, _ in seen)
    assert result["is_dry_run"] is True
    assert "--parts 27b-2b" in result["command"]
    h200.main([*QUICK, *more[:-4], "--seconds", "0", "--output", str(output)])
    left = [row["what"] for row in json.loads(output.read_text())["rows"]]
    assert left == ["left out: no time"] * 2


def test_a_process_that_takes_too_long_is_killed(monkeypatch, tmp_path: Path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho '{\"what\": 1}'\necho not json\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(h200.sys, "executable", str(script))
    first, last = h200.run_child("9b-2b", 1.0, [])
    assert first == {"what": 1}
    assert last["what"] == "ended early"
    assert last["code"] < 0
    assert last["after_s"] < 30


def test_kernels_are_summed_up():
    found = by_kernel.summarise([("a", 1.0), ("b", 2.5), ("a", 0.5)])
    assert found["device_s"] == 4.0
    assert found["kernels"] == [
        {"name": "b", "calls": 1, "seconds": 2.5, "share": 0.625},
        {"name": "a", "calls": 2, "seconds": 1.5, "share": 0.375},
    ]


@pytest.mark.slow
def test_huggingface_beside_it():
    rows = list(h200.run_part("hf-2b", options_of("--context", "16")))
    assert [row["is_compiled"] for row in rows] == [False, True]
    # A long text less a short one: with tiny shapes the clock's noise may be more.
    for row in rows:
        assert row["step_us"]["least"] <= row["step_us"]["median"] < 1e6
