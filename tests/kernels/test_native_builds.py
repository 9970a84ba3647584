"""Operations in C++ as other compilers would have them: sanitized, for less."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec_kernels import native

FILES = ("test_decoder_blocks.py", "test_panel_matmul.py")
SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("has_native"),
    pytest.mark.skipif(sys.platform != "linux", reason="wraps Linux's compiler"),
]


def found(compiler: str, name: str) -> str:
    """Where a compiler has a library; its mere name where it has none."""
    asked = [compiler, f"-print-file-name={name}"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_cases(tmp_path: Path, flags: str, **environment: str) -> None:
    """The tests of operations, of a library that is built with more flags."""
    wrapper = tmp_path / "c++-wrapped"
    wrapper.write_text(f'#!/bin/sh\nexec {native._compiler()} "$@" {flags}\n')
    wrapper.chmod(0o755)
    own = {"CXX": str(wrapper), native.VARIABLE: str(tmp_path), **environment}
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(here / name) for name in FILES]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_no_case_reads_or_writes_what_is_not_its_own(tmp_path):
    """Addresses and undefined behaviour."""
    # C++'s own library as well: Python is C and does not bring it, and then what XLA
    # throws is lost.
    names = "libasan.so", "libstdc++.so"
    libraries = [found(native._compiler(), name) for name in names]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no sanitizers")
    # Python and XLA free little of what they hold when they end.
    options = "detect_leaks=0"
    preloaded = ":".join(libraries)
    run_cases(tmp_path, SANITIZED, LD_PRELOAD=preloaded, ASAN_OPTIONS=options)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its processors")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_lesser_processors_compute_the_same(tmp_path, level):
    """With AVX2 and FMA, and with neither: vectors of eight and four floats."""
    run_cases(tmp_path, f"-march={level}")
