"""Owns `python -m jaxspec.serve`.

Imports the server's flags when it runs, because they need the extra `serve`, and the
engine after the flags are checked, because importing jax takes seconds.
"""

from jaxspec.exit import interrupts_end, run_main

with interrupts_end():
    import importlib
    import sys
    from collections.abc import Sequence

    from jaxspec.command_line import run_command
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

    return run_command(prog, run)


if __name__ == "__main__":
    run_main(main)
