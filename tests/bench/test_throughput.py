"""The subcommand over a fake device: more prompts than run at a time."""

import json
import re

import pytest

from jaxspec.bench import throughput
from tests.bench.workloads import flags, line_in, use_fake_engine


def test_all_prompts_are_run(monkeypatch, tmp_path, capsys):
    use_fake_engine(monkeypatch)
    path, drawn = tmp_path / "out.json", tmp_path / "out.svg"
    sizes = ("--num-prompts", 7, "--output-len", 12, "--num-iters", 2)
    files = ("--output-json", path, "--plot", drawn)
    throughput.run(flags("throughput", *sizes, *files))
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
