"""Owns the form of a result: what identifies it, medians and spread, tables, files."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxspec
from jaxspec.errors import ConfigError

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
PERCENTILES = (10, 25, 50, 75, 90, 99)
# Nobody else's business, or of no meaning elsewhere.
HIDDEN = ("hf_token", "api_key", "run", "command", "output_json", "plot", "result_dir")


def header(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """What identifies a result: when, which code, which machine, all arguments."""
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return {
        "benchmark": benchmark,
        "date": now.isoformat(timespec="seconds"),
        **_commit(),
        "arguments": {
            name: _told(value)
            for name, value in vars(options).items()
            if name not in HIDDEN
        },
        "machine": _machine(),
        "versions": _versions(),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of repeats, the least and the most."""
    return {
        "median": float(np.median(values)),
        "least": float(min(values)),
        "most": float(max(values)),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles of many values; empty without any."""
    if not len(values):
        return {}
    found = {str(p): float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **found}


def forced_line(chances: Sequence[float]) -> str:
    """What a reader must know first where acceptance was given, not found."""
    told = ", ".join(f"{chance:g}" for chance in chances)
    return (
        f"ACCEPTANCE IS FORCED (synthetic): draft i stays with chance i of {told} if "
        "those before it do. Texts mean nothing."
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be: the first to the left, the others right."""
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def milliseconds(seconds: float | None) -> str:
    """For a cell of a table."""
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def check_writable(path: Path | None, flag: str) -> None:
    """Find out before an hour of measuring that nothing can be written.

    Raises:
        ConfigError: The folder is not there, or may not be written to.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{flag} must be a file in a folder that can be written to, got "
            f"{str(path)!r}.",
            parameter=flag,
            value=str(path),
        )


def write(result: dict[str, Any], path: Path | None) -> None:
    """Print a result as one line of JSON, and write the line to a file as well."""
    line = json.dumps(result, allow_nan=False)
    print(line)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")


def _told(value: Any) -> Any:
    """An argument as a result has it: folders of this machine stay out."""
    is_folder = isinstance(value, str) and value[:1] == "/" and os.path.exists(value)
    if isinstance(value, Path) or is_folder:
        return Path(value).name
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("jaxspec-decoding", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    """Processor, cores and load, which says whether the machine was quiet."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
                break
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return {
        "cpu": name,
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _commit() -> dict[str, Any]:
    """The commit of the checkout, and whether it had changes; None outside of one."""
    root = Path(jaxspec.__file__).parents[1]
    found: dict[str, Any] = {"commit": None, "has_changes": None}
    if not (root / ".git").exists():
        return found
    commands = {
        "commit": ("rev-parse", "--short=12", "HEAD"),
        "has_changes": ("status", "--porcelain", "--untracked-files=no"),
    }
    try:
        for name, command in commands.items():
            done = subprocess.run(
                ["git", "-C", str(root), *command],
                check=True,
                capture_output=True,
                text=True,
            )
            found[name] = done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "has_changes": None}
    return found | {"has_changes": bool(found["has_changes"])}
