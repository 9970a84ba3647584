"""Compile options of programs in tests and in processes that tests start.

Most tests check results, not speed, so their programs compile in a third of the usual
time and run slower. Tests that check the exact bits or instructions of users' programs
compile with `USERS_COMPILER`.
"""

import os
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fusion_emitters(is_used: bool) -> dict[str, str | bool]:
    """Return the option for XLA:CPU's fusion emitters, which jaxlib 0.11 removed."""
    major, minor = map(int, metadata.version("jaxlib").split(".")[:2])
    has_option = (major, minor) < (0, 11)
    return {"xla_cpu_use_fusion_emitters": is_used} if has_option else {}


# Options for `jax.jit(..., compiler_options=...)` and runners.
QUICK_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    **fusion_emitters(False),
    # Compiling parts in parallel would take more CPU time in total.
    "xla_cpu_parallel_codegen_split_count": "1",
}
# XLA's defaults, which users have.
USERS_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    **fusion_emitters(True),
    "xla_cpu_parallel_codegen_split_count": "32",
}
# Options for tests that inspect programs: the HLO is that of users, and only the
# machine code differs.
READERS_COMPILER = USERS_COMPILER | {"xla_backend_optimization_level": "0"}


def flags_of(options: dict[str, str | bool]) -> list[str]:
    """Return compile options in the form of XLA flags."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def quick_flags() -> str:
    """Return XLA flags for a process that compiles quickly."""
    return " ".join([*flags_of(QUICK_COMPILER), users_flags()])


def users_flags() -> str:
    """Return the XLA flags of this process without those for quick compilation."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in given if flag not in flags_of(QUICK_COMPILER))


def quick_environment() -> dict[str, str]:
    """Return the environment of a process that compiles quickly, with the cache."""
    return os.environ | {
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),
        "XLA_FLAGS": quick_flags(),
    }
