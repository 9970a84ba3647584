"""Owns `python -m jaxspec.serve`: how a wrong command line is shown.

Imports the engine only when it runs: jax takes seconds, `--help` must not.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxspec.ending import INTERRUPTED, end, interrupts_end
from jaxspec.errors import ArgumentError
from jaxspec.serve.flags import read_flags
from jaxspec_checkpoints import CheckpointError

PROG = "python -m jaxspec.serve"
# argparse's exit code for a wrong argument.
WRONG_ARGUMENT = 2


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Serve as a command line says; returns the exit code."""
    try:
        with interrupts_end():
            options = read_flags(prog, sys.argv[1:] if arguments is None else arguments)
            return importlib.import_module("jaxspec.serve.launcher").run(options)
    except (ArgumentError, CheckpointError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENT
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    end(main())
