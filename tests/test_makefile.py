"""`make test` is two runs of pytest, and fails as they do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What stands in for pytest ends as it is told: the second run leaves files out.
PYTHON = """#!/bin/sh
case "$*" in
  *--ignore=*) echo other: "$*"; exit $OTHER ;;
  *) echo aot: "$*"; exit $AOT ;;
esac
"""


@pytest.fixture
def venv(tmp_path):
    """An environment whose Python is the script above."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / ".installed-test").touch()
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("target", ["test", "test-fast"])
@pytest.mark.parametrize(
    ("aot", "other", "runs", "is_green"),
    [
        (0, 0, 2, True),
        (5, 0, 2, True),  # 5: nothing collected
        (0, 5, 2, True),
        (5, 5, 2, False),
        (1, 0, 1, False),
        (0, 1, 2, False),
        (5, 2, 2, False),
        (2, 5, 1, False),
    ],
)
def test_status_of_both_runs(venv, target, *, aot, other, runs, is_green):
    words = ["make", f"VENV={venv}", target, "PYTEST_ARGS=-k x"]
    environment = os.environ | {"AOT": str(aot), "OTHER": str(other)}
    made = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = made.stdout.splitlines()
    calls = [line for line in lines if line.startswith(("aot:", "other:"))]
    assert len(calls) == runs
    assert all("-k x" in call for call in calls)
    assert all(("-m not slow" in call) == (target == "test-fast") for call in calls)
    assert (made.returncode == 0) == is_green, made.stderr
