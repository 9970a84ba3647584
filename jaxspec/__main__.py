"""Owns `jaxspec` and `python -m jaxspec`: the subcommands and their arguments.

Imports what a subcommand needs only when it runs: jax takes seconds, `--help` must not.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxspec.command_line import CommandParser, json_flag, run_command
from jaxspec.config.methods import DEFAULT_DRAFT_TOKENS
from jaxspec.config.token_tree import TREE_KEY
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.exit import end, interrupts_end
from jaxspec.version import __version__

_MODULES = {"generate": "jaxspec.cli.generate", "chat": "jaxspec.cli.chat"}
# Command lines of their own, with the engine's flags.
_OWN = {
    "serve": "jaxspec.serve.__main__",
    "plan": "jaxspec.cli.plan",
    "compile": "jaxspec.cli.compile",
    "quality": "jaxspec.cli.quality",
    "bench": "jaxspec.bench.__main__",
}
PROG = "python -m jaxspec"
# Keys of --speculative-config in place of flags.
_NAMING_DRAFTS = {"model", "method"}
_SAYING_HOW_MANY = {"num_speculative_tokens", TREE_KEY}


def make_parser(prog: str = PROG) -> CommandParser:
    """The parser of the whole command line; `command` names the module that runs."""
    parser = CommandParser(
        prog=prog,
        description="Speculative decoding for Gemma 2 and 3.",
    )
    told = f"jaxspec {__version__}"
    parser.add_argument("-v", "--version", action="version", version=told)
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
    chat = commands.add_parser(
        "chat",
        help="talk in the terminal, with models loaded here or a server's",
        description="Answer line by line; /help lists the commands there are.",
    )
    _add_chat_arguments(chat)
    commands.add_parser("serve", help="serve a model with OpenAI's API")
    commands.add_parser(
        "plan",
        help="tell what an engine would take of a device, which need not be here",
    )
    commands.add_parser(
        "compile", help="compile programs ahead, also for devices that are not here"
    )
    commands.add_parser(
        "quality", help="measure what quantization took from a checkpoint's texts"
    )
    commands.add_parser("bench", help="measure plain decoding and speculation")
    for name, subparser in commands.choices.items():
        subparser.set_defaults(module=_MODULES.get(name))
    return parser


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("a server, in place of models loaded here")
    server.add_argument(
        "--url", help="of a server with OpenAI's API, as http://127.0.0.1:8000"
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="for the server (default: the environment's OPENAI_API_KEY)",
    )
    _add_model_arguments(parser.add_argument_group("models"))
    _add_sampling_arguments(parser.add_argument_group("sampling"), max_tokens=512)


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="is_chat",
        action="store_true",
        default=None,
        help="write the prompt as a user's turn (default, if the model was trained on "
        "conversations)",
    )
    form.add_argument(
        "--raw",
        dest="is_chat",
        action="store_false",
        default=None,
        help="continue the bare prompt",
    )
    _add_model_arguments(parser.add_argument_group("models"))
    _add_sampling_arguments(parser.add_argument_group("sampling"), max_tokens=128)
    parser.add_argument(
        "--no-compare",
        dest="is_compared",
        action="store_false",
        help="leave out the run without speculation",
    )


def _add_model_arguments(models: argparse._ArgumentGroup) -> None:
    models.add_argument(
        "--model",
        metavar="NAME",
        help=f"folder, .gguf file or name (default: {BUNDLED_TARGET})",
    )
    models.add_argument(
        "--speculative-model",
        metavar="NAME",
        help="the draft model, or '[ngram]' to copy from the text itself (default: no "
        f"drafts; with the default model: {BUNDLED_DRAFT})",
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
        help=f"draft tokens per round (default: {DEFAULT_DRAFT_TOKENS})",
    )
    models.add_argument(
        "--speculative-config",
        metavar="JSON",
        type=json_flag,
        help="what else there is to say of drafts, as '{\"draft_vocab_size\": 2048}'",
    )
    models.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    models.add_argument(
        "--quantization",
        metavar="KIND",
        help="keep the model's matrices in int8, int4 or fp8; it changes texts",
    )
    models.add_argument(
        "--speculative-model-quantization",
        metavar="KIND",
        help="the same for the draft model: it changes the speed alone",
    )
    models.add_argument(
        "--quantize-embedding",
        action="store_true",
        help="keep the embedding of models that are quantized in int8",
    )
    models.add_argument(
        "--compilation-cache-dir",
        metavar="DIR",
        default="auto",
        help="where compiled programs are kept (default: the user's cache folder)",
    )


def _add_sampling_arguments(
    sampling: argparse._ArgumentGroup, *, max_tokens: int
) -> None:
    sampling.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=max_tokens,
        help="default: %(default)s",
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


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run one command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser(prog)
    if given and given[0] in _OWN:
        own = importlib.import_module(_OWN[given[0]])
        return own.main(given[1:], prog=f"{parser.prog} {given[0]}")
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return 0

    def run() -> int | None:
        if getattr(options, "url", None) is None:
            _choose_models(options)
        with interrupts_end():
            module = importlib.import_module(options.module)
        return module.run(options)

    return run_command(f"{parser.prog} {options.command}", run)


def _choose_models(options: argparse.Namespace) -> None:
    """Settle the models and how many drafts: the bundled pair where none is named.

    A named target without drafts runs alone.
    """
    config = options.speculative_config
    given = set(config) if isinstance(config, dict) else set()
    has_drafts = options.speculative_model is not None or bool(given & _NAMING_DRAFTS)
    if options.model is None:
        options.model = BUNDLED_TARGET
        if not has_drafts:
            options.speculative_model, has_drafts = BUNDLED_DRAFT, True
    is_counted = options.num_speculative_tokens is not None or given & _SAYING_HOW_MANY
    if has_drafts and not is_counted:
        options.num_speculative_tokens = DEFAULT_DRAFT_TOKENS


def script() -> NoReturn:
    """Run as the program `jaxspec`, which is installed with the package."""
    end(main(prog="jaxspec"))


if __name__ == "__main__":
    end(main())
