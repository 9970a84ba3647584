"""Owns `python -m jaxspec quality`: measures the effect of quantization on texts.

Imports jax only after the command line has been checked.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jaxspec.command_line import CommandParser, run_command
from jaxspec.engine.model_folders import model_folder
from jaxspec.errors import ConfigError, check_choice, check_integer, wrong_argument
from jaxspec.text.tokenizer import Tokenizer
from jaxspec_checkpoints import open_checkpoint
from jaxspec_checkpoints.counting import read_texts
from jaxspec_checkpoints.packing import scheme_of
from jaxspec_checkpoints.quality import Quality, write_quality

PROG = "python -m jaxspec quality"
DTYPES = ("float32", "bfloat16")
# Minimum values of integer flags.
_COUNTS = {"documents": 1, "length": 2, "rows": 1, "tensor_parallel_size": 1}


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Compare a quantized checkpoint with its unquantized original on "
        "texts: perplexity, KL divergence of the distributions, and how often the most "
        "likely tokens are equal. Writes quality.json into the checkpoint's folder, "
        "which `python -m jaxspec_checkpoints inspect` shows, and prints a table for "
        "its model card.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="FOLDER", required=True, help="the quantized checkpoint"
    )
    parser.add_argument(
        "--reference",
        metavar="NAME",
        required=True,
        help="folder or name of the same model without quantization",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        required=True,
        help="texts to read: .jsonl with text, or prompt and completion; any other "
        "file is one text; both may be .xz",
    )
    add = parser.add_argument
    add(
        "--documents",
        metavar="N",
        type=int,
        default=40,
        help="approximate number of texts",
    )
    add("--length", metavar="N", type=int, default=256, help="tokens per piece")
    add("--rows", metavar="N", type=int, default=4, help="pieces per batch")
    add(
        "--dtype",
        default=DTYPES[0],
        help="type of the activations in both models: float32 (default) or bfloat16",
    )
    add(
        "--tensor-parallel-size",
        metavar="N",
        type=int,
        default=1,
        help="devices over which both models are sharded (default: 1)",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    options = make_parser(prog).parse_args(arguments)
    return run_command(prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure the quality; write `quality.json` and print the results.

    Raises:
        ConfigError: An option is invalid; nothing has been written.
        CheckpointError: A folder or a text cannot be read, or the result not written.
    """
    for name, low in _COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        check_integer(ConfigError, flag, getattr(options, name), low=low)
    check_choice(ConfigError, "--dtype", options.dtype, DTYPES)
    folder = model_folder(options.model, "--model")
    reference = model_folder(options.reference, "--reference")
    form = _check_models(options, folder, reference)
    quality = importlib.import_module("jaxspec.train.quality")
    tokenizer = Tokenizer.from_folder(str(open_checkpoint(folder).tokenizer_folder))
    texts = [text for name in options.text for text in _texts_of(name)]
    pieces = quality.cut(
        quality.chosen(texts, options.documents),
        tokenizer.encode,
        length=options.length,
        num_rows=options.rows,
    )
    if not len(pieces):
        allowed = f"files with {options.rows} pieces of {options.length} tokens"
        hint = "Give more texts, or a smaller --length or --rows."
        raise wrong_argument(ConfigError, "--text", allowed, options.text, hint)
    mesh = importlib.import_module("jaxspec.sharding").make_mesh(
        options.tensor_parallel_size
    )
    plain, own = (
        quality.Reader(one, mesh, dtype=options.dtype) for one in (reference, folder)
    )
    found = quality.compare(
        plain, own, pieces, num_rows=options.rows, title="reading with both models"
    )
    made = Quality(
        reference=Path(options.reference).name or reference.resolve().name,
        texts=", ".join(Path(name).name for name in options.text),
        dtype=options.dtype,
        length=options.length,
        weight_bytes=own.num_bytes,
        **asdict(found),
    )
    path = write_quality(open_checkpoint(folder).folder, made)
    print(f"{made.table(form)}\n\n{path}: {made.line()}")


def _check_models(options: argparse.Namespace, folder: Path, reference: Path) -> str:
    """Check that two models can be compared; return the quantization of the first."""
    name = "--reference"
    own, plain = open_checkpoint(folder), open_checkpoint(reference)
    scheme = scheme_of(own.config)
    if scheme is None:
        hint = "Its weights are not quantized; see `jaxspec_checkpoints convert`."
        allowed = "a quantized checkpoint"
        raise wrong_argument(ConfigError, "--model", allowed, options.model, hint)
    if scheme_of(plain.config) is not None:
        hint = "It is quantized itself."
        allowed = "an unquantized model"
        raise wrong_argument(ConfigError, name, allowed, options.reference, hint)
    if own.sizes != plain.sizes:
        allowed = f"a model with the sizes of {options.model}"
        hint = f"It has {plain.sizes}, and the other {own.sizes}."
        raise wrong_argument(ConfigError, name, allowed, options.reference, hint)
    return scheme.describe()


def _texts_of(name: str) -> list[str]:
    """Return the texts of a file: each line of a .jsonl file, else the whole file."""
    found = list(read_texts(name))
    is_lines = ".jsonl" in Path(name).suffixes[-2:]
    return found if is_lines else ["".join(found)]


if __name__ == "__main__":
    sys.exit(main())
