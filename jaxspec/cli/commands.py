"""The subcommands of `python -m jaxspec` and their arguments.

Imports the subcommand's module only when it runs: jax takes seconds, `--help` must not.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxspec.command_line import CommandParser, json_flag, run_command
from jaxspec.config.methods import DEFAULT_DRAFT_TOKENS
from jaxspec.config.token_tree import TREE_KEY
from jaxspec.engine.model_folders import BUNDLED_DRAFT, BUNDLED_TARGET
from jaxspec.exit import interrupts_end
from jaxspec.extras import needs_extra
from jaxspec.version import __version__

_MODULES = {"generate": "jaxspec.cli.generate", "chat": "jaxspec.cli.chat"}
# Subcommands with their own parsers, which have the engine's flags.
_OWN = {
    "serve": "jaxspec.serve.__main__",
    "run-batch": "jaxspec.cli.run_batch",
    "plan": "jaxspec.cli.plan",
    "compile": "jaxspec.cli.compile",
    "quality": "jaxspec.cli.quality",
    "bench": "jaxspec.bench.__main__",
    "collect-env": "jaxspec.cli.collect_env",
}
# Keys of --speculative-config that name a proposer, and keys that set the number of
# drafts.
_PROPOSER_KEYS = {"model", "method"}
_COUNT_KEYS = {"num_speculative_tokens", TREE_KEY}


def make_parser(prog: str = "python -m jaxspec") -> CommandParser:
    """Make the parser of all subcommands."""
    parser = CommandParser(
        prog=prog,
        description="Speculative decoding for Gemma 2 and 3.",
    )
    version = f"jaxspec {__version__}"
    parser.add_argument("-v", "--version", action="version", version=version)
    commands = parser.add_subparsers(
        title="subcommands", metavar="COMMAND", dest="command"
    )
    generate = commands.add_parser(
        "generate",
        help="continue a prompt, and show the speed-up of speculation",
        description="Stream the answer to PROMPT, then run the same request without "
        "speculation and compare the two.",
    )
    _add_generate_arguments(generate)
    chat = commands.add_parser(
        "chat",
        help="chat in the terminal, with local models or with a server",
        description="Answer line by line; /help lists all commands.",
    )
    _add_chat_arguments(chat)
    commands.add_parser("serve", help="serve a model with OpenAI's API")
    commands.add_parser(
        "run-batch", help="answer a file of requests in OpenAI's batch format"
    )
    commands.add_parser(
        "plan",
        help="show the memory plan of an engine, also for devices that are not present",
    )
    commands.add_parser(
        "compile",
        help="compile programs ahead of time, also for devices that are not present",
    )
    commands.add_parser("quality", help="measure the effect of quantization on texts")
    commands.add_parser("bench", help="measure plain decoding and speculation")
    commands.add_parser(
        "collect-env", help="print versions, devices and settings for a bug report"
    )
    for name, subparser in commands.choices.items():
        subparser.set_defaults(module=_MODULES.get(name))
    return parser


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("use a server instead of local models")
    server.add_argument(
        "--url", help="server with OpenAI's API, such as http://127.0.0.1:8000"
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's API key (default: OPENAI_API_KEY of the environment)",
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
        help="send the prompt as a user's message (default for models with a chat "
        "template)",
    )
    form.add_argument(
        "--raw",
        dest="is_chat",
        action="store_false",
        default=None,
        help="continue the prompt as plain text, without a chat template",
    )
    _add_model_arguments(parser.add_argument_group("models"))
    _add_sampling_arguments(parser.add_argument_group("sampling"), max_tokens=128)
    parser.add_argument(
        "--no-compare",
        dest="is_compared",
        action="store_false",
        help="do not repeat the request without speculation",
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
        help="draft model, or '[ngram]' to copy from the text itself (default: no "
        f"speculation; with the default model: {BUNDLED_DRAFT})",
    )
    models.add_argument(
        "--ngram-prompt-lookup-max",
        metavar="N",
        type=int,
        help="maximum n-gram length of '[ngram]', which requires this",
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
        help="further options of speculation, such as '{\"draft_vocab_size\": 2048}'",
    )
    models.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    models.add_argument(
        "--quantization",
        metavar="KIND",
        help="store the model's matrices in int8, int4 or fp8; changes texts",
    )
    models.add_argument(
        "--speculative-model-quantization",
        metavar="KIND",
        help="store the draft model's matrices in int8, int4 or fp8; changes only "
        "the speed",
    )
    models.add_argument(
        "--quantize-embedding",
        action="store_true",
        help="store the embedding of quantized models in int8",
    )
    models.add_argument(
        "--compilation-cache-dir",
        metavar="DIR",
        default="auto",
        help="folder of compiled programs, or gs://BUCKET/FOLDER (default: the user's "
        "cache folder)",
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
        help="0 (default) always chooses the most likely token",
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
        "--ignore-eos", action="store_true", help="continue after the end of the text"
    )


def main(arguments: Sequence[str] | None, prog: str) -> int:
    """Run one command line; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser(prog)
    if given and given[0] in _OWN:
        return _run_own(given[0], given[1:], f"{parser.prog} {given[0]}")
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


def _run_own(command: str, arguments: Sequence[str], prog: str) -> int:
    """Run a subcommand that parses its own arguments; return the exit code."""

    def run() -> int:
        with interrupts_end(), needs_extra("serve", "This command"):
            module = importlib.import_module(_OWN[command])
        return module.main(arguments, prog=prog)

    return run_command(prog, run)


def _choose_models(options: argparse.Namespace) -> None:
    """Set the default models and number of drafts.

    Without a model: the bundled pair. A named target without a proposer runs without
    speculation.
    """
    config = options.speculative_config
    given = set(config) if isinstance(config, dict) else set()
    has_drafts = options.speculative_model is not None or bool(given & _PROPOSER_KEYS)
    if options.model is None:
        options.model = BUNDLED_TARGET
        if not has_drafts:
            options.speculative_model, has_drafts = BUNDLED_DRAFT, True
    is_counted = options.num_speculative_tokens is not None or given & _COUNT_KEYS
    if has_drafts and not is_counted:
        options.num_speculative_tokens = DEFAULT_DRAFT_TOKENS
