"""The header of a result, without this machine's folders and secrets."""

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.bench import report
from jaxspec.errors import ConfigError


def test_header_has_everything_but_secrets(monkeypatch, tmp_path):
    (tmp_path / "gemma").mkdir()
    options = argparse.Namespace(
        model=str(tmp_path / "gemma"),
        endpoint="/v1/completions",
        dataset_path=tmp_path / "data" / "prompts.jsonl",
        hf_token="secret",
        api_key="secret",
        request_rate=[1.0, math.inf],
        batch_size=8,
    )
    found = report.header("latency", options)
    assert found["benchmark"] == "latency"
    assert found["arguments"] == {
        "model": "gemma",
        "endpoint": "/v1/completions",
        "dataset_path": "prompts.jsonl",
        "request_rate": [1.0, "inf"],
        "batch_size": 8,
    }
    assert len(found["commit"]) == 12
    assert isinstance(found["has_changes"], bool)
    assert {"python", "jax", "numpy"} <= found["versions"].keys()
    assert found["machine"]["cores"] >= 1
    text = json.dumps(found, allow_nan=False)
    assert "secret" not in text
    assert str(tmp_path) not in text
    # There is no commit outside of a checkout.
    monkeypatch.setattr(jaxspec, "__file__", str(tmp_path / "jaxspec" / "__init__.py"))
    found = report.header("latency", argparse.Namespace())
    assert (found["commit"], found["has_changes"]) == (None, None)


def test_spread_and_percentiles_are_calculated():
    assert report.spread([3.0, 1.0, 2.0]) == {"median": 2, "least": 1, "most": 3}
    values = np.arange(101.0)
    found = report.percentiles(values.tolist())
    assert found == {"mean": 50} | {str(p): float(p) for p in (10, 25, 50, 75, 90, 99)}
    assert report.percentiles([]) == {}


def test_unwritable_file_is_reported_early(tmp_path):
    report.check_writable(tmp_path / "new.json", "--output-json")
    report.check_writable(None, "--output-json")
    for path in (tmp_path / "none" / "new.json", tmp_path):
        with pytest.raises(ConfigError, match="--output-json must be a file"):
            report.check_writable(path, "--output-json")


def test_measurements_do_not_change_the_commit(tmp_path):
    """Results that an earlier run has written are no change of the code."""
    written = ("kernels/jaxspec_kernels/tuned/a.json", "benchmarks/results/b.json")
    source = "jaxspec/bench/report.py"
    for path in (*written, source):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("before")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for line in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "a")):
        subprocess.run(["git", "-C", str(tmp_path), *line], check=True)
    clean = report.commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", clean["commit"])
    assert clean["has_changes"] is False
    for path in written:
        (tmp_path / path).write_text("after")
    assert report.commit(tmp_path) == clean
    (tmp_path / source).write_text("after")
    assert report.commit(tmp_path) == clean | {"has_changes": True}


def test_result_is_one_line_and_written_atomically(monkeypatch, tmp_path):
    path = tmp_path / "result.json"
    report.write({"a": [1, 2.5]}, path)
    assert path.read_text() == '{"a": [1, 2.5]}\n'
    with pytest.raises(ValueError, match="JSON"):
        report.write({"a": math.nan}, None)
    report.write_whole("[1]", path)
    write_text = Path.write_text

    def write_half(path, text, **more):
        write_text(path, text[:2], **more)
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="full"):
        report.write_whole("[1, 2]", path)
    assert path.read_text() == "[1]"
