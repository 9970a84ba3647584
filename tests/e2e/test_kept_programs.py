"""Processes share cached programs, even if they start together or jax caches too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# This script loads the program, or else compiles and caches it.
START = """
import sys
from pathlib import Path
from jaxspec.engine import program_cache
from tests.support import tiny_programs as tests

program_cache.lower_step = tests.lower_round
program = tests.make_program()
folder = None if sys.argv[1] == "none" else Path(sys.argv[1])
arguments = tests.make_arguments(program.mesh)
built = program_cache.ProgramCache(folder).build(program, tests.SHAPE, arguments)
print("loaded" if built.was_loaded else "compiled")
plan = tests.jax.device_put(tests.PLAN)
(rows,), _ = built.executable(*tests.flatten(arguments), plan)
print(float(rows.sum()))
"""


def begin(folder: Path | str, jax_folder: Path | None = None) -> subprocess.Popen:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    environment |= {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if jax_folder is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(jax_folder)
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen(
        [sys.executable, "-c", START, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def end(process: subprocess.Popen) -> list[str]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output.split()


@pytest.mark.slow
def test_two_processes_share_the_cache(tmp_path):
    processes = [begin(tmp_path) for _ in range(2)]
    (_, total), (_, other) = [end(process) for process in processes]
    assert total == other
    assert len(list(tmp_path.iterdir())) == 1
    assert end(begin(tmp_path)) == ["loaded", total]


@pytest.mark.slow
def test_users_jax_cache_does_not_affect_programs(tmp_path):
    ours, jaxs = tmp_path / "ours", tmp_path / "jax"
    # A program that comes from jax's own cache must not be stored in ours.
    without, total = end(begin("none", jaxs))
    assert without == "compiled"
    assert any(path.name.startswith("jit_step_") for path in jaxs.iterdir())
    assert end(begin(ours, jaxs)) == ["compiled", total]
    assert end(begin(ours, jaxs)) == ["loaded", total]
    [path] = ours.iterdir()
    path.unlink()
    assert end(begin(ours, jaxs)) == ["compiled", total]
    assert end(begin(ours, jaxs)) == ["loaded", total]
