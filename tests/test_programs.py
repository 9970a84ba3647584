"""`USERS_COMPILER` equals the XLA options that users get."""

import os

from tests.support.processes import run_python
from tests.support.programs import QUICK_COMPILER, USERS_COMPILER, flags_of, users_flags

# Flags are read only once per process, so this runs in a new process.
CODE = """
from jaxlib import xla_client
print(xla_client.CompileOptions().SerializeAsString())
"""


def options_with(flags: list[str]) -> str:
    """Return XLA's compile options in a process with these flags."""
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    return run_python("-c", CODE, env=environment, check=True).stdout


def test_users_options_are_xlas_defaults():
    assert USERS_COMPILER.keys() == QUICK_COMPILER.keys()
    defaults = options_with([])
    assert options_with(flags_of(USERS_COMPILER)) == defaults
    assert options_with(flags_of(QUICK_COMPILER)) != defaults


def test_users_flags_exclude_the_tests_flags(monkeypatch):
    given = ["--xla_cpu_use_fusion_emitters=true", "--xla_dump_to=here"]
    flags = [given[0], *flags_of(QUICK_COMPILER), given[1]]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    assert users_flags().split() == given
