"""Figures of answers whose times are known, under vLLM's names."""

import pytest

from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.online.client import Answer
from jaxspec.bench.online.serve_report import Wanted, block, details, figures
from jaxspec.bench.online.traffic import Load

DRAFTS = Acceptance(
    num_drafts=10, num_draft_tokens=30, num_accepted=15, per_position=(9, 5, 1)
)
ANSWERS = [
    # 4 tokens in 2 pieces, at 0.1 and 0.4 s; 1 token at 1.2 s, from 1 s on.
    Answer(
        start_s=50.0,
        ttft_s=0.1,
        inter_token_s=[0.3],
        latency_s=0.4,
        num_prompt_tokens=10,
        num_output_tokens=4,
        text="abcd",
    ),
    Answer(
        start_s=51.0,
        ttft_s=0.2,
        latency_s=0.2,
        num_prompt_tokens=20,
        num_output_tokens=1,
        text="e",
    ),
    Answer(start_s=50.5, error="boom"),
]
ALL = Wanted(metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50.0, 99.9))


def test_figures_are_those_of_the_answers_that_came():
    found = figures(ANSWERS, 2.0, ALL, DRAFTS)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 5)
    assert found["request_throughput"] == 1
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 17.5
    assert found["mean_ttft_ms"] == pytest.approx(150)
    assert found["std_ttft_ms"] == pytest.approx(50)
    assert found["p99.9_ttft_ms"] == pytest.approx(199.9)
    # Of one token there is no TPOT: 300 ms for the three after the first.
    assert found["median_tpot_ms"] == found["p50_tpot_ms"] == pytest.approx(100)
    assert found["mean_itl_ms"] == pytest.approx(300)
    assert found["mean_e2el_ms"] == pytest.approx(300)
    assert found["max_output_tokens_per_s"] == 4
    assert found["max_concurrent_requests"] == 1
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_per_position_acceptance_rates"] == [0.9, 0.5, 0.1]
    assert "request_goodput" not in found


def test_a_block_says_that_acceptance_is_forced():
    found = figures(ANSWERS, 2.0, ALL, DRAFTS)
    assert "FORCED" not in block(found, Load(), ALL)
    told = block(found | {"forced_acceptance": [0.8, 0.5]}, Load(), ALL)
    assert "ACCEPTANCE IS FORCED (synthetic)" in told


def test_requests_at_one_time_are_counted_together():
    twice = [ANSWERS[0], ANSWERS[0], ANSWERS[1]]
    found = figures(twice, 2.0, ALL, None)
    assert found["max_output_tokens_per_s"] == 8
    assert found["max_concurrent_requests"] == 2
    assert not any(name.startswith("spec_decode") for name in found)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"ttft": 200.1}, 2),
        ({"ttft": 150.0}, 1),
        ({"tpot": 99.0}, 1),
        ({"ttft": 150.0, "tpot": 99.0}, 0),
        ({"e2el": 300.5}, 1),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits, count):
    wanted = Wanted(goodput_ms=limits)
    assert figures(ANSWERS, 2.0, wanted, None)["request_goodput"] == count / 2


def test_details_are_of_every_request():
    found = details(ANSWERS)
    assert found["output_lens"] == [4, 1, 0]
    assert found["itls"] == [[0.3], [], []]
    assert found["errors"] == ["", "", "boom"]


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.50
Benchmark duration (s):                  2.00
Total input tokens:                      30
Total generated tokens:                  5
Request throughput (req/s):              1.00
Output token throughput (tok/s):         2.50
Peak output token throughput (tok/s):    4.00
Peak concurrent requests:                1
Total token throughput (tok/s):          17.50
---------------Time to First Token----------------
Mean TTFT (ms):                          150.00
Median TTFT (ms):                        150.00
P99 TTFT (ms):                           199.00
---------------Speculative Decoding---------------
Acceptance rate (%):                     50.00
Acceptance length:                       2.50
Drafts:                                  10
Draft tokens:                            30
Accepted tokens:                         15
Per-position acceptance (%):
  Position 0:                            90.00
  Position 1:                            50.00
  Position 2:                            10.00
=================================================="""


def test_the_block_is_vllms():
    wanted = Wanted(metrics=("ttft",))
    found = figures(ANSWERS, 2.0, wanted, DRAFTS)
    load = Load(request_rate=2.5, max_concurrency=4)
    told = block(found, load, wanted)
    assert [line.rstrip() for line in told.splitlines()] == BLOCK.splitlines()
    bare = block(figures(ANSWERS, 2.0, wanted, None), Load(), wanted)
    assert "Speculative" not in bare
    assert "Maximum" not in bare
    assert "configured" not in bare
