"""`python -m jaxspec run-batch`: its flags and paths; see also serve/test_batch.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec import __main__ as command_line
from jaxspec.cli import run_batch
from jaxspec.serve import batch
from jaxspec.serve.flags import read_settings
from jaxspec.serve.settings import ServerSettings

LINE: dict[str, Any] = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {},
}


def test_settings_are_the_servers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    files = ["-i", "in", "-o", "out", "--model", "m"]

    def settings(*flags: str) -> ServerSettings:
        given = run_batch.make_parser("x").parse_args([*files, *flags])
        return read_settings(vars(given))

    assert settings() == ServerSettings(served_model_names=("m",))
    changed = settings("--strict-roles", "--max-request-s", "3")
    assert (changed.strict_roles, changed.max_request_s) == (True, 3.0)


def test_unusable_paths_are_refused(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(batch, "run", None)
    source, latin = tmp_path / "in.jsonl", tmp_path / "latin.jsonl"
    source.write_text(json.dumps(LINE))
    latin.write_bytes(b"\xff")
    for given, target, name in (
        (tmp_path / "none.jsonl", tmp_path / "out", "--input-file"),
        (latin, tmp_path / "out", "--input-file"),
        (source, tmp_path, "--output-file"),
        (source, tmp_path / "none" / "out", "--output-file"),
        (source, source, "would be lost"),
    ):
        files = ["-i", str(given), "-o", str(target)]
        assert command_line.main(["run-batch", *files]) == 2
        assert name in capsys.readouterr().err
    assert source.read_text()
