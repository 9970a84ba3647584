"""Compile options of programs in tests, and in processes that tests start.

Tests check results, not speed: programs compile in a third of the usual time, and run
slower. Tests of users' exact bits or instructions use `USERS_COMPILER`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

# For `jax.jit(..., compiler_options=...)` and runners.
QUICK_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    # Compiling parts in parallel takes more CPU time in total.
    "xla_cpu_parallel_codegen_split_count": "1",
}
# XLA's defaults.
USERS_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": "32",
}
# For tests that inspect programs: instructions are those of users, only the machine
# code differs.
READERS_COMPILER = USERS_COMPILER | {"xla_backend_optimization_level": "0"}


def flags_of(options: dict[str, str | bool]) -> list[str]:
    """Options as a process's XLA flags."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def quick_flags() -> str:
    """XLA flags for a process that compiles quickly."""
    return " ".join([*flags_of(QUICK_COMPILER), users_flags()])


def users_flags() -> str:
    """XLA flags of this process without those for quick compilation."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in given if flag not in flags_of(QUICK_COMPILER))


def quick_environment() -> dict[str, str]:
    """Environment of a process that compiles quickly and shares the program cache."""
    return os.environ | {
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),
        "XLA_FLAGS": quick_flags(),
    }
