"""Owns `python -m jaxspec plan`: what an engine would take of devices, here or not.

Reads no weights. Imports jax only once the command line is right.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from jaxspec.command_line import CommandParser, run_command
from jaxspec.engine.arg_utils import AsyncEngineArgs
from jaxspec.serve.flags import engine_args, parse_flags

PROG = "python -m jaxspec plan"


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Tell how an engine with these arguments divides the memory of its "
        "devices: weights, programs, pages, and how many sequences that is. Nothing is "
        "loaded or run. Without a model: the bundled pair.",
        epilog="What programs take is estimated by a formula that is held against "
        "compilers' records; --compile asks the compiler itself.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, or a published name as google/gemma-2-9b-it, of "
        "which nothing is fetched",
    )
    group = parser.add_argument_group("what is planned for, and how it is told")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="devices that need not be here: v5e-1, v5e-8, v6e-1, t4, l4, a100-40gb, "
        "a100-80gb, h100, h200, b200, or several GPUs as h100-8 (default: those that "
        "are here). The target "
        "is spread over all of them, or over its part where --data-parallel-size has "
        "several, unless --tensor-parallel-size says otherwise",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile the largest program for the device, which takes minutes, and "
        "plan with what it needs",
    )
    group.add_argument("--json", action="store_true", help="all numbers, in bytes")
    AsyncEngineArgs.add_cli_args(parser)
    # None is told from 1: whoever names eight devices means to use them.
    parser.set_defaults(tensor_parallel_size=None)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; returns the exit code."""
    options = parse_flags(make_parser(prog), arguments)
    return run_command(prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ArgumentError: An option cannot work, or what is wanted does not fit.
    """
    # Of a GPU that somebody uses, a plan must not take what is left.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    count = 1
    if options.device is not None:
        devices = importlib.import_module("jaxspec.engine.memory.device_descriptions")
        count = len(devices.named_devices(options.device))
        # Whatever is installed, nothing runs on it: this process is the command's.
        importlib.import_module("jax").config.update("jax_platforms", "cpu")
    if options.tensor_parallel_size is None:
        options.tensor_parallel_size = max(
            count // max(options.data_parallel_size, 1), 1
        )
    args = engine_args(vars(options))
    memory = importlib.import_module("jaxspec.engine.memory.probe")
    plan = memory.plan_for(args, options.device, has_compiler=options.compile)
    print(json.dumps(plan.as_dict(), indent=2) if options.json else plan.table())


if __name__ == "__main__":
    sys.exit(main())
