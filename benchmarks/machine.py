"""Writes results, with what they were measured on: processor, versions, commit."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers")
WIDE_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Processor, cores and load; the load says whether the machine was quiet."""
    model, features = platform.processor() or platform.machine(), []
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines: dict[str, str] = {}
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            lines[name.strip()] = value.strip()
        model = lines.get("model name", model)
        flags = lines.get("flags", lines.get("Features", "")).split()
        features = [name for name in WIDE_FEATURES if name in flags]
    return {
        "cpu": model,
        "cpu_features": features,
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of every package that took part."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = ROOT) -> dict[str, Any]:
    """The commit of a checkout, and whether files differed from it."""
    status = "status", "--porcelain", "--untracked-files=no"
    try:
        return {
            "commit": _git(checkout, "rev-parse", "--short=12", "HEAD"),
            "has_changes": bool(_git(checkout, *status)),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "has_changes": None}


def record(
    found: dict[str, Any], path: Path, *, command: str, checkout: Path = ROOT
) -> dict[str, Any]:
    """Write what was found, and how and on what; return all of it.

    Args:
        command: Finds it again.
        checkout: What was measured.
    """
    result = found | {
        "command": command,
        "machine": describe_machine(),
        "versions": versions(),
        **commit(checkout),
    }
    write_json(result, path)
    return result


def write_json(result: dict[str, Any], path: Path) -> None:
    """At once: whoever stops this leaves the old text or the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    half.replace(path)


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
