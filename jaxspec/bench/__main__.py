"""Owns `python -m jaxspec.bench`.

Imports the subcommand's module only when it runs: jax takes seconds, `--help` must not.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Sequence

from jaxspec.bench.flags import MODULES, make_parser
from jaxspec.command_line import CommandError, parse_flags, run_command
from jaxspec.exit import interrupts_end, run_main
from jaxspec.extras import needs_extra

PROG = "python -m jaxspec.bench"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    parser = make_parser(prog)
    options = parse_flags(parser, arguments)
    if options.command is None:
        parser.print_help()
        return 0
    prog = f"{prog} {options.command}"

    def run() -> None:
        with interrupts_end(), needs_extra("serve", "This command"):
            module = importlib.import_module(MODULES[options.command])
        tables = sys.stderr if options.json else sys.stdout
        with contextlib.redirect_stdout(tables):
            results = module.run(options)
        if options.json:
            for result in results:
                print(json.dumps(result, allow_nan=False))
        if not all(result.get("is_lossless", True) for result in results):
            raise CommandError("The server's speculation is not lossless.")

    return run_command(prog, run)


if __name__ == "__main__":
    run_main(main)
