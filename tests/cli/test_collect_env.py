"""The report for bugs has what a reader needs, and no secret."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec
from jaxspec.__main__ import main
from jaxspec.cli import collect_env
from jaxspec.cli.collect_env import HIDDEN, as_text, collect, environment
from jaxspec_kernels import native


def test_report_describes_this_machine(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path.home() / "place"))
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    assert "hf_secret" not in text and str(Path.home()) not in text
    report = json.loads(text)
    assert report["software"]["jaxspec"] == jaxspec.__version__
    assert report["software"]["Python"].startswith(platform.python_version())
    assert report["devices"]["platform"] == "cpu"
    assert report["packages"].keys() >= {"jax", "jaxlib", "llguidance", "tensorstore"}
    assert report["environment"]["HF_TOKEN"] == HIDDEN
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    assert report["environment"]["XDG_CACHE_HOME"] == os.path.join("~", "place")
    if native.is_available():
        library = native.load(native.read_setting())
        assert report["native"]["operations"] == native.instructions(library)
        assert report["native"]["library"] == "built on this machine"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("XLA_FLAGS", "--a=b", "--a=b"),
        ("VLLM_API_KEY", "k", HIDDEN),
        ("KAGGLE_API_TOKEN", "k", HIDDEN),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=k", HIDDEN),
        ("HF_ENDPOINT", "https://user:pass@host/x", "https://***@host/x"),
        ("HOME", "/home/x", None),
        ("AWS_SECRET_ACCESS_KEY", "k", None),
    ],
)
def test_variables_without_secrets(name: str, value: str, shown: str | None):
    assert dict(environment({name: value})) == ({name: shown} if shown else {})


def test_failed_search_for_devices_is_in_the_report(monkeypatch):
    monkeypatch.setattr(collect_env, "_DEVICES", "raise SystemExit('TPU in use')")
    assert "exit status 1: TPU in use" in as_text(collect())

    def wait(command, **options):
        if command[0] == sys.executable:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        raise OSError

    monkeypatch.setattr(subprocess, "run", wait)
    report = collect()
    assert report["devices"] == {"error": "jax found no devices within 120 s"}
    assert report["packages"]
