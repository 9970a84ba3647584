"""The server program: its start, and errors of its command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.serve import __main__ as program

ROOT = Path(__file__).parents[2]
MODULES = ("jaxspec.serve", "jaxspec.entrypoints.openai.api_server")


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)


@pytest.mark.parametrize("module", MODULES)
def test_help_does_not_import_jax(module: str):
    code = (
        "import runpy, sys\n"
        "sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    printed = run(code).stdout
    assert f"python -m {module}" in printed
    assert "--speculative-model" in printed


def test_invalid_value_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert program.main(["m", "--quantization", "int3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m jaxspec.serve: error: quantization")


@pytest.mark.parametrize(
    ("level", "is_logged"),
    [("info", False), pytest.param("debug", True, marks=pytest.mark.slow)],
)
def test_missing_devices_are_logged_only_in_debug(level, is_logged):
    code = (
        f"from jaxspec.serve import launcher; launcher.set_up_log({level!r})\n"
        "import logging; log = logging.getLogger('jax._src.xla_bridge')\n"
        "log.info('Failed to open libtpu.so'); log.warning('A real error')\n"
        "logging.getLogger('jaxspec').info('ours')\n"
    )
    logged = run(code).stderr
    assert ("libtpu" in logged) == is_logged
    assert "A real error" in logged
    assert "ours" in logged
