"""The environment of programs that tests start; see `engines.QUICK_COMPILER`."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What they do is tested, not how fast: machine code is made as soon as possible.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def quick_flags() -> str:
    """XLA's flags for programs that are compiled in a third of the usual time."""
    return " ".join([os.environ.get("XLA_FLAGS", ""), *QUICK_FLAGS])


def quick_environment() -> dict[str, str]:
    """An environment in which compiled programs are made soon, and kept for all."""
    return os.environ | {
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),
        "XLA_FLAGS": quick_flags(),
    }
