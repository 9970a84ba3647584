"""Start processes; their devices and ports."""

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

from tests.support.programs import ROOT, quick_environment


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository with the tests' program cache; return its output.

    Args:
        options: Arguments of `subprocess.run` that differ.
    """
    values: Any = dict(
        capture_output=True, text=True, cwd=ROOT, env=quick_environment()
    )
    return subprocess.run([sys.executable, *map(str, arguments)], **(values | options))


def environment(num_devices: int) -> dict[str, str]:
    found = quick_environment()
    flag = f"--xla_force_host_platform_device_count={num_devices}"
    kept = [
        one for one in found["XLA_FLAGS"].split() if "platform_device_count" not in one
    ]
    path = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "checkpoints"))
    return found | {"XLA_FLAGS": " ".join([*kept, flag]), "PYTHONPATH": path}


def free_port() -> int:
    """Return a free port whose next port is also free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port
