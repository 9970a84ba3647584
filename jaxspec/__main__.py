"""Owns `python -m jaxspec`: the subcommands, their arguments, how errors are shown.

Imports what a subcommand needs only when it runs: jax takes seconds, `--help` must not.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxspec.errors import ArgumentError
from jaxspec_checkpoints import CheckpointError

BUNDLED_TARGET = "jaxspec/tiny-gemma2"
BUNDLED_DRAFT = "jaxspec/tiny-gemma2-draft"
# Exit codes: argparse's for a wrong argument, the shell's for an interrupt.
WRONG_ARGUMENT, INTERRUPTED = 2, 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` names the module that runs."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec",
        description="Speculative decoding for Gemma 2.",
    )
    commands = parser.add_subparsers(
        title="subcommands", metavar="COMMAND", dest="command"
    )
    generate = commands.add_parser(
        "generate",
        help="continue a prompt, and show what speculation gained",
        description="Stream the answer to PROMPT, then run the same request without "
        "speculation and compare the two.",
    )
    _add_generate_arguments(generate)
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="is_chat",
        action="store_true",
        default=True,
        help="put the prompt into Gemma's turn format (default)",
    )
    form.add_argument(
        "--raw", dest="is_chat", action="store_false", help="continue the bare prompt"
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model", metavar="NAME", help=f"folder or name (default: {BUNDLED_TARGET})"
    )
    models.add_argument(
        "--speculative-model",
        metavar="NAME",
        help="the draft model, or '[ngram]' to copy from the text itself (default with "
        f"the default model: {BUNDLED_DRAFT})",
    )
    models.add_argument(
        "--ngram-prompt-lookup-max",
        metavar="N",
        type=int,
        help="most tokens that '[ngram]' looks for (it needs this)",
    )
    models.add_argument(
        "--num-speculative-tokens",
        metavar="K",
        type=int,
        default=4,
        help="draft tokens per round (default: %(default)s)",
    )
    models.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    models.add_argument(
        "--compilation-cache-dir",
        metavar="DIR",
        default="auto",
        help="where compiled programs are kept (default: the user's cache folder)",
    )
    _add_sampling_arguments(parser.add_argument_group("sampling"))
    parser.add_argument(
        "--no-compare",
        dest="is_compared",
        action="store_false",
        help="leave out the run without speculation",
    )


def _add_sampling_arguments(sampling: argparse._ArgumentGroup) -> None:
    sampling.add_argument(
        "--max-tokens", metavar="N", type=int, default=128, help="default: %(default)s"
    )
    sampling.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="0, the default, takes the most likely token",
    )
    sampling.add_argument("--top-p", metavar="P", type=float, default=1.0)
    sampling.add_argument("--top-k", metavar="N", type=int, default=0)
    sampling.add_argument("--min-p", metavar="P", type=float, default=0.0)
    sampling.add_argument(
        "--seed",
        metavar="N",
        type=int,
        help="same seed, same text (default above temperature 0: 0)",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end of the text"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if options.model is None:
        options.model = BUNDLED_TARGET
        options.speculative_model = options.speculative_model or BUNDLED_DRAFT
    try:
        if options.speculative_model is None:
            raise ArgumentError(
                f"--model {options.model} needs a draft of its family: name one with "
                "--speculative-model."
            )
        command = importlib.import_module(f"jaxspec.{options.command}")
        command.run(options)
    except (ArgumentError, CheckpointError) as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENT
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
