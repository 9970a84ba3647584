"""Resident memory of a process in which an engine compiles all its programs."""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import run_python
from tests.support.programs import ROOT

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="reads /proc and needs malloc_trim"
)

MAX_SERVER_MB = 650
# A process may grow by this share when one engine replaces another.
MAX_GROWTH = 1.1

# A script that prints the resident MB with each engine, once its programs are compiled.
ENGINES = """
import resource, sys, time
from pathlib import Path
from jaxspec import LLM, SamplingParams

page_mb = resource.getpagesize() / 2**20
for num_draft_tokens in [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]:
    draft = {
        "model": "jaxspec/tiny-gemma2-draft",
        "num_speculative_tokens": num_draft_tokens,
    }
    llm = LLM("jaxspec/tiny-gemma2", speculative_config=draft)
    llm.generate(["The fox"], SamplingParams(max_tokens=8, temperature=0))
    llm.llm_engine.wait_for_programs()
    samples = []
    for _ in range(4):  # the compiler's thread trims after the last program
        time.sleep(0.5)
        samples.append(int(Path("/proc/self/statm").read_text().split()[1]) * page_mb)
    print(min(samples))
    if sys.argv[1] == "shutdown":
        llm.llm_engine.shutdown()
    del llm
"""


def environment(cache: Path) -> dict[str, str]:
    """Return a user's environment: one device, default XLA flags, an empty cache."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.slow
def test_server_memory_after_warm_up_is_bounded(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "jaxspec.serve", "--port", "0"],
            stderr=stderr,
            cwd=ROOT,
            env=environment(tmp_path),
        )
    try:
        deadline = time.monotonic() + 600
        while "All programs were compiled" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        time.sleep(2)  # the compiler's thread trims after the last program
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.kill()
        server.wait()
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert int(kilobytes) / 1024 <= MAX_SERVER_MB


@pytest.mark.long_suite(name="memory")
@pytest.mark.parametrize("end", ["shutdown", "drop"])
def test_memory_does_not_grow_when_engines_are_replaced(tmp_path: Path, end: str):
    done = run_python("-c", ENGINES, end, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    _, second, *later = map(float, done.stdout.split())
    assert len(later) == 10
    # The first engine also filled tables that the process needs only once.
    assert max(later) <= MAX_GROWTH * second, done.stdout.split()
