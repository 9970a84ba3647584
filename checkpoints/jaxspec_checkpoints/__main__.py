"""`python -m jaxspec_checkpoints`: inspect and convert checkpoints, trim drafts."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec_checkpoints.bundled import NAMED_MODELS
from jaxspec_checkpoints.checkpoint import TOKEN_MAP
from jaxspec_checkpoints.counting import check_is_new, count_tokens, write_token_map
from jaxspec_checkpoints.errors import CheckpointError
from jaxspec_checkpoints.files import expand
from jaxspec_checkpoints.layout import DTYPES
from jaxspec_checkpoints.quantization import VALUE_TYPES
from jaxspec_checkpoints.reading import open_checkpoint
from jaxspec_checkpoints.report import describe
from jaxspec_checkpoints.writing import FORMATS, write_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status, 1 for a checkpoint that is unusable."""
    options = _parser().parse_args(arguments)
    try:
        checkpoint = open_checkpoint(_source_of(options.source))
        if options.command == "inspect":
            print(describe(checkpoint.resolved()))
        elif options.command == "trim":
            if options.output is None and not checkpoint.folder.is_dir():
                raise CheckpointError(
                    f"{options.source} is a file, so there is no folder for the "
                    "token map: give its file as --output"
                )
            path = options.output or checkpoint.folder / TOKEN_MAP
            check_is_new(path)
            counts = count_tokens(checkpoint, options.texts)
            write_token_map(path, counts)
            print(f"{path}: all tokens, most frequent first\n{counts.report()}")
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
        print("interrupted; no files were left behind", file=sys.stderr)
        return 130
    return 0


def _source_of(name: str) -> Path:
    """Return the path of a file or folder, or of a model that needs no download."""
    if name in NAMED_MODELS:
        return NAMED_MODELS[name]()
    source = expand(name)
    near = difflib.get_close_matches(name, NAMED_MODELS, n=1)
    if near and not source.exists():
        raise CheckpointError(f"{name} does not exist: did you mean {near[0]}?")
    return source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec_checkpoints",
        description="Inspect Gemma checkpoints and convert between their formats.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser(
        "inspect", help="show a model's sizes and how it would be sharded over devices"
    )
    source = f"a model folder, a .gguf file, or one of {', '.join(NAMED_MODELS)}"
    inspect.add_argument("source", metavar="PATH", help=source)
    convert = commands.add_parser(
        "convert",
        help="write a model in another format or type",
        description="Write a model in another format or type. The destination appears "
        "when it is complete, or not at all.",
    )
    convert.add_argument("source", metavar="SRC", help=source)
    convert.add_argument(
        "destination", type=Path, metavar="DST", help="a folder that does not exist yet"
    )
    convert.add_argument("--to", choices=FORMATS, required=True, help="the new format")
    convert.add_argument(
        "--dtype",
        choices=DTYPES,
        help="the new type (default: every tensor keeps its type)",
    )
    convert.add_argument(
        "--quantize",
        choices=VALUE_TYPES,
        help="store the matrices of layers in 8 or 4 bits; only with --to hf or orbax",
    )
    trim = commands.add_parser(
        "trim",
        help="count a draft model's tokens in texts, to trim its vocabulary",
        description="Count the tokens of texts, and write a token map: special tokens "
        "first, then the others, most frequent first. The map lets a draft "
        "model propose frequent tokens only: "
        "speculative_config={'draft_vocab_size': N} keeps the first N.",
    )
    trim.add_argument("source", metavar="PATH", help=f"a draft: {source}")
    trim.add_argument(
        "texts",
        type=Path,
        nargs="+",
        metavar="TEXT",
        help='text files, or .jsonl files whose lines have "text", or "prompt" and '
        '"completion"; both may be compressed (.xz)',
    )
    trim.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"a file that does not exist yet (default: {TOKEN_MAP} in PATH)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
