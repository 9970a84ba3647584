"""The program: how it starts, what it says of a wrong command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.serve import __main__ as program

ROOT = Path(__file__).parents[2]
MODULES = ("jaxspec.serve", "jaxspec.entrypoints.openai.api_server")


@pytest.mark.parametrize("module", MODULES)
def test_help_comes_without_jax(module: str):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout
    assert "--speculative-model" in done.stdout


def test_a_wrong_value_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert program.main(["m", "--quantization", "awq"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m jaxspec.serve: error: quantization")
