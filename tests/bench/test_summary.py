"""Figures of runs whose times are given."""

from typing import Any

import pytest

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Measured, Run, Span
from jaxspec.bench.parts import Parts
from jaxspec.bench.summary import (
    against_ceiling,
    compared,
    comparison,
    cost_ratios,
    is_equal,
    parts_table,
    speed_ups,
    summarise,
)

DRAFTS = Acceptance(
    num_drafts=10, num_draft_tokens=30, num_accepted=15, per_position=(8, 5, 2)
)


def run_of(elapsed_s: float, decode_s: float, *, token: int = 1, **changes: Any) -> Run:
    values: dict[str, Any] = dict(
        elapsed_s=elapsed_s,
        num_prompt_tokens=6,
        token_ids=[[token] * 10, [2] * 10],
        first_token_s=[0.1, 0.3],
        per_token_s=[0.01, 0.03],
        inter_token_s=[0.02, 0.04, 0.06],
        decode=Span(
            seconds=decode_s, num_tokens=16, num_rounds=4, host_s=0.008, num_seqs=2
        ),
        acceptance=Acceptance(),
    )
    return Run(**(values | changes))


PLAIN = [run_of(1.0, 0.8), run_of(2.0, 0.9), run_of(4.0, 0.7)]
FASTER = [
    run_of(0.5, 0.4, acceptance=DRAFTS),
    run_of(1.0, 0.3, acceptance=DRAFTS),
    run_of(1.0, 0.7, acceptance=DRAFTS),
]
MEASURED = Measured(runs={"plain": PLAIN, "speculative": FASTER}, num_discarded=2)


def test_a_mode_has_medians_and_spread():
    found = summarise(PLAIN)
    assert found["elapsed_s"] == [1, 2, 4]
    assert found["output_tokens_per_s"] == {"median": 10, "least": 5, "most": 20}
    assert found["requests_per_s"]["median"] == 1
    assert (found["num_output_tokens"], found["num_prompt_tokens"]) == (20, 6)
    assert found["ttft_s"]["50"] == pytest.approx(0.2)
    assert found["tpot_s"]["mean"] == pytest.approx(0.02)
    assert found["itl_s"]["50"] == pytest.approx(0.04)
    assert found["decode_tokens_per_s"]["median"] == pytest.approx(20)
    assert found["round_s"]["median"] == pytest.approx(0.2)
    assert found["host_s"]["median"] == pytest.approx(0.002)
    assert found["is_full_batch"] is True
    assert "acceptance" not in found
    drafted = summarise(FASTER)["acceptance"]
    assert drafted["num_drafts"] == 30
    assert drafted["acceptance_rate"] == 0.5


def test_speed_ups_are_of_runs_beside_each_other():
    # By the medians it would be 2 and 2; repeat by repeat 2, 2, 4 and 2, 3, 1.
    whole = speed_ups(MEASURED, "speculative", is_decode=False)
    assert whole == pytest.approx({"median": 2, "least": 2, "most": 4})
    decode = speed_ups(MEASURED, "speculative", is_decode=True)
    assert decode == pytest.approx({"median": 2, "least": 1, "most": 3})


def test_texts_are_compared_in_every_run():
    assert is_equal(MEASURED, "speculative")
    other = [FASTER[0], run_of(1.0, 0.5, token=3)]
    measured = Measured(runs={"plain": PLAIN, "speculative": other}, num_discarded=0)
    assert not is_equal(measured, "speculative")


BYTES = {"bytes": 0.1}


def speeds(median: float) -> dict[str, float]:
    return {"median": median, "least": median - 0.5, "most": median + 0.5}


def parts_of(count: int) -> Parts:
    return Parts(
        num_seqs=4,
        num_draft_tokens=count,
        num_nodes=count,
        draft_s=0.001 * count,
        verify_s=0.006,
        accept_s=0.002,
        num_bytes=8_000_000 + count * 1_000_000,
        num_flops=16_000_000 * (1 + count),
    )


def test_a_draft_costs_its_bytes_and_what_was_measured():
    parts = [parts_of(0), parts_of(2)]
    assert cost_ratios(0.3, parts, 2) == pytest.approx(
        {"bytes": 0.3, "measured": 1 / 8}
    )
    assert cost_ratios(0.3, [], 2) == {"bytes": 0.3}
    assert cost_ratios(0.3, parts, 3) == {"bytes": 0.3}
    assert cost_ratios(0.0, parts[:1], 0) == {"bytes": 0.0}


def test_the_ceiling_is_of_the_measured_acceptance():
    both = BYTES | {"measured": 0.2}
    found = against_ceiling(
        FASTER, num_draft_tokens=3, ratios=both, speed_up=speeds(1.5)
    )
    assert found is not None
    assert found["conditional_rates"] == pytest.approx([0.8, 5 / 8, 2 / 5])
    for name, ratio in both.items():
        one, ceiling = found[name], (1 + 0.8 + 0.5 + 0.2) / (1 + 3 * ratio)
        assert one["cost_ratio"] == ratio
        assert one["speed_up_ceiling"] == pytest.approx(ceiling)
        assert one["share_of_ceiling"] == pytest.approx(1.5 / ceiling)
        shares = one["least_share"], one["most_share"]
        assert shares == pytest.approx((1 / ceiling, 2 / ceiling))
    assert found["bytes"]["best_num_draft_tokens"] == 3
    # A position that never was kept counts as one.
    deeper = against_ceiling(
        FASTER, num_draft_tokens=4, ratios=BYTES, speed_up=speeds(1.0)
    )
    assert deeper is not None
    assert deeper["conditional_rates"][3] == 0
    nothing = against_ceiling(
        PLAIN, num_draft_tokens=3, ratios=BYTES, speed_up=speeds(1.0)
    )
    assert nothing is None


def test_a_comparison_tells_both_modes():
    found = compared(MEASURED, num_draft_tokens=3, ratios=BYTES, must_agree=True)
    assert found["num_discarded_runs"] == 2
    assert found["is_equal"]
    text = comparison(found, 3)
    lines = text.splitlines()
    assert lines[0].split() == ["plain", "speculative"]
    assert "output tokens/s" in text
    assert "speed-up by speculation: whole 2.00 (2.00 to 4.00), decoding 2.00" in text
    assert "acceptance by position, speculative: 0.800 0.500 0.200" in text
    assert "greedy texts: equal" in text
    assert (
        "K = 3, c = 0.100 (bytes): 1.92, 104% of it reached (52% to 156% in 3 " in text
    )
    assert "no drafts were made" not in text
    undrafted = Measured(runs={"plain": PLAIN, "speculative": PLAIN}, num_discarded=0)
    found = compared(undrafted, num_draft_tokens=3, ratios=BYTES, must_agree=True)
    assert "no drafts were made" in comparison(found, 3)
    sampled = compared(MEASURED, num_draft_tokens=3, ratios=BYTES, must_agree=False)
    assert "is_equal" not in sampled
    alone = Measured(runs={"plain": PLAIN}, num_discarded=0)
    found = compared(alone, num_draft_tokens=0, ratios=BYTES, must_agree=True)
    assert "speed_up" not in found
    assert "speed-up" not in comparison(found, 0)


def test_parts_are_told_with_the_speed_of_memory():
    device = {"copy_bytes_per_s": 2e9, "ridge_flops_per_byte": None}
    assert parts_table([parts_of(0), parts_of(2)], device).splitlines() == [
        "Parts of a round on the device, batch 4, ms:",
        "K  draft  verify  accept     ms  GB/s  of copy  FLOP/byte  of ridge",
        "0   0.00    6.00    2.00   8.00   1.0      50%        2.0         -",
        "2   2.00    6.00    2.00  10.00   1.0      50%        4.8         -",
    ]


def test_parts_are_told_with_the_ridge_and_the_best_k():
    device = {"copy_bytes_per_s": 2e9, "ridge_flops_per_byte": 48.0}
    parts = [parts_of(0), parts_of(2)]
    header, *rows = parts_table(parts, device, {2: 1.5}).splitlines()[1:]
    assert header.endswith("FLOP/byte  of ridge   speed-up")
    assert [row.split()[7:] for row in rows] == [
        ["2.0", "4.2%", "1.00"],
        ["4.8", "10.0%", "best", "1.50"],
    ]
    slower = parts_table(parts, device, {2: 0.9})
    assert slower.splitlines()[2].endswith("best 1.00")
