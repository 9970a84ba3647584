"""Benchmark results: header, statistics, tables, files."""

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

# Names of runs without and with drafts, in results.
PLAIN, SPECULATIVE = "plain", "speculative"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
# Processor features that determine the speed of bfloat16.
WIDE_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Folders that measurements write to. Changes in them do not count as changes since the
# commit.
WRITTEN = ("kernels/jaxspec_kernels/tuned", "benchmarks/results")
PERCENTILES = (10, 25, 50, 75, 90, 99)
# Arguments that a result does not record, because they are secret or irrelevant.
HIDDEN = ("hf_token", "api_key", "command", "json", "output_json", "result_dir")
HIDDEN += ("plot", "append_result", "metadata")  # removed flags


class BenchError(CommandError):
    """The measurement is invalid, or a server does not respond."""


def header(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the date, commit, machine, versions and arguments of a result."""
    return {
        "benchmark": benchmark,
        "date": now(),
        **commit(),
        "arguments": recorded_arguments(options),
        "machine": machine(),
        "versions": versions(),
    }


def recorded_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a result records."""
    return {
        name: _as_json(value)
        for name, value in vars(options).items()
        if name not in HIDDEN
    }


def write_whole(text: str, path: Path) -> None:
    """Replace a file atomically: if interrupted, the old text remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of repeats."""
    return {
        "median": float(np.median(values)),
        "least": float(min(values)),
        "most": float(max(values)),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles of values; empty without any."""
    if not len(values):
        return {}
    found = {str(p): float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **found}


def forced_line(probabilities: Sequence[float]) -> str:
    """Return the warning that every output prints if acceptance is forced."""
    listed = ", ".join(f"{one:g}" for one in probabilities)
    return (
        "ACCEPTANCE IS FORCED (synthetic): the draft at each position is accepted, "
        f"if those before it are, with the probabilities {listed}. Texts are "
        "meaningless."
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table; the first is its head."""
    head, *others = ([*row] for row in rows)
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(seconds: float | None) -> str:
    """Format a table cell."""
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def check_writable(path: Path | None, flag: str) -> None:
    """Check before measuring that a file can be written.

    Raises:
        ConfigError: The folder does not exist, or cannot be written to.
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
    """Write a result to a file, if one is given, as one line of JSON."""
    line = json.dumps(result, allow_nan=False)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    """Convert an argument for a result, without folders of this machine."""
    is_folder = isinstance(value, str) and value[:1] == "/" and os.path.exists(value)
    if isinstance(value, Path) or is_folder:
        return Path(value).name
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def now() -> str:
    """Return the time in UTC, without the zone."""
    found = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return found.isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return versions of Python and of the packages in use."""
    found = {"python": platform.python_version()}
    for name in ("jaxspec-decoding", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return processor, cores and load."""
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
    """Return a checkout's commit (default: this one's), and whether it has changes."""
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
