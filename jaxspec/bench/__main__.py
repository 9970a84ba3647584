"""Owns `python -m jaxspec.bench`: how a wrong command line or a failure is shown.

Imports what a subcommand needs only when it runs: jax takes seconds, `--help` must not.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxspec.bench.flags import MODULES, make_parser
from jaxspec.bench.report import BenchError
from jaxspec.console.command import run_command
from jaxspec.console.ending import end, interrupts_end
from jaxspec.serve.flags import parse_flags

PROG = "python -m jaxspec.bench"
# The exit code of a run that failed.
FAILED = 1


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; returns the exit code."""
    parser = make_parser(prog)
    options = parse_flags(parser, arguments)
    if options.command is None:
        parser.print_help()
        return 0
    prog = f"{prog} {options.command}"

    def run() -> int:
        with interrupts_end():
            module = importlib.import_module(MODULES[options.command])
        try:
            module.run(options)
        except BenchError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return FAILED
        return 0

    return run_command(prog, run)


if __name__ == "__main__":
    end(main())
