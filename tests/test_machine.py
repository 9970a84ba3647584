"""Results of benchmarks are written whole, with what they were measured on."""

import json
from pathlib import Path

import pytest

from benchmarks import machine


def test_a_result_is_recorded_with_what_it_was_measured_on(tmp_path):
    path = tmp_path / "new" / "result.json"
    result = machine.record({"found": 3}, path, command="python -m this")
    assert json.loads(path.read_text()) == result
    assert list(result)[:2] == ["found", "command"]
    assert result["command"] == "python -m this"
    assert result["machine"]["cores"] >= 1
    assert {"python", "jax"} <= result["versions"].keys()
    assert result.keys() >= {"commit", "has_changes"}
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_result_is_written_at_once(monkeypatch, tmp_path):
    path = tmp_path / "result.json"
    machine.write_json({"rows": [1]}, path)
    write_text = Path.write_text

    def write_half(path, text, **more):
        write_text(path, text[:5], **more)
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="full"):
        machine.write_json({"rows": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"rows": [1]}
