"""Owns `jaxspec` and `python -m jaxspec`: the start of the command line.

Imports the subcommands inside `interrupts_end`: that takes 0.3 s, in which Ctrl-C must
not end with a traceback.
"""

import importlib
from collections.abc import Sequence
from typing import NoReturn

from jaxspec.exit import interrupts_end, run_main

PROG = "python -m jaxspec"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    with interrupts_end():
        commands = importlib.import_module("jaxspec.cli.commands")
    return commands.main(arguments, prog)


def script() -> NoReturn:
    """Entry point of the installed program `jaxspec`."""
    run_main(lambda: main(prog="jaxspec"))


if __name__ == "__main__":
    run_main(main)
