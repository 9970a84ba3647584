"""One program of most kinds compiles for TPU and GPU; the long suites compile all.

They compile in a separate process: see `JAXSPEC_AOT` in conftest.py.
"""

import subprocess
import sys

import pytest

from tests.kernels.aot_reports import VARIABLE
from tests.long_suites import ROOT, SUITES, compilers_environment

# Programs whose inputs have not changed since an earlier run are not compiled again.
REPORTS = ROOT / ".pytest_cache" / "aot"
FILES = sorted({file for one in SUITES if one.needs_compilers for file in one.files})


def test_examples_compile():
    words = [sys.executable, "-m", "pytest", "-q", "-m", "aot and not long_suite"]
    made = subprocess.run(
        [*words, "--durations=0", *FILES],
        cwd=ROOT,
        env=compilers_environment() | {VARIABLE: str(REPORTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(made.stdout)
    assert made.returncode == 0, made.stdout + made.stderr
    if " passed" not in made.stdout:
        pytest.skip("no compilers for TPU and GPU: make .venv/.installed-test")


def test_every_aot_file_is_listed():
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@pytest.mark.aot\n" in path.read_text(encoding="utf-8")
    ]
    assert sorted(marked) == FILES
