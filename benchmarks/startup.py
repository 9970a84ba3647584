"""From the start of a process to its first token, without and with compiled programs.

Cold: the folder of compiled programs is new and empty. Warm: the one the cold run left.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "first_token.py"


def measure_startup(
    num_drafts: int,
    dtype: str,
    num_tokens: int,
    *,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Start the process twice; seconds and peak bytes of each.

    Args:
        environment: Of the process, which says whose engine is started; this one's own
            by default.
    """
    with tempfile.TemporaryDirectory() as cache:
        arguments = ["--cache", cache, "--num-tokens", str(num_tokens)]
        arguments += ["--num-speculative-tokens", str(num_drafts), "--dtype", dtype]
        environment = dict(os.environ if environment is None else environment)
        return {kind: _start(arguments, environment) for kind in ("cold", "warm")}


def _start(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    # A cache that the user has set up would make the cold start warm.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline() or "{}")
        first_token_s = time.monotonic() - start
        end = json.loads(process.stdout.readline() or "{}")
    if process.returncode or first.get("event") != "first_token":
        raise RuntimeError(f"{SCRIPT.name} ended with code {process.returncode}")
    return {
        "first_token_s": first_token_s,
        "process_s": time.monotonic() - start,
        "peak_resident_bytes": end["peak_resident_bytes"],
    }
