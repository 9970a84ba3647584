"""How programs are compiled here, and in the processes that tests start.

What they do is tested, not how fast: machine code is made as soon as possible, in a
third of the usual time, and is slower by as much. Tests of what users get, bit for bit
or instruction for instruction, ask for `USERS_COMPILER`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

# For `jax.jit(..., compiler_options=...)` and runners.
QUICK_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    # Parts that are compiled at once take more together.
    "xla_cpu_parallel_codegen_split_count": "1",
}
# XLA's defaults.
USERS_COMPILER: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": "32",
}
# For programs that are looked into: the instructions are those that users get, and only
# the machine code made of them is not.
READERS_COMPILER = USERS_COMPILER | {"xla_backend_optimization_level": "0"}


def flags_of(options: dict[str, str | bool]) -> list[str]:
    """The same as flags of a process."""
    return [f"--{name}={str(value).lower()}" for name, value in options.items()]


def quick_flags() -> str:
    """XLA's flags for a process that compiles as soon as possible."""
    return " ".join([*flags_of(QUICK_COMPILER), users_flags()])


def users_flags() -> str:
    """XLA's flags of this process, without those: as users have programs compiled."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in given if flag not in flags_of(QUICK_COMPILER))


def quick_environment() -> dict[str, str]:
    """An environment in which compiled programs are made soon, and kept for all."""
    return os.environ | {
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),
        "XLA_FLAGS": quick_flags(),
    }
