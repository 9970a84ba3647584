"""`python -m jaxspec_checkpoints inspect PATH` and `convert SRC DST --to FORMAT`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.layout import DTYPES
from jaxspec_checkpoints.quantization import VALUE_TYPES
from jaxspec_checkpoints.reading import FORMATS, open_checkpoint
from jaxspec_checkpoints.report import describe
from jaxspec_checkpoints.writing import write_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status, 1 for a checkpoint that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        checkpoint = open_checkpoint(options.source)
        if options.command == "inspect":
            print(describe(checkpoint))
        else:
            write_checkpoint(
                checkpoint,
                options.destination,
                to=options.to,
                dtype=options.dtype,
                quantization=options.quantize,
            )
            print(f"{options.destination}: {options.to}, complete")
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec_checkpoints",
        description="Look at Gemma 2 checkpoints and convert between their formats.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="say what a folder holds and how it would be spread"
    )
    inspect.add_argument("source", type=Path, metavar="PATH", help="a model folder")
    convert = commands.add_parser(
        "convert",
        help="write a model in another format or type",
        description="Write a model in another format or type. The destination appears "
        "when it is complete, or not at all.",
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="a model folder")
    convert.add_argument(
        "destination", type=Path, metavar="DST", help="a folder that does not exist yet"
    )
    convert.add_argument("--to", choices=FORMATS, required=True, help="the new format")
    convert.add_argument(
        "--dtype", choices=DTYPES, help="the new type; default: every tensor keeps its"
    )
    convert.add_argument(
        "--quantize",
        choices=VALUE_TYPES,
        help="keep matrices of layers in 8 or 4 bits; hf and orbax",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
