"""Unit tests and one engine run on other versions of jax.

Each version has an environment of its own, in `.venv/jax-<version>`, which is made when
`pyproject.toml` has changed. The tests are some of the parts that call jax. Warnings
are errors, also those about what jax deprecates.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

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


def steps(version: str, python: Path) -> Iterator[tuple[str, list]]:
    """Yield the commands of one version, with their names."""
    run = [str(python), "-m"]
    install = [*run, "pip", "install", "-q", "--disable-pip-version-check"]
    pins = f"jax=={version}", f"jaxlib=={version}"
    yield "install", [*install, "-e", f"{ROOT}[serve]", *pins, *TOOLS]
    marks = ["-q", "-m", MARKS, "-p", "no:cacheprovider"]
    if version in CRASHES:
        marks += ["--deselect", CRASHES[version]]
    yield "unit tests", [*run, "pytest", *marks, *TESTS]
    yield "engine", [str(python), "-W", "error", "-m", "jaxspec", "generate", *GENERATE]


def check(version: str, interpreter: str, folder: Path) -> bool:
    """Make the environment of a version if needed; return whether all steps succeed."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    changed_ts = (ROOT / "pyproject.toml").stat().st_mtime
    is_made = stamp.exists() and stamp.stat().st_mtime >= changed_ts
    if not is_made:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    # Packages of this checkout come from the editable install. Other versions of XLA
    # lack some of the flags of these tests.
    without = ("PYTEST_", "PYTHONPATH", "XLA_FLAGS")
    kept = {
        name: one for name, one in os.environ.items() if not name.startswith(without)
    }
    environment = kept | {"JAX_PLATFORMS": "cpu"}
    for name, command in steps(version, python):
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


@pytest.mark.long_suite(name="jax_versions")
@pytest.mark.parametrize(
    "version", [one for one in VERSIONS if one != metadata.version("jax")]
)
def test_parts_that_call_jax_run_on_other_versions(version: str):
    interpreter = python_for(VERSIONS[version], find_pythons())
    if interpreter is None:
        pytest.skip(f"jax {version} needs Python 3.{VERSIONS[version]}")
    assert check(version, interpreter, Path(sys.prefix) / f"jax-{version}")
