"""Owns `python -m jaxspec plan`: the memory plan of an engine, for any devices.

Reads no weights. Imports jax only after the command line has been checked.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from jaxspec.command_line import CommandParser, parse_flags, run_command
from jaxspec.engine.arg_utils import AsyncEngineArgs, engine_args

PROG = "python -m jaxspec plan"


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Show how an engine with these arguments divides the memory of its "
        "devices: weights, programs, pages, and the number of sequences that fit. "
        "Nothing is loaded or run. Without a model: the bundled pair.",
        epilog="The memory of programs is estimated by a formula that is tested "
        "against recorded compilations; --compile runs the compiler itself.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, or a published name such as "
        "google/gemma-2-9b-it, without downloading anything",
    )
    group = parser.add_argument_group("devices and output")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="devices to plan for, which need not be present: v5e-1, v5e-8, v6e-1, "
        "v7x-2 (one chip), l4, a100-40gb, a100-80gb, h100, h200, b200, or several "
        "GPUs such as h100-8 (default: this machine's). The target is sharded over all "
        "of them, divided by --data-parallel-size, unless --tensor-parallel-size is "
        "given",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile the largest program for the device, which takes minutes, and "
        "plan with the memory that it reports",
    )
    group.add_argument("--json", action="store_true", help="all numbers, in bytes")
    AsyncEngineArgs.add_cli_args(parser)
    # None, the default, means all devices of the slice that --device names; 1 means one
    # device.
    parser.set_defaults(tensor_parallel_size=None)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    options = parse_flags(make_parser(prog), arguments)
    return run_command(prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ArgumentError: An option is invalid, or the engine does not fit.
    """
    # The plan must not allocate the memory of a GPU that is in use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    count = 1
    if options.device is not None:
        devices = importlib.import_module("jaxspec.engine.memory.device_descriptions")
        count = len(devices.named_devices(options.device))
        # Keep jax on the CPU, whatever other backends are installed.
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
