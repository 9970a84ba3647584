"""Programs that call a server, with packages in their own environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLIENTS = Path(sys.prefix) / "clients" / "bin"

needs_clients = pytest.mark.skipif(
    not CLIENTS.exists(), reason="no .venv/clients: see `make test`"
)


def run(words: list[Any], environment: dict[str, str], limit_s: float = 120) -> str:
    """Run a program that must succeed; return its output."""
    done = subprocess.run(
        [str(word) for word in words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
