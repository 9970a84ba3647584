"""Owns `python -m jaxspec.serve`.

Imports the server's flags when it runs, because they need the extra `serve`, and the
engine after the flags are checked, because importing jax takes seconds.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxspec.exit import interrupts_end, run_main
from jaxspec.extras import needs_extra

PROG = "python -m jaxspec.serve"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Parse the command line and serve; return the exit code."""

    def run() -> int:
        given = sys.argv[1:] if arguments is None else arguments
        with interrupts_end():
            with needs_extra("serve", "The server"):
                flags = importlib.import_module("jaxspec.serve.flags")
            options = flags.read_flags(prog, given)
            return importlib.import_module("jaxspec.serve.launcher").run(options)

    with interrupts_end():
        command_line = importlib.import_module("jaxspec.command_line")
    return command_line.run_command(prog, run)


if __name__ == "__main__":
    run_main(main)
