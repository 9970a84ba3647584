"""Owns `python -m jaxspec.bench`: how a wrong command line or a failure is shown.

Imports what a subcommand needs only when it runs: jax takes seconds, `--help` must not.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxspec.bench.failure import BenchError
from jaxspec.bench.flags import MODULES, make_parser
from jaxspec.ending import INTERRUPTED, end, interrupts_end
from jaxspec.errors import ArgumentError
from jaxspec.serve.flags import dashed
from jaxspec_checkpoints import CheckpointError

PROG = "python -m jaxspec.bench"
# Exit codes; argparse's for a wrong argument.
FAILED, WRONG_ARGUMENT = 1, 2


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; returns the exit code."""
    parser = make_parser(prog)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([dashed(argument) for argument in given])
    if options.command is None:
        parser.print_help()
        return 0
    prog = f"{prog} {options.command}"
    try:
        with interrupts_end():
            module = importlib.import_module(MODULES[options.command])
        module.run(options)
    except (ArgumentError, CheckpointError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENT
    except BenchError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    end(main())
