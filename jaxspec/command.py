"""Owns what every command line of the package does alike: it runs, and has a status."""

import sys
from collections.abc import Callable

from jaxspec.ending import INTERRUPTED
from jaxspec.errors import ArgumentError
from jaxspec_checkpoints import CheckpointError

# argparse's exit code for a wrong argument.
WRONG_ARGUMENT = 2


def run_command(prog: str, run: Callable[[], int | None]) -> int:
    """Run a command; returns the exit code, and says on stderr what was wrong.

    Args:
        prog: What the command is called in its messages.
        run: Returns an exit code; None is 0.
    """
    try:
        return run() or 0
    except (ArgumentError, CheckpointError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENT
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
