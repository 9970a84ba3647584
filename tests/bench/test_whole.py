"""The subcommands over a fake device: what they print and write."""

import json
import re

import pytest

from jaxspec.bench import whole
from jaxspec.errors import ConfigError
from tests.bench.workloads import flags, line_in, use_fake_engine
from tests.support.fake_engines import assert_idle


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_batch_is_measured(drafts, monkeypatch, tmp_path, capsys):
    opened = use_fake_engine(monkeypatch, num_draft_tokens=drafts)
    path, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    sizes = ("--batch-size", 2, "--output-len", 12, "--num-iters", 4)
    whole.run(flags("latency", *sizes, "--output-json", path, "--plot", drawn))
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
    assert ("speculative" in found) == bool(drafts)
    assert ("speed_up" in found) == bool(drafts)
    assert found["forced_acceptance"] is None
    assert "FORCED" not in printed
    if drafts:
        assert found["is_equal"]
        assert "greedy texts: equal" in printed
        ceiling = found["ceiling"]
        assert ceiling["bytes"]["cost_ratio"] == 0.25
        # A draft takes 1 ms, a plain round 5.
        assert ceiling["measured"]["cost_ratio"] == pytest.approx(0.2)
        assert len(ceiling["conditional_rates"]) == 3
        assert found["speculative"]["acceptance"]["num_drafts"] > 0
    assert "acceptance" not in found["plain"]
    assert "plot" not in found["arguments"]
    assert "One batch from start to end" in drawn.read_text(encoding="utf-8")


def test_a_batch_of_none_is_refused():
    with pytest.raises(ConfigError, match="--batch-size must be"):
        whole.run(flags("latency", "--batch-size", 0))


def test_parts_may_be_left_out(monkeypatch, capsys):
    use_fake_engine(monkeypatch)
    sizes = ("--batch-size", 1, "--output-len", 4, "--num-iters", 1)
    (found,) = whole.run(flags("latency", *sizes, "--no-parts"))
    assert "Parts of a round" not in capsys.readouterr().out
    assert found["parts"] == []


def test_forced_acceptance_is_told_and_no_text_is_compared(
    monkeypatch, tmp_path, capsys
):
    use_fake_engine(monkeypatch, forced_acceptance=0.5)
    sizes = ("--batch-size", 1, "--output-len", 8, "--num-iters", 1)
    drawn = tmp_path / "out.svg"
    (found,) = whole.run(flags("latency", *sizes, "--plot", drawn))
    printed = capsys.readouterr().out
    assert found["forced_acceptance"] == pytest.approx([0.5] * 3)
    assert printed.startswith("ACCEPTANCE IS FORCED (synthetic)")
    assert "is_equal" not in found
    assert "greedy texts" not in printed
    assert "SYNTHETIC: acceptance forced to 0.5" in drawn.read_text(encoding="utf-8")


def test_all_prompts_are_run(monkeypatch, tmp_path, capsys):
    use_fake_engine(monkeypatch)
    path, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    sizes = ("--num-prompts", 7, "--output-len", 12, "--num-iters", 2)
    files = ("--output-json", path, "--plot", drawn)
    whole.run(flags("throughput", *sizes, *files))
    printed = capsys.readouterr().out
    found = json.loads(line_in(path, printed))
    assert found["num_requests"] == 7
    assert found["total_num_tokens"] == 7 * (3 + 12)
    assert found["plain"]["num_output_tokens"] == 84
    assert found["plain"]["is_full_batch"] is False
    # Nobody reads along: prompts are not held up for streams.
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
    # Parts are of as many sequences as run at a time.
    assert {part["num_seqs"] for part in found["parts"]} == {3}
    assert "Prompts that all wait from the start" in drawn.read_text(encoding="utf-8")
