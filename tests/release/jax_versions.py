"""Runs unit tests and one engine on other versions of jax.

`make test-all` runs it. Each version has an environment of its own, in
`.venv/jax-<version>`, which is made when `pyproject.toml` has changed. The tests are
some of the parts that call jax. Warnings are errors, also those about what jax
deprecates.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.release.check import find_pythons, run_step

ROOT = Path(__file__).parents[2]
# The oldest and the newest version that is supported, and one between; for each, the
# oldest Python that has it, as minor version.
VERSIONS = {"0.10.2": 11, "0.11.2": 12, "0.12.0.1": 12}
TOOLS = ("beartype", "hypothesis", "pytest", "pytest-xdist", "scipy")
# Tests of what calls jax that need neither torch nor a download.
_KERNELS = (
    *("bits", "dispatch", "grouped_matmul", "paged_attention", "panel_matmul"),
    *("rejection_sampling",),
    *("rejection_sampling_backends", "rejection_sampling_sharded", "sums"),
    *("write_kv_pages",),
)
_PROGRAM = (
    *("controls", "history", "logprobs", "randomness", "rounds", "rows", "sampling"),
    *("state", "verify"),
)
_ENGINE = ("compiler", "program_cache", "several_rounds")
TESTS = (
    "tests/test_sharding.py",
    *(f"tests/kernels/test_{name}.py" for name in _KERNELS),
    *(f"tests/program/test_{name}.py" for name in _PROGRAM),
    *(f"tests/engine/test_{name}.py" for name in _ENGINE),
)
# Tests during which a version's compiler crashes. This one returns a whole vocabulary.
CRASHES = {
    "0.11.2": "tests/program/test_logprobs.py::"
    "test_top_ids_past_the_vocabulary_are_pads[8]"
}
MARKS = "not slow and not long_suite and not aot"
GENERATE = ("Once upon a time", "--temperature", "0", "--num-speculative-tokens", "4")


def steps(version: str, python: Path, processes: int) -> Iterator[tuple[str, list]]:
    """Yield the commands of one version, with their names."""
    run = [str(python), "-m"]
    install = [*run, "pip", "install", "-q", "--disable-pip-version-check"]
    pins = f"jax=={version}", f"jaxlib=={version}"
    yield "install", [*install, "-e", f"{ROOT}[serve]", *pins, *TOOLS]
    marks = ["-q", "-m", MARKS, "-p", "no:cacheprovider", "-n", str(processes)]
    if version in CRASHES:
        marks += ["--deselect", CRASHES[version]]
    yield "unit tests", [*run, "pytest", *marks, *TESTS]
    yield "engine", [str(python), "-W", "error", "-m", "jaxspec", "generate", *GENERATE]


def check(version: str, interpreter: str, folder: Path, processes: int) -> bool:
    """Make the environment of a version if needed; return whether all steps succeed."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    changed_ts = (ROOT / "pyproject.toml").stat().st_mtime
    is_made = stamp.exists() and stamp.stat().st_mtime >= changed_ts
    if not is_made:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # Packages of this checkout come from the editable install.
    environment.pop("PYTHONPATH", None)
    for name, command in steps(version, python, processes):
        if name == "install" and is_made:
            continue
        if not run_step(name, command, environment, ROOT):
            return False
        if name == "install":
            stamp.touch()
    return True


def python_for(minor: int, pythons: dict[str, str]) -> str | None:
    """Return the oldest interpreter of at least Python 3.`minor`, or None."""
    found = {int(name.partition(".")[2]): path for name, path in pythons.items()}
    allowed = sorted(one for one in found if one >= minor)
    return found[allowed[0]] if allowed else None


def main(arguments: list[str] | None = None) -> int:
    """Check all versions but that of this environment; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=VERSIONS, help="one version")
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix))
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4))
    options = parser.parse_args(arguments)
    chosen = {options.only: VERSIONS[options.only]} if options.only else VERSIONS
    pythons, failed = find_pythons(), []
    for version, minor in chosen.items():
        if version == metadata.version("jax") and not options.only:
            continue  # the other tests ran on it
        interpreter = python_for(minor, pythons)
        if interpreter is None:
            print(f"jax {version}: skipped, it needs Python 3.{minor}", flush=True)
            continue
        print(f"jax {version} ({interpreter})", flush=True)
        folder = options.folder / f"jax-{version}"
        if not check(version, interpreter, folder, options.processes):
            failed.append(version)
    if failed:
        print(f"Failed on jax {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
