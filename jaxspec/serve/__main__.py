"""Owns `python -m jaxspec.serve`.

Imports the engine only when it runs: importing jax takes seconds, `--help` must not.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxspec.command_line import run_command
from jaxspec.exit import end, interrupts_end
from jaxspec.serve.flags import read_flags

PROG = "python -m jaxspec.serve"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Parse the command line and serve; return the exit code."""

    def run() -> int:
        with interrupts_end():
            options = read_flags(prog, sys.argv[1:] if arguments is None else arguments)
            return importlib.import_module("jaxspec.serve.launcher").run(options)

    return run_command(prog, run)


if __name__ == "__main__":
    end(main())
