"""`latency`, `throughput` and `spec` on a fake device, and summaries of runs."""

import json
import re
from typing import Any

import pytest

from jaxspec.bench import spec, summary, whole
from jaxspec.bench.acceptance import Acceptance
from jaxspec.bench.measure import Measured, Run, Span
from jaxspec.bench.parts import Parts
from jaxspec.bench.spec import Cell, answer
from jaxspec.bench.whole import compared, comparison
from jaxspec.errors import ConfigError
from tests.bench.workloads import flags, line_in, use_fake_engine
from tests.support.fake_engines import assert_idle

SMALL = ("--output-len", 8, "--num-iters", 1)
DRAFTS = Acceptance(
    num_drafts=10, num_draft_tokens=30, num_accepted=15, per_position=(8, 5, 2)
)


@pytest.mark.parametrize("drafts", [0, 3])
def test_latency_measures_one_batch(drafts, monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch, num_draft_tokens=drafts)
    path = tmp_path / "out.json"
    sizes = ("--batch-size", 2, "--output-len", 12, "--num-iters", 4)
    whole.run(flags("latency", *sizes, "--output-json", path))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert_idle(opened[0])
    mode = "speculative" if drafts else "plain"
    assert found["latencies"] == found[mode]["elapsed_s"]
    assert len(found["latencies"]) == 4
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["arguments"]["batch_size"] == 2
    assert found[mode]["num_output_tokens"] == 24
    assert f"Avg latency: {found['avg_latency']} seconds" in printed
    assert re.search(r"^99% percentile latency: [\d.]+ seconds$", printed, re.M)
    assert [part["num_draft_tokens"] for part in found["parts"]] == sorted({0, drafts})
    assert ("speculative" in found) == ("speed_up" in found) == bool(drafts)
    assert found["forced_acceptance"] is None
    assert "FORCED" not in printed
    if drafts:
        assert found["is_equal"]
        assert "greedy texts: equal" in printed
        ceiling = found["ceiling"]
        assert ceiling["bytes"]["cost_ratio"] == 0.25
        # A draft takes 1 ms, a plain round 5 ms.
        assert ceiling["measured"]["cost_ratio"] == pytest.approx(0.2)
        assert len(ceiling["conditional_rates"]) == 3
        assert found["speculative"]["acceptance"]["num_drafts"] > 0
    assert "acceptance" not in found["plain"]


def test_throughput_runs_all_prompts(monkeypatch, tmp_path, capsys):
    use_fake_engine(monkeypatch)
    path = tmp_path / "out.json"
    sizes = ("--num-prompts", 7, "--output-len", 12, "--num-iters", 2)
    whole.run(flags("throughput", *sizes, "--output-json", path))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert found["num_requests"] == 7
    assert found["total_num_tokens"] == 7 * (3 + 12)
    assert found["plain"]["num_output_tokens"] == 84
    assert found["plain"]["is_full_batch"] is False
    # Without running streams, prefill is not delayed.
    assert found["speculative"]["itl_s"] == {}
    ratio = found["tokens_per_second"] / found["requests_per_second"]
    assert ratio == pytest.approx(15)
    assert found["elapsed_time"] == pytest.approx(7 / found["requests_per_second"])
    assert re.search(
        r"^Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, "
        r"[\d.]+ output tokens/s$",
        printed,
        re.MULTILINE,
    )
    assert "Total num prompt tokens:  21\n" in printed
    assert "Total num output tokens:  84\n" in printed
    # The parts are measured with the batch size of the run.
    assert {part["num_seqs"] for part in found["parts"]} == {3}


def test_sweep_measures_every_k_batch_and_temperature(monkeypatch, tmp_path, capsys):
    use_fake_engine(monkeypatch)
    path = tmp_path / "out.json"
    sweep = ("--batch-sizes", 1, 2, "--temperatures", 0, 1, "--output-json", path)
    spec.run(flags("spec", *SMALL, *sweep))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    places = [(one["temperature"], one["batch_size"]) for one in found["points"]]
    assert places == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for point in found["points"]:
        assert list(point["by_num_draft_tokens"]) == ["1", "2", "3"]
        for k, one in point["by_num_draft_tokens"].items():
            ceiling = one["ceiling"]
            assert len(ceiling["conditional_rates"]) == int(k)
            assert ceiling["measured"]["cost_ratio"] == pytest.approx(0.2)
            assert one["decode_speed_up"]["least"] <= one["decode_speed_up"]["median"]
            assert one.get("is_equal") == (True if point["temperature"] == 0 else None)
            # No round proposes more than K.
            drafted = one["acceptance"]
            most = int(k) * drafted["num_drafts"]
            assert 0 < drafted["num_draft_tokens"] <= most
        assert "acceptance" not in point["plain"]
    parts = [(part["num_seqs"], part["num_draft_tokens"]) for part in found["parts"]]
    assert parts == [(size, k) for size in (1, 2) for k in (0, 1, 2, 3)]
    assert len(found["answer"]) == 3
    assert "\n".join(found["answer"]) in printed
    assert "temperature 1, batch 2: ceiling at this acceptance, K = " in printed


def test_forced_acceptance_is_labeled_without_comparing_texts(monkeypatch, capsys):
    use_fake_engine(monkeypatch, num_draft_tokens=0)
    with pytest.raises(ConfigError, match="name no drafts"):
        spec.run(flags("spec", *SMALL))
    use_fake_engine(monkeypatch, forced_acceptance=0.5)
    sweep = ("--batch-sizes", 1, "--temperatures", 0, "--draft-tokens", 3, 1)
    (found,) = spec.run(flags("spec", *SMALL, *sweep))
    printed = capsys.readouterr().out
    with pytest.raises(ConfigError, match="--draft-tokens must be from 1 to"):
        spec.run(flags("spec", *SMALL, "--draft-tokens", 4))
    assert found["forced_acceptance"] == pytest.approx([0.5] * 3)
    by_k = found["points"][0]["by_num_draft_tokens"]
    assert list(by_k) == ["1", "3"]
    assert "is_equal" not in by_k["1"]
    assert printed.startswith("ACCEPTANCE IS FORCED (synthetic)")
    assert found["answer"][-1].startswith("ACCEPTANCE IS FORCED (synthetic)")
    (found,) = whole.run(flags("latency", *SMALL, "--batch-size", 1))
    printed = capsys.readouterr().out
    assert printed.startswith("ACCEPTANCE IS FORCED (synthetic)")
    assert "is_equal" not in found
    assert "greedy texts" not in printed


def cell(
    size: int, count: int, speed_up: float, least: float = 0, most: float = 0
) -> Cell:
    speeds = {"median": speed_up, "least": least or speed_up - 0.01}
    speeds |= {"most": most or speed_up + 0.01}
    place = dict(batch_size=size, num_draft_tokens=count, num_runs=3)
    return Cell(temperature=0.0, speed_up=speeds, acceptance_rate=0.7, **place)


@pytest.mark.parametrize(
    ("cells", "messages"),
    [
        (
            [
                *(cell(1, 2, 1.8), cell(1, 5, 2.1)),
                *(cell(4, 2, 1.3), cell(4, 5, 1.2)),
                *(cell(16, 2, 0.97), cell(16, 5, 0.8)),
            ],
            [
                "speculation pays: K = 5 at batch 1 (2.10 times plain, 2.09 to 2.11 in "
                "3 runs), K = 2 at batch 4 (1.30",
                "From batch 16 on it does not (0.97 times plain",
                "--speculative-disable-by-batch-size 4 turns it off above batch 4.",
            ],
        ),
        ([cell(1, 2, 1.5), cell(2, 2, 0.9), cell(4, 2, 1.2)], ["not at batch 2."]),
        ([cell(1, 2, 1.5), cell(4, 2, 1.2)], ["No batch was found", "up to 4."]),
        ([cell(1, 2, 0.9), cell(4, 2, 0.8)], ["does not pay at batch 1, 4; the best"]),
        # In some repeats drafts were slower than plain decoding, or the gain is too
        # small.
        ([cell(1, 2, 1.5, least=0.99)], ["do not show", "Unclear at batch 1 (1.50"]),
        ([cell(1, 1, 1.01, 1.005, 1.015)], ["does not pay at batch 1;"]),
        ([cell(1, 1, 1.02, least=1.01)], ["speculation pays: K = 1"]),
        (
            [cell(1, 2, 1.5), cell(4, 2, 1.1, 0.9, 1.3), cell(8, 2, 0.8)],
            ["Unclear at batch 4", "--speculative-disable-by-batch-size 4"],
        ),
    ],
)
def test_answer_names_what_pays(cells, messages):
    first, last = answer(cells)
    assert first.startswith("Temperature 0: ")
    for message in messages:
        assert message in first
    assert last.startswith("A K pays here when")


def run_of(elapsed_s: float, decode_s: float, *, token: int = 1, **changes: Any) -> Run:
    sizes: Any = dict(num_tokens=16, num_rounds=4, host_s=0.008, num_seqs=2)
    values: dict[str, Any] = dict(
        elapsed_s=elapsed_s,
        num_prompt_tokens=6,
        token_ids=[[token] * 10, [2] * 10],
        first_token_s=[0.1, 0.3],
        per_token_s=[0.01, 0.03],
        inter_token_s=[0.02, 0.04, 0.06],
        decode=Span(seconds=decode_s, **sizes),
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


def test_summary_has_medians_and_spread():
    found = summary.summarize(PLAIN)
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
    drafted = summary.summarize(FASTER)["acceptance"]
    assert (drafted["num_drafts"], drafted["acceptance_rate"]) == (30, 0.5)


def test_speed_ups_and_texts_are_compared_pair_by_pair():
    # Computed from the medians, speed-ups would be 2 and 2; by repeat they are 2, 2, 4
    # and 2, 3, 1.
    all_of_it = summary.speed_ups(MEASURED, "speculative", is_decode=False)
    assert all_of_it == pytest.approx({"median": 2, "least": 2, "most": 4})
    decode = summary.speed_ups(MEASURED, "speculative", is_decode=True)
    assert decode == pytest.approx({"median": 2, "least": 1, "most": 3})
    assert summary.is_equal(MEASURED, "speculative")
    other = [*FASTER[:2], run_of(1.0, 0.5, token=3)]
    joined = Measured.join(
        [
            MEASURED,
            Measured(runs={"plain": PLAIN, "speculative": other}, num_discarded=1),
        ]
    )
    assert len(joined.runs["plain"]) == 6
    assert joined.num_discarded == 3
    assert not summary.is_equal(joined, "speculative")


def parts_of(count: int) -> Parts:
    times = dict(draft_s=0.001 * count, verify_s=0.006, accept_s=0.002)
    sizes = dict(num_seqs=4, num_draft_tokens=count, num_nodes=count)
    return Parts(**times, **sizes, num_bytes=8_000_000 + count * 1_000_000)


def test_cost_of_a_draft_is_in_bytes_and_as_timed():
    parts = [parts_of(0), parts_of(2)]
    assert summary.cost_ratios(0.3, parts, 2) == pytest.approx(
        {"bytes": 0.3, "measured": 1 / 8}
    )
    assert summary.cost_ratios(0.3, [], 2) == {"bytes": 0.3}
    assert summary.cost_ratios(0.3, parts, 3) == {"bytes": 0.3}
    assert summary.cost_ratios(0.0, parts[:1], 0) == {"bytes": 0.0}


def test_ceiling_is_of_the_measured_acceptance():
    ratios, speeds = {"bytes": 0.1, "measured": 0.2}, {"median": 1.5}
    speeds |= {"least": 1.0, "most": 2.0}
    found = summary.against_ceiling(
        FASTER, num_draft_tokens=4, ratios=ratios, speed_up=speeds
    )
    assert found is not None
    # A position at which no draft was accepted has rate 0.
    assert found["conditional_rates"] == pytest.approx([0.8, 5 / 8, 2 / 5, 0])
    for name, ratio in ratios.items():  # the expected length is 2.5
        one, ceiling = found[name], (1 + 0.8 + 0.5 + 0.2) / (1 + 4 * ratio)
        assert one["cost_ratio"] == ratio
        assert one["speed_up_ceiling"] == pytest.approx(ceiling)
        shares = one["least_share"], one["share_of_ceiling"], one["most_share"]
        assert shares == pytest.approx((1 / ceiling, 1.5 / ceiling, 2 / ceiling))
    assert found["bytes"]["best_num_draft_tokens"] == 3
    nothing = summary.against_ceiling(
        PLAIN, num_draft_tokens=3, ratios=ratios, speed_up=speeds
    )
    assert nothing is None


@pytest.mark.parametrize(
    ("runs", "must_agree", "expected", "absent"),
    [
        (
            {"plain": PLAIN, "speculative": FASTER},
            True,
            [
                "speed-up by speculation: whole 2.00 (2.00 to 4.00), decoding 2.00",
                "acceptance by position, speculative: 0.800 0.500 0.200",
                "greedy texts: equal",
                "K = 3, c = 0.100 (bytes): 1.92, 104% of it reached (52% to 156% in 3 ",
            ],
            ["no drafts:"],
        ),
        ({"plain": PLAIN, "speculative": PLAIN}, True, ["no drafts:"], ["ceiling"]),
        ({"plain": PLAIN, "speculative": FASTER}, False, [], ["greedy texts"]),
        ({"plain": PLAIN}, True, [], ["speed-up", "greedy texts"]),
    ],
)
def test_comparison_reports_both_modes(runs, must_agree, expected, absent):
    measured, ratios = Measured(runs=runs, num_discarded=2), {"bytes": 0.1}
    given: Any = dict(num_draft_tokens=3, ratios=ratios, must_agree=must_agree)
    found = compared(measured, **given)
    assert found["num_discarded_runs"] == 2
    text = comparison(found, 3)
    assert text.splitlines()[0].split() == list(runs)
    assert all(message in text for message in expected), text
    assert not any(message in text for message in absent), text


def test_parts_have_times_and_bandwidth():
    device = {"copy_bytes_per_s": 2e9}
    rows = summary.parts_table(
        [parts_of(0), parts_of(2)], device, {2: 1.5}
    ).splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["0", "0.00", "6.00", "2.00", "8.00", "1.0", "50%", "1.00"],
        ["2", "2.00", "6.00", "2.00", "10.00", "1.0", "50%", "best", "1.50"],
    ]
