"""Owns `python -m jaxspec run-batch`: answers an OpenAI batch file, offline.

Imports jax only after the command line has been checked.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.command_line import CommandParser, parse_flags, run_command
from jaxspec.engine.arg_utils import AsyncEngineArgs, engine_args
from jaxspec.errors import ConfigError, wrong_argument
from jaxspec.exit import interrupts_end
from jaxspec.serve.flags import add_settings, read_settings

PROG = "python -m jaxspec run-batch"
# Settings of the server that change responses.
SETTINGS = """
    response_role trust_request_chat_template strict_roles enable_auto_tool_choice
    tool_call_parser tool_parser_plugin exclude_tools_when_tool_choice_none
    enable_prompt_tokens_details per_request_spec_decode_metrics
    enable_per_request_metrics return_tokens_as_token_ids reject_unknown_fields
    max_request_s
""".split()


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = CommandParser(
        prog=prog,
        description="Answer the requests of a file in OpenAI's batch format with a "
        "Gemma model, without a server. The output has one line per request, in the "
        "same order, with its response or error. The default model is the bundled "
        "pair.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the same as --model"
    )
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i",
        "--input-file",
        metavar="FILE",
        required=True,
        help="requests, one JSON object per line: custom_id, method (POST), url "
        "(/v1/chat/completions or /v1/completions) and body",
    )
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="responses in the order of the requests; an existing file is replaced",
    )
    add_settings(parser.add_argument_group("responses"), SETTINGS)
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; return the exit code."""
    options = parse_flags(make_parser(prog), arguments)
    return run_command(prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Answer the batch.

    Raises:
        ArgumentError: An option or the input file is invalid.
        CommandError: The output cannot be written, or the engine died.
    """
    source, target = Path(options.input_file), Path(options.output_file)
    with interrupts_end():
        batch = importlib.import_module("jaxspec.serve.batch")
    requests = batch.read_batch(source)
    _check_output(target, source)
    values = vars(options)
    args = engine_args(values)
    num_errors = batch.run(args, read_settings(values), requests, target)
    print(f"{len(requests)} requests, {num_errors} of them with errors: {target}")


def _check_output(target: Path, source: Path) -> None:
    """Check that the output can be written, and is not the input.

    Raises:
        ConfigError: It cannot.
    """
    place = target if target.exists() else target.absolute().parent
    hint = ""
    if target.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        hint = "Choose a file in an existing folder that you may write to."
    elif target.exists() and target.samefile(source):
        hint = "It is the input file, which would be lost."
    if hint:
        raise wrong_argument(
            ConfigError,
            "output_file",
            "the path of a file that can be written",
            str(target),
            hint,
            described_as="--output-file",
        )


if __name__ == "__main__":
    sys.exit(main())
