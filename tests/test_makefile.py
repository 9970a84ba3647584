"""`make test` leaves out long suites, `make test-all` runs them, and both can fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxspec.engine.arg_utils import _cache_dir
from jaxspec.engine.program_cache import MAX_BYTES

ROOT = Path(__file__).parents[1]
# A fake Python that exits with a chosen status: one for pip, one for pytest, and one
# for the long suites.
PYTHON = """#!/bin/sh
case "$*" in
  *"pip install"*)
    echo "Collecting humanize>=1 (from x)"
    echo "Installing collected packages: humanize, jax"
    exit $INSTALL ;;
  *tests.long_suites*) echo suites: "$*"; exit $SUITES ;;
  *) echo tests: "$*"; exit $TESTS ;;
esac
"""


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@pytest.fixture
def venv(tmp_path):
    """Return an environment whose Python is the script above."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / ".installed-test").touch()
    (tmp_path / ".installed-ray").touch()
    return tmp_path


def test_clean_prints_the_program_cache_folder(tmp_path, monkeypatch):
    shutil.copy(ROOT / "Makefile", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    words = ["make", "VENV=venv", "clean"]
    made = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert f"rm -r {_cache_dir('auto')}\n" in made.stdout
    assert f"at most {MAX_BYTES // 2**30} GiB" in made.stdout


@pytest.mark.parametrize("status", [0, 1])
def test_installing_shows_packages_and_fails_with_pip(venv, status):
    installed = venv / ".installed"
    words = ["make", f"VENV={venv}", str(installed)]
    environment = os.environ | {"INSTALL": str(status), "TESTS": "0"}
    made = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "\n  humanize>=1\nUnpacking 2 packages (half a minute" in made.stdout
    assert (made.returncode == 0) == installed.exists() == (status == 0), made.stderr


@pytest.mark.parametrize(
    ("target", "statuses", "runs", "is_green"),
    [
        ("test", (0, 1), ["tests"], True),
        ("test", (1, 0), ["tests"], False),
        ("test", (5, 0), ["tests"], False),  # pytest's if it collects no tests
        ("test-all", (0, 0), ["tests", "suites"], True),
        ("test-all", (1, 0), ["tests"], False),
        ("test-all", (0, 1), ["tests", "suites"], False),
        ("long-suites", (1, 0), ["suites"], True),
        ("long-suites", (0, 1), ["suites"], False),
    ],
)
def test_make_targets_run_the_right_tests(venv, target, statuses, runs, is_green):
    words = ["make", f"VENV={venv}", target, "PYTEST_ARGS=-k x"]
    names = ("TESTS", "SUITES")
    environment = os.environ | dict(zip(names, map(str, statuses), strict=True))
    made = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    calls = [line for line in made.stdout.splitlines() if ": -m " in line]
    assert [call.partition(":")[0] for call in calls] == runs, made.stderr
    assert all("-k x" in call for call in calls)
    assert ("not slow" in calls[0]) == (target == "test")
    # Suites that are not due do not run.
    assert not any("--all" in call for call in calls)
    assert (made.returncode == 0) == is_green, made.stderr
