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
from jaxspec.command_line import CommandError
from jaxspec.errors import ConfigError

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
# Of a processor: they decide how fast bfloat16 is.
WIDE_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Measurements write here: a run must not change the commit of the next one.
WRITTEN = ("kernels/jaxspec_kernels/tuned", "benchmarks/results")
PERCENTILES = (10, 25, 50, 75, 90, 99)
# Nobody else's business, or of no meaning elsewhere.
HIDDEN = ("hf_token", "api_key", "run", "command", "json", "output_json", "plot")
HIDDEN += ("result_dir",)


class BenchError(CommandError):
    """What was measured means nothing, or a server does not answer."""


def header(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """What identifies a result: when, which code, which machine, all arguments."""
    return {
        "benchmark": benchmark,
        "date": now(),
        **commit(),
        "arguments": {
            name: _told(value)
            for name, value in vars(options).items()
            if name not in HIDDEN
        },
        "machine": machine(),
        "versions": versions(),
    }


def record(
    found: dict[str, Any], path: Path, *, command: str, checkout: Path | None = None
) -> dict[str, Any]:
    """Write what was found, and how and on what; return all of it.

    Args:
        command: Finds it again.
        checkout: What was measured; by default, this one.
    """
    result = found | {
        "command": command,
        "machine": machine(),
        "versions": versions(),
        **commit(checkout),
    }
    write_whole(json.dumps(result, indent=2) + "\n", path)
    return result


def write_whole(text: str, path: Path) -> None:
    """Whoever stops this leaves the old text or the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


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
    """Write a result to a file, if one was named, as one line of JSON."""
    line = json.dumps(result, allow_nan=False)
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


def now() -> str:
    """The time in UTC, without the zone."""
    found = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return found.isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Python and of every package that takes part and is there."""
    found = {"python": platform.python_version()}
    for name in ("jaxspec-decoding", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, cores and load, which says whether the machine was quiet."""
    info, lines = Path("/proc/cpuinfo"), dict[str, str]()
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            lines[key.strip()] = value.strip()
    features = lines.get("flags", lines.get("Features", "")).split()
    return {
        "cpu": lines.get("model name", platform.processor() or platform.machine()),
        "cpu_features": [name for name in WIDE_FEATURES if name in features],
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def commit(checkout: Path | None = None) -> dict[str, Any]:
    """The commit of a checkout, and whether it had changes; None outside of one.

    Args:
        checkout: By default, the one that this is in.
    """
    root = Path(jaxspec.__file__).parents[1] if checkout is None else checkout
    git = ["git", "-C", str(root)]
    status = ["status", "--porcelain", "--untracked-files=no", "--", ":/"]
    status += [f":(top,exclude){folder}" for folder in WRITTEN]
    given: dict[str, Any] = dict(check=True, capture_output=True, text=True)
    found: dict[str, Any] = {"commit": None, "has_changes": None}
    if not (root / ".git").exists():
        return found
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], **given)
        changes = subprocess.run([*git, *status], **given)
    except (OSError, subprocess.CalledProcessError):
        return found
    has_changes = bool(changes.stdout.strip())
    return {"commit": head.stdout.strip(), "has_changes": has_changes}
