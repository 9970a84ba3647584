"""Operations in C++ under the compiler's sanitizers: addresses, undefined behaviour."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec_kernels import native

FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
FILES = ("test_decoder_blocks.py", "test_panel_matmul.py")


def found(compiler: str, name: str) -> str:
    """Where a compiler has a library; its mere name where it has none."""
    asked = [compiler, f"-print-file-name={name}"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("has_native")
@pytest.mark.skipif(sys.platform != "linux", reason="preloads Linux's library")
def test_no_case_reads_or_writes_what_is_not_its_own(tmp_path):
    compiler = native._compiler()
    # C++'s own library as well: Python is C and does not bring it, and then what XLA
    # throws is lost.
    libraries = [found(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no sanitizers")
    wrapper = tmp_path / "c++-sanitized"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {FLAGS}\n')
    wrapper.chmod(0o755)
    own = os.environ | {
        "CXX": str(wrapper),
        native.VARIABLE: str(tmp_path),
        "LD_PRELOAD": ":".join(libraries),
        # Python and XLA free little of what they hold when they end.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(here / name) for name in FILES]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
