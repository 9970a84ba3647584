"""Computed times of rounds, and where drafts pay."""

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.draft_costs import DFLASH, head_config
from jaxspec.engine.arg_utils import EngineArgs
from jaxspec.engine.memory.draft_sharding import Speeds
from jaxspec.engine.memory.probe import plan_for
from jaxspec.engine.memory.round_cost import PassCost, RoundCost

# A pass of the target reads for one second; its arithmetic takes 1 ms per row.
SPEEDS = Speeds(operations=1e12, memory=1e9, link=1e9, start_s=1e-3)
TARGET = PassCost(
    weight_bytes=10**9,
    kv_bytes=10**8,
    operations=10**9,
    num_devices=1,
    num_layers=2,
    hidden_size=8,
)
LOOKUP = {"method": "suffix", "num_speculative_tokens": 4}
DRAFT = dataclasses.replace(TARGET, weight_bytes=10**8, kv_bytes=0, operations=10**8)


def cost(**changes: Any) -> RoundCost:
    values: dict[str, Any] = dict(
        speeds=SPEEDS,
        target=TARGET,
        draft=DRAFT,
        has_one_pass=False,
        max_draft_tokens=4,
        context=64,
    )
    return RoundCost(**values | changes)


def test_round_reads_weights_and_keys_and_values_of_every_pass():
    # 1 GB of weights, 0.1 GB for each sequence, and 0.1 GB for each draft pass.
    assert cost().seconds(0) == pytest.approx(1.1)
    assert cost().seconds(3) == pytest.approx(1.1 + 3 * 0.1)
    assert cost().seconds(3, num_seqs=4) == pytest.approx(1.4 + 3 * 0.1)
    assert cost(has_one_pass=True).seconds(3) == pytest.approx(1.2)
    assert cost(draft=None).seconds(3) == pytest.approx(1.1)
    assert cost().cost_ratio == pytest.approx(0.1 / 1.1)


def test_arithmetic_limits_rounds_with_many_rows():
    # 1,000 sequences of 5 rows: 5 s of arithmetic, but 101 s of reading.
    few = dataclasses.replace(TARGET, kv_bytes=0)
    assert cost(target=few, draft=None).seconds(4, 1000) == pytest.approx(5.0)
    # K = 4 has five times the rows of plain decoding, and takes five times as long.
    limited = cost(target=few, draft=None)
    assert limited.seconds(0, 1000) == pytest.approx(1.0)
    assert limited.best(0.5, 1000) == (0, 1.0)
    assert limited.break_even(1000) is None


def test_several_devices_sum_their_results():
    shared = dataclasses.replace(TARGET, num_devices=2)
    # Two sums per layer and twelve others, each of at least a millisecond and two hops.
    assert cost(target=shared, draft=None).seconds(0) > 1.1 + 16e-3


def test_best_k_and_break_even_follow_the_formula():
    found = cost()
    for k in range(5):
        tokens = sum(0.7**i for i in range(k + 1))
        expected = tokens / (1 + k * 0.1 / 1.1)
        assert found.speed_up(k, 0.7) == pytest.approx(expected)
    k, speed = found.best(0.7)
    assert speed == max(found.speed_up(k, 0.7) for k in range(5))
    assert speed == found.speed_up(k, 0.7)
    # One draft pays if it is accepted more often than it costs: 0.091.
    threshold = found.break_even()
    assert threshold is not None
    assert 0.1 / 1.1 < threshold <= 0.1 / 1.1 + 0.005
    assert "more than 10% are accepted" in found.line()
    costly = dataclasses.replace(DRAFT, weight_bytes=2 * 10**9)
    assert cost(draft=costly).break_even() is None
    assert "do not pay at any acceptance" in cost(draft=costly).line()
    assert cost(draft=costly).best(1.0) == (0, 1.0)


def planned(**changes: Any) -> RoundCost:
    """Return the costs that a plan for one v5e chip computes."""
    values = dict(model="google/gemma-3-4b-it", dtype="bfloat16", max_model_len=2048)
    found = plan_for(EngineArgs(**values | changes, max_num_seqs=1), "v5e-1").round_cost
    assert found is not None
    return found


def test_plan_counts_what_passes_read(tmp_path):
    found = planned(
        speculative_model="google/gemma-3-270m-it", num_speculative_tokens=4
    )
    # Tied embeddings are read whole; keys and values of a layer take 4,096 bytes per
    # token (plus what units of pages leave empty), and both kinds of layers of 4B see
    # all 1,024 tokens. In the draft, local layers see 512.
    assert found.target.weight_bytes == pytest.approx(2 * 3.880e9, rel=1e-3)
    assert found.target.kv_bytes == pytest.approx(34 * 4096 * 1024, rel=0.03)
    assert found.target.operations == found.target.weight_bytes
    assert found.draft is not None
    assert found.draft.weight_bytes == 2 * 268_098_176
    ratio = found.draft.weight_bytes / found.target.weight_bytes
    assert found.cost_ratio == pytest.approx(ratio, rel=0.03)
    # A DFlash drafter has no output matrix of its own: it reads the target's.
    content = json.dumps(head_config("4b", DFLASH))
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    config = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 4}
    head = planned(speculative_config=config, load_format="dummy")
    assert head.draft is not None and head.has_one_pass
    assert head.max_draft_tokens == 15
    layers = 5 * (2 * 2560 * 256 * (8 + 4) + 3 * 2560 * 10240) + 5 * 2560 * 2560
    output = 262_144 * 2560
    assert head.draft.weight_bytes == pytest.approx(2 * (layers + output), rel=1e-3)
    assert planned(speculative_config=LOOKUP).draft is None


def test_plan_without_drafts_or_known_speeds_has_no_costs():
    args = EngineArgs(model="google/gemma-3-270m-it", max_model_len=512)
    assert plan_for(args, "v5e-1").round_cost is None
    drafted = dataclasses.replace(args, speculative_config=LOOKUP)
    assert plan_for(drafted, "l4").round_cost is None
    plan = plan_for(drafted, "v5e-1")
    assert plan.round_cost is not None
    assert plan.round_cost.line() in plan.table()
    assert plan.as_dict()["round_cost"]["draft_bytes"] == 0
