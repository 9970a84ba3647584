"""Owns `python -m jaxspec compile`: compiles an engine's programs ahead of time.

Reads no weights. Imports jax only after the command line has been checked.
"""

import argparse
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm.auto import tqdm

from jaxspec.command_line import CommandParser, parse_flags, run_command
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.arg_utils import AsyncEngineArgs, engine_args
from jaxspec.engine.program_folder import AnyPath, folder_at, write
from jaxspec.engine.scheduling.programs import GREEDY, SAMPLED, Shapes
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.errors import ConfigError, check_integer
from jaxspec.program.plan import Features, StepShape

PROG = "python -m jaxspec compile"
# XLA uses one or two cores to compile a program.
CORES_PER_JOB = 2


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Compile the programs of an engine with these arguments, without "
        "its weights, into a folder to pass to the engine as --compilation-cache-dir. "
        "Without a model: the bundled pair.",
        epilog="Programs for structured outputs cannot be saved: they call back into "
        "their process.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("compilation")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="devices to compile for, which need not be present: v5e-1, v5e-8, v6e-1, "
        "h200 and others (an unknown name lists them; default: this machine's)",
    )
    group.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the programs (default: --compilation-cache-dir)",
    )
    group.add_argument(
        "--warm-up",
        choices=("plain", "all"),
        default="plain",
        help="plain: programs of plain requests (default); all: also those for "
        "logprobs, penalties and masks",
    )
    group.add_argument(
        "--jobs",
        type=int,
        default=max((os.cpu_count() or 1) // CORES_PER_JOB, 1),
        metavar="N",
        help="programs to compile at once (default: half of the cores); each takes one "
        "or two cores, and up to some GB of memory for a large model",
    )
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    options = parse_flags(make_parser(prog), arguments)
    return run_command(prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Compile into the folder and print times and sizes.

    Raises:
        ArgumentError: An option is invalid; nothing has been compiled.
    """
    check_integer(ConfigError, "jobs", options.jobs, low=1)
    devices = importlib.import_module("jaxspec.engine.memory.device_descriptions")
    if options.device is not None:
        devices.check_device(options.device)
        # Compiling for devices that are not present needs only jax's CPU backend.
        importlib.import_module("jax").config.update("jax_platforms", "cpu")
    args = engine_args(vars(options))
    if options.output is not None:
        args = dataclasses.replace(args, compilation_cache_dir=options.output)
    # Programs do not depend on the values of weights, so no weights are downloaded.
    config = dataclasses.replace(args, load_format="dummy").create_engine_config()
    folder = _writable(config.compilation_cache_dir)
    for rank in range(config.data_parallel_size):
        # Each data-parallel engine has its own programs, because a program is compiled
        # for certain devices.
        own = dataclasses.replace(config, data_parallel_rank=rank)
        _fill(options, own, folder)


def _fill(options: argparse.Namespace, config: EngineConfig, folder: AnyPath) -> None:
    """Compile the programs of one engine, and print times and sizes."""
    devices = importlib.import_module("jaxspec.engine.memory.device_descriptions")
    mesh = devices.describe_mesh(options.device, config)
    memory = importlib.import_module("jaxspec.engine.memory.probe")
    config, mesh, _ = memory.spread_draft(config, mesh, device=options.device)
    # Set the numbers of pages and rows first, as the shapes of programs depend on them.
    config, _ = memory.fit(config, mesh, device=options.device)
    program, forms = devices.describe(config, mesh)
    xla = importlib.import_module("jaxspec.engine.runner").options_of(config, mesh)
    cache = importlib.import_module("jaxspec.engine.program_cache")
    programs = cache.ProgramCache(folder)
    shapes = wanted_shapes(config, options.warm_up)
    rows, num_there = [], 0
    start = time.monotonic()

    def fill(shape: StepShape) -> tuple[str, Any]:
        return cache.program_name(shape), programs.fill(program, shape, forms, xla)

    # XLA releases the GIL while it compiles.
    with ThreadPoolExecutor(options.jobs) as threads:
        futures = [threads.submit(fill, shape) for shape in shapes]
        try:
            done = as_completed(futures)
            # `disable=None`: a bar is drawn on a terminal only.
            bar = tqdm(done, total=len(futures), unit="program", disable=None)
            for future in bar:
                name, built = future.result()
                num_there += built is None
                if built is not None:
                    row = name, built.lower_s, built.compile_s, built.num_bytes
                    rows.append(row)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    print(table(rows))
    if rows:
        print(f"in {time.monotonic() - start:.1f} s, {options.jobs} at once")
    device = options.device or mesh.devices.flat[0].device_kind
    print(f"{len(rows)} programs for {device} written to {folder}", end="")
    print(f", {num_there} were already there" if num_there else "")


def wanted_shapes(config: EngineConfig, extent: str) -> list[StepShape]:
    """Return the shapes of the programs that requests can need.

    Args:
        extent: "plain", or "all" for all features whose programs can be saved.
    """
    features = [GREEDY, SAMPLED]
    if extent == "all":
        features += [Features(has_controls=True), Features(num_prompt_logprobs=0)]
    return Shapes(config, SpeculationPolicy(config.speculative)).all(features=features)


def table(rows: Sequence[tuple[str, float, float, int]]) -> str:
    """Format one line for each program, and their sum."""
    if not rows:
        return ""
    _, *columns = zip(*rows, strict=True)
    total: Any = ("all", *(sum(column) for column in columns))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'program':<{width}}  lower s  compile s       bytes"]
    lines += [
        f"{name:<{width}}{lower_s:>9.1f}{compile_s:>11.1f}{num_bytes:>12,}"
        for name, lower_s, compile_s, num_bytes in [*rows, total]
    ]
    return "\n".join(lines)


def _writable(given: str | None) -> AnyPath:
    """Return the folder, created if necessary.

    Raises:
        ConfigError: No folder is given, or it cannot be written to.
    """
    if given is None:
        raise ConfigError(
            "There is no folder to write programs to: name one with --output.",
            parameter="output",
            value=given,
        )
    folder = folder_at(given)
    probe = folder / ".writable"
    try:
        write(probe, b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be written to, got {given!r}: {error}",
            parameter="output",
            value=given,
        ) from error
    return folder


if __name__ == "__main__":
    sys.exit(main())
